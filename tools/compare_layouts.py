"""Train the same model at several layouts on this machine, and compare: the numbers are the same
and the work is divided.

    python -m tools.compare_layouts --preset quickstart --micro-batch-size 2 --steps 3 \
        tensor=2 tensor=2,data=2,sequence

A LAYOUT is `serial`, or words with commas between them: tensor=N, data=N and pipeline=N processes,
tensor=4:2d, tensor=8:2.5d:2 (of depth 2) or tensor=8:3d of another --tensor-parallel-mode,
`sequence` for sequence parallelism, virtual=N stages of each pipeline rank, schedule=KIND of the
pipeline, zero=N for a stage of ZeRO. Each is trained by processes of its own, from the same seed
and the same samples (random tokens without --data-path); in fp64 and without dropout, unless the
command line asks for either (an unmodified model of transformers has the dropout of its
config.json, the same at every layout).
Flags of pretrain.py may follow (--kind is its --model), but for those of layout, checkpoints,
records and evaluation; what presets say of these does not hold.

Exit status: 0 all are equal, 1 a difference is beyond --tolerance, 2 a wrong argument, a failure,
or equal numbers that say nothing (a norm that is zero or never finite, a loss or weights that do
not move, a parameter without a gradient).
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import UsageError, flag, positive, switch, writable
from megatron.config.launch import interruptible
from megatron.config.parse import parse, user_errors
from megatron.config.training import LoggingConfig, TrainingConfig
from megatron.data.files import write_atomically
from tools.layouts.job import Job, of_pretraining, open_samples, program_of
from tools.layouts.layout import parse_layout
from tools.processes import count_gpus, on_ranks

if TYPE_CHECKING:
    from tools.layouts.train import Report

# Above what layouts differ by, of correct ones; bf16 and fp16 keep 8 and 11 bits.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
DIFFERENCES = ("loss", "norm", "gradient", "weight")
PRECISION = {"--bf16", "--no-bf16", "--fp16", "--pure-bf16"}
# Settings of a training that a comparison does not have, and why.
REFUSED = {
    "a LAYOUT says it, such as tensor=2,sequence": (
        *("tensor_model_parallel_size", "model_parallel_size", "sequence_parallel"),
        *("tensor_parallel_mode", "tensor_parallel_depth"),
        *("zero_stage", "use_distributed_optimizer"),
        *("pipeline_model_parallel_size", "pipeline_schedule"),
        *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ),
    "nothing is saved, recorded or evaluated here": (
        *(each.name for kind in (CheckpointConfig, LoggingConfig) for each in fields(kind)),
        *("eval_interval", "eval_iters", "exit_interval", "exit_duration_in_mins"),
        "check_replicas_interval",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    layouts: tyro.conf.Positional[tuple[str, ...]]
    """LAYOUT [LAYOUT ...]: serial, or such as tensor=2,data=2,sequence, data=2,zero=3, or
    tensor=4:2d."""

    steps: int = 3
    """Optimizer steps of each layout, the first ones of a training."""

    against: str = "serial"
    """Layout that the others are compared with: another one for a model too large for a process."""

    tolerance: float | None = None
    """Largest relative difference of losses, gradient norms, gradients and weights that passes; if
    not given, what suits the precision."""

    kind: str | None = None
    """Kind of model, or module:NAME of one's own; if not given, the one that the preset's name
    says, else gpt2."""

    json: Path | None = None
    """File for a row per layout."""

    def __post_init__(self) -> None:
        if not self.layouts:
            raise UsageError("LAYOUT", None, "given", works=("tensor=2",))
        positive(self, "steps", "tolerance")
        writable(self, "json")


@dataclass(frozen=True, kw_only=True)
class ComparedTraining(TrainingConfig):
    train_iters: int = 1000


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit status."""
    with interruptible(environ), user_errors(environ), TemporaryDirectory() as folder:
        config, precision = read_settings(arguments, environ)
        asked = config.comparison
        names = dict.fromkeys(parse_layout(name).name for name in asked.layouts)
        against = parse_layout(asked.against).name
        jobs = plan(config, precision, list(dict.fromkeys([against, *names])), Path(folder))
        reports = run(jobs)
        rows = [row(name, reports[name], reports[against][0]) for name in names]
        batch = jobs[against].config.training.global_batch_size
        print(
            f"{asked.steps} steps of {batch} samples, {precision}, {reports[against][0].device}\n"
            f"Largest relative difference from {against}; cost of a step on the busiest rank\n\n"
            f"{table(rows)}\n"
        )
        if asked.json is not None:
            write_atomically(asked.json, (json.dumps(rows, indent=1) + "\n").encode())
        tolerance, unseen = asked.tolerance or TOLERANCES[precision], reports[against][0].unseen
        beyond = [
            f"{each['layout']}: the difference in {name} is beyond {tolerance:g}"
            for each in rows
            for name in DIFFERENCES
            if not is_within(each[f"{name}_difference"], tolerance)
            and not (unseen and each[f"{name}_difference"] is None)
        ]
        silent = [f"{against}: not compared: {each}" for each in unseen]
        lines = [*beyond, *silent] or [f"All differences are within {tolerance:g}."]
        print("\n".join(lines))
    return 1 if beyond else 2 if unseen else 0


