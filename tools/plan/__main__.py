"""Predict memory, communication and time of a training run before it is started. Needs no GPU.

    python tools/plan.py --preset scripts/presets/gpt2_scaling_8.3b.toml --gpus 512 --hardware dgx2h
    python tools/plan.py --kind huggingface --hf-model DIR --seq-length 1024 --gpus 2
    python tools/plan.py figure5 --hardware dgx2h    # section 5.1 of the paper, predicted
    python tools/plan.py figure3 --hardware p100     # memory of each tensor-parallel mode
    torchrun --nproc-per-node 2 tools/plan.py --measure here.toml --preset quickstart \\
        --tensor-sizes 1 2 --micro-batches 2 4       # time this machine's links and the model's
                                                     # layers; without a preset its links alone
    python tools/plan.py score --rows MEASURED.csv --hardware dgx-a100    # how right it is
    python tools/plan.py tables --hardware dgx-a100  # published tables, each from its first row
    python tools/plan.py schedule --kind 1f1b --pipeline 4 --micro-batches 8 --picture FILE.png
    python tools/plan.py --mtbf 3.1 --gpus 16384 --run CHECKPOINTS --detection-seconds 60
                                                     # how often to save, and the useful time

Every flag of pretraining may follow the preset; --kind KIND is pretrain.py's --model. The model
itself is traced without memory (tools/plan/); constants are in scripts/hardware/. Each stage of
a pipeline is planned: memory is that of the fullest stage, time that of the slowest one plus the
schedule's bubble. The word schedule proves and shows a pipeline schedule. With --mtbf HOURS, or
--mtbf published (scripts/interruptions.toml), the question is how often to save.

Exit status: 0 the plan fits, 1 it does not fit in the memory of a device, 2 a wrong argument.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.config import help as helps
from megatron.config.checks import needs, non_negative, positive, writable
from megatron.config.launch import world_size
from megatron.config.model import RecomputeGranularity
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, whole_program
from megatron.data.files import write_atomically
from megatron.errors import UsageError, flag, spelling
from megatron.parallel.schedules import check, schedule
from tools.layouts.job import of_pretraining, program_of
from tools.plan import gantt, interruptions, search
from tools.plan.hardware import PROGRAMS, gpu_here, load_hardware
from tools.plan.layers import variants
from tools.report.figures import drawable

PAPERS = "dgx2h"  # the machine of the paper, 2018
MODELS = {"--preset", "--hf-model"}  # flags that say what to plan or to time
MOST_ROWS = 12  # most layouts that --search prints


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    json: Path | None = None
    """JSON file for all results."""

    picture: Path | None = None
    """PNG or SVG file: parts of a plan's time and memory; of lost time with --mtbf; predicted
    beside measured times with score and tables; for figure5 and figure3 one like the paper's."""

    def __post_init__(self) -> None:
        writable(self, "json")
        drawable(self, "picture")


@dataclass(frozen=True, kw_only=True)
class QuestionConfig(FilesConfig):
    gpus: int
    """Number of devices of the job."""

    hardware: str | None = None
    """Name of a file in scripts/hardware/, or a similar file; by default that of the GPU which this
    machine has."""

    kind: str | None = None
    """Kind of model, or module:NAME of your own; by default that of the preset's
    table [model], or the one in its name, or else gpt2."""

    days: bool = False
    """Print the days that --train-iters take, or --tokens, without evaluations, saves and
    interruptions."""

    tokens: float | None = None
    """Tokens to train on, such as 300e9, in place of --train-iters; with --days."""

    price: float | None = None
    """Price of a device for an hour, of any currency; with --days."""

    search: bool = False
    """List the best of all layouts that fit, with flags to paste, and say why others like the best
    are slower. The global batch stays the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "gpus", "tokens")
        non_negative(self, "price")
        needs(self, "tokens", "days")
        needs(self, "price", "days")


@dataclass(frozen=True, kw_only=True)
class StudyConfig(FilesConfig):
    hardware: str | None = None
    """Name of a file in scripts/hardware/, or a similar file; by default that of the paper. figure5
    needs one that has an anchor; figure3 takes its memory alone."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(FilesConfig):
    rows: Path
    """CSV file of measured iterations of GPT-2, with the columns gpus, global_batch, micro_batch,
    hidden, heads, layers, sequence, tensor, data, pipeline, iteration_ms and, if wanted,
    recompute."""

    hardware: str
    """Name of a file in scripts/hardware/, or a similar file."""

    anchors: Path | None = None
    """CSV file of more such rows: rows with their hidden size, tensor-parallel size and micro-batch
    take as long for each layer as they do."""

    software: str | None = None
    """Program that was measured: "this project", "megatron 2022", ..; by default the one that the
    hardware's file has figures of, or this project."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(FilesConfig):
    kind: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    """Kind of schedule; interleaved takes --virtual."""

    pipeline: int
    """Number of ranks of the pipeline axis."""

    micro_batches: int
    """Micro-batches per step and data-parallel rank."""

    virtual: int = 1
    """Virtual stages per rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "pipeline", "micro_batches", "virtual")
        if self.kind == "interleaved" and self.virtual == 1:
            allowed = "2 or more with --kind interleaved"
            raise UsageError("--virtual", self.virtual, allowed, works=("--virtual", "2"))
        if self.kind != "interleaved" and self.virtual > 1 and self.pipeline > 1:
            allowed = f"1 with --kind {self.kind}"
            raise UsageError("--virtual", self.virtual, allowed, works=("--virtual", "1"))


