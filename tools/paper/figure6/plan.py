"""The commands of each stage: one data set, a GPT-2 of each size on it, table 3 of each."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.errors import UsageError
from tools.command import python, shown
from tools.paper.corpus import corpus_stages, evaluation_files, training_text
from tools.paper.results import result_files
from tools.paper.training import (
    ZERO_SHOT,
    data_prefix,
    data_stage,
    evaluate,
    pretrain_stage,
    zero_shot_flags,
)
from tools.processes import fit_processes
from tools.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices; paths are absolute."""

    data: Path
    output: Path
    preset: Path
    sizes: tuple[str, ...]
    vocab_size: int
    overlapping_eval: int


@dataclass(frozen=True)
class Size:
    """Size of a model."""

    layers: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.hidden}"


def parse_name(name: str) -> Size:
    """The size of this name. Raises UsageError, naming the flag, if it is none."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", name):
        raise UsageError("--sizes", name, "layers and hidden size", works=("--sizes", "2x64"))
    layers, hidden = map(int, name.split("x"))
    return Size(layers, hidden)


def run_folder(output: Path, size: Size) -> Path:
    return output / "runs" / size.name


def result_file(output: Path, size: Size, task: str) -> Path:
    return run_folder(output, size) / f"{task}.json"


def check_settings(settings: Settings) -> None:
    """Raises ValueError, naming flags, for sizes that cannot be compared or trained."""
    sizes = settings.sizes
    if len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise UsageError("--sizes", " ".join(sizes), "two or more, each once")
    parameters = [12 * size.layers * size.hidden**2 for size in map(parse_name, sizes)]
    if parameters != sorted(parameters):
        raise UsageError("--sizes", " ".join(sizes), "given the smaller before the larger")
    for name in sizes:
        training_config(settings, parse_name(name)).check(1)


def training_flags(size: Size, preset: str) -> list[str]:
    return ["--preset", preset, "--num-layers", str(size.layers),
            "--hidden-size", str(size.hidden)]  # fmt: skip


def training_config(settings: Settings, size: Size) -> PretrainGPT2Config:
    return parse(PretrainGPT2Config, training_flags(size, str(settings.preset)), {})


def plan(settings: Settings, gpus: int, cores: int) -> list[Stage]:
    """The stages from the archives of RACE to the report, in order."""
    output, sizes = settings.output, [parse_name(name) for name in settings.sizes]
    text = training_text(output)
    return [
        *corpus_stages(settings.data, output, cores),
        data_stage(output, text, "gpt2", settings.vocab_size, cores),
        *(training_stage(settings, size, gpus, cores) for size in sizes),
        *(zero_shot_stage(settings, sizes, task, cores) for task in ZERO_SHOT),
        report_stage(settings),
    ]


def training_stage(settings: Settings, size: Size, gpus: int, cores: int) -> Stage:
    return pretrain_stage(
        size.name,
        "gpt2",
        training_flags(size, shown(settings.preset)),
        settings.preset,
        data_prefix(settings.output, "gpt2"),
        run_folder(settings.output, size),
        fit_processes(training_config(settings, size), gpus, cores),
    )


def zero_shot_stage(settings: Settings, sizes: list[Size], task: str, cores: int) -> Stage:
    """One evaluation of all sizes."""
    flags = zero_shot_flags(settings.data, settings.overlapping_eval)[task]
    results = [result_file(settings.output, size, task) for size in sizes]
    commands = [
        evaluate(task, run_folder(settings.output, size) / "checkpoints", flags, result, cores)
        for size, result in zip(sizes, results, strict=True)
    ]
    return Stage(
        name=task,
        commands=tuple(commands),
        inputs=(evaluation_files(settings.data)[task],),
        outputs=tuple(results),
    )


def report_stage(settings: Settings) -> Stage:
    report = python("-m", "tools.paper.figure6.report", "--output", settings.output,
                    "--sizes", *settings.sizes)  # fmt: skip
    return Stage(name="report", commands=(report,),
                 outputs=result_files(settings.output, "figure6"))  # fmt: skip