def is_within(value: float | None, tolerance: float) -> bool:
    return value is not None and value <= tolerance


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[Any, str]:
    """(the settings, the name of the precision). What presets say of dropout, precision and layout
    does not hold here. Raises UsageError for flags that would do nothing."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments if word[:2] == "--"}
    for reason, names in REFUSED.items():
        for spelt in given & {spelling for n in names for spelling in (flag(n), switch(n, False))}:
            raise UsageError(spelt, None, f"left out: {reason}")
    # What presets say of them does not hold where one is given.
    names = ("fp16",) if "--pure-bf16" in given else ("fp16", "bf16", "pure_bf16")
    of_presets = [switch(name, False) for name in names] if given & PRECISION else []
    program = program_of(arguments, comparison=ComparisonConfig, training=ComparedTraining)
    words = [*of_presets, *arguments]
    config: Any = parse(program, words, environ, description=str(__doc__))
    model: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "embedding_dropout": None,
        "attention_dropout_rng": "coordinates",
    }
    known = {each.name for each in fields(config.model)}
    model = {n: value for n, value in model.items() if n in known and flag(n) not in given}
    precision = (config.precision.name if given & PRECISION else None) or "fp64"
    return replace(config, model=replace(config.model, **model)), precision


def plan(config: Any, precision: str, names: Sequence[str], folder: Path) -> dict[str, Job]:
    """What each layout trains, by its name, the reference first; raises ValueError for a layout at
    which this model or batch cannot be trained, and for data that cannot be read."""
    layouts = [parse_layout(name) for name in names]
    copies = lcm(*(layout.size("data") for layout in layouts))
    batch = config.training.global_batch_size or config.training.micro_batch_size * copies
    config = replace(config, training=replace(config.training, global_batch_size=batch))
    jobs: dict[str, Job] = {}
    for layout in layouts:
        parallel = replace(config.parallel, **layout.settings)
        jobs[layout.name] = Job(
            config=of_pretraining(replace(config, parallel=parallel)),
            precision=precision,
            ranks=layout.ranks,
            steps=config.comparison.steps,
            folder=folder,
            is_reference=not jobs,
        )
        try:
            jobs[layout.name].config.check(layout.ranks)
        except UsageError as error:  # whose suggestion may be refused here
            cause = UsageError(error.flag, error.value, error.allowed)
            raise ValueError(f"layout {layout.name}: {cause}") from None
    open_samples(config)
    return jobs


def run(jobs: Mapping[str, Job]) -> dict[str, list[Report]]:
    """The reports of each layout, by rank; raises ChildProcessError where one fails."""
    if count_gpus() < max(job.ranks for job in jobs.values()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or some layouts would train on GPUs, others not
    from tools.layouts.train import train_layout

    reports = {}
    for name, job in jobs.items():
        try:
            reports[name] = on_ranks(job.ranks, train_layout, job)
        except ChildProcessError as error:
            raise ChildProcessError(f"layout {name}: {error}") from None
    return reports


def row(name: str, reports: Sequence[Report], reference: Report) -> dict[str, Any]:
    """What the JSON file holds of a layout: differences are relative, None where one is no number;
    lists are by rank."""
    first, counts = reports[0], [each.counts for each in reports]
    differences = {
        "loss": largest(first.losses, reference.losses),
        "norm": largest(first.norms, reference.norms),
        "gradient": first.gradient_difference,
        "weight": first.weight_difference,
    }
    return {
        "layout": name,
        **{f"{n}_difference": each if isfinite(each) else None for n, each in differences.items()},
        "matmul_flops": [each.matmul_flops for each in counts],
        "parameter_bytes": [each.parameter_bytes for each in counts],
        "saved_bytes": [each.saved_bytes for each in counts],
        "sent_bytes": [dict(each.sent_bytes) for each in counts],
        "calls": [dict(each.calls) for each in counts],
    }


def largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; no number where one of both is none, as in a step that fp16
    skips."""
    pairs = zip(found, wanted, strict=True)
    return float(
        np.max([abs(a - b) / abs(b) for a, b in pairs if isfinite(a) or isfinite(b)], initial=0)
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = [
        "layout",
        *DIFFERENCES,
        "matrix GFLOPs",
        "parameters between steps, MB",
        "saved, MB",
        "sent, MB",
        "calls",
    ]
    lines = [header]
    for each in rows:
        differences = [each[f"{name}_difference"] for name in DIFFERENCES]
        busiest = [max(each[name]) for name in ("matmul_flops", "parameter_bytes", "saved_bytes")]
        scales = (1e9, 1e6, 1e6)
        lines.append(
            [
                each["layout"],
                *("no number" if value is None else f"{value:.1e}" for value in differences),
                *(f"{value / scale:,.3f}" for value, scale in zip(busiest, scales, strict=True)),
                by_axis(each["sent_bytes"], lambda value: f"{value / 1e6:,.3f}"),
                by_axis(each["calls"], str),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def by_axis(ranks: Sequence[Mapping[str, int]], shown: Callable[[int], str]) -> str:
    axes = dict.fromkeys(name for each in ranks for name in each)
    most = {name: max(each.get(name, 0) for each in ranks) for name in axes}
    return ", ".join(f"{name} {shown(value)}" for name, value in most.items()) or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