@dataclass(frozen=True, kw_only=True)
class InterruptionsConfig(FilesConfig):
    mtbf: str
    """Mean hours between interruptions of the job; or published, the rates of
    scripts/interruptions.toml; or a file like that."""

    gpus: int | None = None
    """Number of devices of the job, which gets a row of its own; with hours, the table also scales
    these to other numbers."""

    run: Path | None = None
    """Folder of a run (--save), or its metrics.jsonl: times of its saves, steps and starts; or an
    --output of tools.chaos, which also has those of detection. The flags below win."""

    detection_seconds: float | None = None
    """From an interruption until all ranks have ended."""

    restart_seconds: float | None = None
    """From there until training goes on, with a scheduler's wait; a record knows only the part
    of the program itself."""

    stall_seconds: float | None = None
    """Seconds that a save holds training."""

    save_seconds: float | None = None
    """From the start of a save until it is on disk; by default the stall."""

    step_seconds: float | None = None
    """Seconds of a step, for the interval in steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        times = (f"{name}_seconds" for name in ("detection", "restart", "stall", "save"))
        non_negative(self, *times)
        positive(self, "gpus", "step_seconds")


SIZES = ("tensor_sizes", "context_sizes", "micro_batches", "recomputations")


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    measure: Path
    """File to write with a description of this machine, for --hardware. With a preset also with
    times of its layers, of embedding, logits and loss, and of the optimizer."""

    tensor_sizes: tuple[int, ...] = ()
    """Tensor-parallel sizes to time, with and without sequence parallelism; by default that of
    the layout."""

    context_sizes: tuple[int, ...] = ()
    """Context-parallel sizes to time; by default that of the layout. Products with a tensor size
    that do not divide the number of processes are left out, with a warning."""

    micro_batches: tuple[int, ...] = ()
    """Micro-batch sizes to time; by default that of the layout."""

    recomputations: tuple[RecomputeGranularity, ...] = ()
    """Kinds of recomputation to time; by default that of the layout."""

    def __post_init__(self) -> None:
        writable(self, "measure")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; returns the exit status."""
    given = {word.partition("=")[0] for word in arguments}
    with whole_program(environ):
        if arguments and arguments[0] in STUDIES:
            settings, show = STUDIES[arguments[0]]
            show(parse(settings, arguments[1:], environ))
        elif "--mtbf" in given:
            show_interruptions(parse(InterruptionsConfig, arguments, environ))
        elif "--measure" in given:
            measure(arguments, environ)
        else:
            if not {*MODELS, *helps.WORDS} & given:
                works = ("--preset", "gpt2_scaling_8.3b")
                allowed = "given: it says what to plan, as --hf-model does of --kind huggingface"
                raise UsageError("--preset", None, allowed, works=works)
            program = program_of(arguments, question=QuestionConfig)
            return 0 if plan(parse(program, arguments, environ, description=__doc__)) else 1
    return 0


def plan(config: Any) -> bool:
    """Print the plan, and with --search the layouts that fit; returns whether the settings fit."""
    question, gpus = config.question, config.question.gpus
    if config.model.cpu_offload_activations:  # no layer waits for the copies of those before it
        allowed = "left out: the memory depends on the speed of copies, which a plan does not know"
        raise UsageError("--cpu-offload-activations", None, allowed)
    if question.days and question.tokens is None and config.training.train_iters is None:
        works = ("--tokens", "300e9")
        raise UsageError("--days", None, "given with --train-iters or --tokens", works=works)
    search.check(config, gpus)
    if (name := question.hardware) is None:
        name = gpu_here()
        print(f"--hardware {name}, by nvidia-smi", file=sys.stderr)
    described = load_hardware(name)  # before torch's import, which is slow
    is_known = described.host_bandwidth and described.host_memory_bandwidth
    if config.optimizer.optimizer_cpu_offload and not is_known:
        allowed = f"left out, as the file of {described.name} has no host_bandwidth or "
        allowed += "host_memory_bandwidth"
        raise UsageError("--optimizer-cpu-offload", None, allowed, works=("--hardware", "h200"))

    from tools.plan import fastest, record
    from tools.plan.software import find_hardware
    from tools.plan.trace import Step

    hardware = find_hardware(name, PROGRAMS[0])
    precision = config.precision.name or hardware.default_precision
    planned = record.record(Step(config, gpus, precision, hardware.device), hardware)
    if question.days:
        if (tokens := question.tokens) is None:
            iterations = config.training.train_iters
        else:
            iterations = math.ceil(tokens / planned["tokens_per_step"])
        planned["run"] = record.run(planned, gpus, iterations, question.price)
    print(record.text(planned))
    if question.search:
        found = fastest.Search(config, gpus, hardware, precision, MOST_ROWS)
        planned |= found.record()
        print(f"\n{found.text(planned)}")
    if not planned["fits"]:
        changes = search.smallest_change(config, gpus, hardware, precision)
        planned["smallest_change"] = changes
        print(f"\nsmallest change that fits: {changes or 'none, on any number of devices'}")
    _write(question, planned, record.draw, planned)
    return bool(planned["fits"])


