"""The commands of each stage: a data set, then both orders side by side at every depth."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig
from megatron.errors import UsageError, flag
from tools.command import Command, on_all, python, shown
from tools.paper.data import RACE_TRAIN
from tools.paper.figure7.ending import is_result
from tools.paper.results import result_files
from tools.stages import Stage

Order = Literal["pre-ln", "post-ln"]
ORDERS: tuple[Order, ...] = ("pre-ln", "post-ln")
TOKENIZER = "BertWordPieceLowerCase"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices; paths are absolute."""

    data: Path | None
    output: Path
    preset: Path
    depths: tuple[int, ...]
    rates: tuple[float, ...]
    vocab_size: int


@dataclass(frozen=True)
class Run:
    """One training."""

    order: Order
    depth: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.order}_{self.depth}_{self.rate:g}"


def parse_name(name: str) -> Run:
    """The run of this name."""
    order, depth, rate = name.split("_")
    assert order in ORDERS
    return Run(order, int(depth), float(rate))


def runs_of(settings: Settings) -> list[Run]:
    """Runs in the order of training; the two orders at one depth and rate are together."""
    both = product(settings.rates, settings.depths)
    return [Run(order, depth, rate) for rate, depth in both for order in ORDERS]


def metrics_file(output: Path, run: Run) -> Path:
    return output / "runs" / run.name / "metrics.jsonl"


def plan(settings: Settings, cores: int) -> list[Stage]:
    runs = runs_of(settings)
    pairs = zip(runs[::2], runs[1::2], strict=True)
    names = [run.name for run in runs]
    report = python("-m", "tools.paper.figure7.report", "--output", settings.output,
                    "--runs", *names)  # fmt: skip
    figures = result_files(settings.output, "figure7")
    return [
        *data_stages(settings, cores),
        *(training_stage(settings, pair, cores) for pair in pairs),
        Stage(name="report", commands=(report,), outputs=figures),
    ]


def data_stages(settings: Settings, cores: int) -> list[Stage]:
    """corpus, clean (with dedup), vocabulary, sentences."""
    corpus = settings.output / "corpus"
    if settings.data is None:
        raw, inputs = corpus / "raw.jsonl", ()
        collect = python("-m", "tools.corpus.harvest", "--output", raw)
    else:
        raw, inputs = corpus / "extract", (settings.data / RACE_TRAIN,)
        collect = python("-m", "tools.corpus.extract", "--input", *inputs, "--format", "json",
                         "--key", "article", "--source", "race", "--output", raw)  # fmt: skip
    steps = (("clean", raw), ("dedup", corpus / "clean"))
    clean = [
        on_all(python("-m", f"tools.corpus.{step}", "--input", source, "--output", corpus / step),
               cores)
        for step, source in steps
    ]  # fmt: skip
    text, folder = corpus / "dedup", settings.output / "vocabulary"
    train = python(
        "tools/train_tokenizer.py", "--input", text, "--tokenizer-type", TOKENIZER,
        "--vocab-size", str(settings.vocab_size), "--output-dir", folder,
    )  # fmt: skip
    split = python(
        "tools/preprocess_data.py", "--input", text, "--split-sentences",
        "--tokenizer-type", TOKENIZER, "--vocab-file", folder / "vocab.txt",
        "--output-prefix", settings.output / "data" / "train",
    )  # fmt: skip
    return [
        Stage(name="corpus", commands=(collect,), inputs=inputs, outputs=(raw,)),
        Stage(
            name="clean",
            commands=tuple(clean),
            outputs=tuple(corpus / step for step, _ in steps),
        ),
        Stage(name="vocabulary", commands=(train,), outputs=(folder,)),
        Stage(
            name="sentences",
            commands=(on_all(split, cores),),
            outputs=(settings.output / "data",),
        ),
    ]


def training_stage(settings: Settings, pair: tuple[Run, ...], cores: int) -> Stage:
    """Both orders at the same time, each on half of the cores."""
    run = pair[0]
    return Stage(
        name=f"{run.depth} layers, rate {run.rate:g}",
        commands=tuple(pretrain(settings, run, max(1, cores // len(pair))) for run in pair),
        side_by_side=True,
        inputs=(settings.preset,),
        outputs=tuple(metrics_file(settings.output, run).parent for run in pair),
    )


def pretrain(settings: Settings, run: Run, threads: int) -> Command:
    """One training. If it diverges, it is drawn up to that step and does not end the other one."""
    file = metrics_file(settings.output, run)
    command = python(
        "pretrain_bert.py", *training_flags(run, shown(settings.preset)),
        "--data-path", settings.output / "data" / "train_text_sentence",
        "--metrics-file", file,
        OMP_NUM_THREADS=str(threads),
    )  # fmt: skip
    return replace(command, label=f"{run.order} {run.depth}", accepts=partial(is_result, file))


def training_flags(run: Run, preset: str) -> list[str]:
    return ["--preset", preset, "--residual-order", run.order,
            "--num-layers", str(run.depth), "--lr", f"{run.rate:g}"]  # fmt: skip


def check_settings(settings: Settings) -> None:
    """Raises ValueError, naming the flag, for what pretrain_bert.py would refuse."""
    for name in ("depths", "rates"):
        values = getattr(settings, name)
        if not values or len(set(values)) < len(values) or min(values) <= 0:
            raise UsageError(flag(name), " ".join(map(str, values)), "above 0, and each given once")
    for run in runs_of(settings):
        training_config(run, settings.preset).check(1)


def training_config(run: Run, preset: Path) -> PretrainBertConfig:
    return parse(PretrainBertConfig, training_flags(run, str(preset)), {})
