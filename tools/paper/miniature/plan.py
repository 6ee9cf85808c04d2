"""The commands of each stage, and the minutes on two cores that each may take."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainConfig
from tools.command import python, shown
from tools.paper.corpus import corpus_stages, evaluation_files, heldout_text, training_text
from tools.paper.data import RACE_DEV, RACE_TRAIN
from tools.paper.training import (
    TASKS,
    Flags,
    data_prefix,
    data_stage,
    evaluate,
    pretrain_stage,
    under_torchrun,
    zero_shot_flags,
)
from tools.processes import Processes, fit_processes
from tools.stages import Stage

# Minutes on two cores, by stage.
BUDGET = {
    "corpus": 1.0,
    "clean": 2.0,
    "gpt2-data": 1.0,
    "gpt2": 12.0,
    "bert-data": 2.0,
    "bert": 11.0,
    "heldout": 1.0,
    "wikitext103": 4.0,
    "lambada": 0.5,
    "race-data": 0.5,
    "race": 8.0,
    "report": 0.5,
}
RESULTS = ("heldout", "wikitext103", "lambada", "race")
# Flags of RACE's fine-tuning, beside the sizes in the settings.
RACE = ("--epochs", "1", "--lr", "1e-4", "--micro-batch-size", "4", "--global-batch-size", "16",
        "--hidden-dropout", "0", "--attention-dropout", "0",
        "--max-truncated", "1", "--compare-paper")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices; paths are absolute."""

    data: Path
    output: Path
    gpt2_preset: Path
    bert_preset: Path
    tensor_parallel: int
    vocab_size: int
    overlapping_eval: int
    race_train: int
    race_dev: int

    def preset(self, model: str) -> Path:
        return self.gpt2_preset if model == "gpt2" else self.bert_preset


def training_flags(settings: Settings, model: str, preset: str) -> list[str]:
    size = str(settings.tensor_parallel)
    return ["--preset", preset, "--tensor-model-parallel-size", size]


def training_config(settings: Settings, model: str) -> PretrainConfig:
    flags = training_flags(settings, model, str(settings.preset(model)))
    return parse(TASKS[model][1], flags, {})


def choose_processes(settings: Settings, gpus: int, cores: int) -> dict[str, Processes]:
    """Processes of each model. Raises ValueError, naming flags, if preset and sizes do not fit."""
    return {model: fit_processes(training_config(settings, model), gpus, cores) for model in TASKS}


def plan(settings: Settings, processes: dict[str, Processes], cores: int) -> list[Stage]:
    """The stages from the archive of RACE to the report, in order."""
    return [
        *corpus_stages(settings.data, settings.output, cores),
        own_data_stage(settings, "gpt2", cores),
        own_pretrain_stage(settings, "gpt2", processes["gpt2"]),
        own_data_stage(settings, "bert", cores),
        own_pretrain_stage(settings, "bert", processes["bert"]),
        *zero_shot_stages(settings, cores),
        *race_stages(settings, processes["bert"]),
        report_stage(settings),
    ]


def own_data_stage(settings: Settings, model: str, cores: int) -> Stage:
    text = training_text(settings.output)
    return data_stage(settings.output, text, model, settings.vocab_size, cores)


def own_pretrain_stage(settings: Settings, model: str, processes: Processes) -> Stage:
    preset = settings.preset(model)
    return pretrain_stage(
        model,
        model,
        training_flags(settings, model, shown(preset)),
        preset,
        data_prefix(settings.output, model),
        settings.output / model,
        processes,
    )


def zero_shot_stages(settings: Settings, cores: int) -> list[Stage]:
    """heldout, wikitext103, lambada: evaluations of GPT-2 on text that it has not seen."""
    files = evaluation_files(settings.data)
    held_out: Flags = ["--input", heldout_text(settings.output),
                       "--train-data", data_prefix(settings.output, "gpt2")]  # fmt: skip
    flags = {"heldout": held_out, **zero_shot_flags(settings.data, settings.overlapping_eval)}
    checkpoints = settings.output / "gpt2" / "checkpoints"
    results = {task: result_file(settings.output, task) for task in flags}
    return [
        Stage(
            name=task,
            commands=(evaluate(task, checkpoints, own, results[task], cores),),
            inputs=(files[task],) if task in files else (),
            outputs=(results[task],),
        )
        for task, own in flags.items()
    ]


def result_file(output: Path, task: str) -> Path:
    return output / f"{task}.json"


def race_stages(settings: Settings, processes: Processes) -> list[Stage]:
    """race-data: some passages of both archives; race: BERT fine-tuned on them."""
    folder, sides = settings.output / "race", ("train", "dev")
    archives = (settings.data / RACE_TRAIN, settings.data / RACE_DEV)
    counts = (settings.race_train, settings.race_dev)
    unpack = [
        python("-m", "tools.paper.miniature.passages", "--archive", archive,
               "--count", str(count), "--output", folder / side)
        for side, archive, count in zip(sides, archives, counts, strict=True)
    ]  # fmt: skip
    length = training_config(settings, "bert").data.seq_length
    result = result_file(settings.output, "race")
    fine_tune = under_torchrun(
        processes,
        "tasks/main.py", "--task", "RACE",
        "--tensor-model-parallel-size", str(settings.tensor_parallel),
        "--pretrained-checkpoint", settings.output / "bert" / "checkpoints",
        "--train-data", folder / "train", "--valid-data", folder / "dev",
        "--seq-length", str(length), *RACE, "--output", result,
    )  # fmt: skip
    return [
        Stage(
            name="race-data",
            commands=tuple(unpack),
            inputs=archives,
            outputs=tuple(folder / side for side in sides),
        ),
        Stage(name="race", commands=(fine_tune,), outputs=(result,)),
    ]


def report_stage(settings: Settings) -> Stage:
    report = python("-m", "tools.paper.miniature.report", "--output", settings.output)
    files = tuple(settings.output / f"report.{ending}" for ending in ("json", "md", "html"))
    return Stage(name="report", commands=(report,), outputs=files)