def show_figure5(settings: StudyConfig) -> None:
    hardware = load_hardware(settings.hardware or PAPERS)  # before torch's import, which is slow
    if hardware.anchor is None:
        works = ("--hardware", PAPERS)
        raise UsageError("--hardware", settings.hardware, "hardware with an anchor", works=works)

    from tools.plan import figure5, software

    _show(settings, figure5, figure5.study(software.anchored(hardware)))


def show_figure3(settings: StudyConfig) -> None:
    hardware = load_hardware(settings.hardware or "p100")

    from tools.plan import figure3

    _show(settings, figure3, figure3.study(hardware))


def show_tables(settings: StudyConfig) -> None:
    hardware = load_hardware(settings.hardware or "dgx-a100")

    from tools.plan import tables

    _show(settings, tables, tables.study(hardware))


def show_score(settings: ScoreConfig) -> None:
    known = load_hardware(settings.hardware).software
    software = settings.software or next(iter(known), PROGRAMS[0])
    if software not in PROGRAMS:
        allowed, works = f"one of {', '.join(PROGRAMS)}", ("--software", PROGRAMS[0])
        raise UsageError("--software", software, allowed, works=works)

    from tools.plan import score
    from tools.plan.software import find_hardware

    hardware = find_hardware(settings.hardware, software)
    rows = score.read_rows(settings.rows, "--rows")
    anchors = score.read_rows(settings.anchors, "--anchors") if settings.anchors else []
    _show(settings, score, score.score(rows, hardware, software, anchors))


def show_schedule(settings: ScheduleConfig) -> None:
    sizes = settings.pipeline, settings.micro_batches, settings.virtual
    lists = schedule(settings.kind, *sizes)
    facts = check(lists, settings.virtual)
    if settings.json is None:
        print(gantt.text(lists, facts))
    _write(settings, gantt.record(lists, facts), gantt.draw, lists, facts)


def show_interruptions(settings: InterruptionsConfig) -> None:
    rates = interruptions.read_rates(settings.mtbf, settings.gpus)
    names = ("detection", "restart", "stall", "save", "step")
    stated = {name: getattr(settings, f"{name}_seconds") for name in names}
    found = interruptions.study(rates, *interruptions.times_of(settings.run, stated), settings.gpus)
    _show(settings, interruptions, found)


STUDIES: dict[str, tuple[type[FilesConfig], Callable[[Any], None]]] = {
    "figure5": (StudyConfig, show_figure5),
    "figure3": (StudyConfig, show_figure3),
    "tables": (StudyConfig, show_tables),
    "score": (ScoreConfig, show_score),
    "schedule": (ScheduleConfig, show_schedule),
}


def measure(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    ranks, configs = world_size(environ), []
    if MODELS & {word.partition("=")[0] for word in arguments}:
        config: Any = parse(program_of(arguments, question=MeasureConfig), arguments, environ)
        settings: MeasureConfig = config.question
        configs = variants(
            of_pretraining(config), ranks, *(getattr(settings, each) for each in SIZES)
        )
    else:
        settings = parse(MeasureConfig, arguments, environ)
        for name in SIZES:
            if value := getattr(settings, name):
                allowed = "left out without a model to time"
                works = (*spelling(name, value), "--preset", "quickstart")
                raise UsageError(flag(name), " ".join(map(str, value)), allowed, works=works)

    from megatron.train.launch import launch
    from tools.doctor import description

    everyone, here = ParallelConfig(tensor_model_parallel_size=ranks), "LOCAL_WORLD_SIZE"
    with launch(everyone, environ) as mesh:
        figures = description.measure(mesh, int(environ.get(here, ranks)), configs)
        if figures is not None:
            description.write(settings.measure, figures, mesh.device)
            print(description.shown(figures))


def _show(settings: FilesConfig, module: Any, found: dict[str, Any]) -> None:
    """module: of what was found, with its text and its picture."""
    print(module.text(found))
    _write(settings, found, module.draw, found)


def _write(settings: FilesConfig, found: Any, draw: Callable[..., bytes], *shown: Any) -> None:
    """draw: a picture of what is shown, by the ending of its file."""
    if settings.json is not None:
        write_atomically(settings.json, (json.dumps(found, indent=1) + "\n").encode())
    if settings.picture is not None:
        write_atomically(settings.picture, draw(settings.picture.suffix[1:], *shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
