"""Train the same model at several layouts on this machine, and check that the numbers are equal
and the work is divided.

    python tools/compare_layouts.py --preset quickstart --micro-batch-size 2 --steps 3 \\
        tensor=2 tensor=2,data=2,sequence
    python tools/compare_layouts.py --preset quickstart --num-layers 2 tensor=4:2d pipeline=2

A LAYOUT is `serial`, or comma-separated words: tensor=N, data=N and pipeline=N for the number of
processes; tensor=4:2d, tensor=8:2.5d:2 (depth 2) or tensor=8:3d for another --tensor-parallel-mode;
context=N for processes that share the tokens of a sample, by all-to-all, and context=N:p2p over a
ring; `sequence` for sequence parallelism; virtual=N for virtual stages of each pipeline rank;
schedule=KIND for the pipeline's schedule; zero=N for a ZeRO stage. Each layout is trained by its
own processes, with the same seed and samples (random tokens without --data-path). Training is in
fp64 without dropout, unless flags ask for either (an unmodified model of transformers has the
dropout of its config.json, the same at every layout).
Flags of pretrain.py may follow (--kind is its --model), except those of layout, checkpoints,
records and evaluation; values of these in presets are ignored.

Exit status: 0 all are equal, 1 a difference is beyond --tolerance, 2 a wrong argument, a failure,
or equal numbers that prove nothing (a norm that is zero or never finite, a loss or weights that do
not change, a parameter without a gradient).
"""

from __future__ import annotations

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

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import positive, writable
from megatron.config.parse import parse, whole_program
from megatron.config.training import LoggingConfig, TrainingConfig
from megatron.data.files import write_atomically
from megatron.errors import UsageError, flag, switch
from tools.layouts.job import Job, of_pretraining, open_samples, program_of
from tools.layouts.layout import parse_layout
from tools.layouts.processes import count_gpus, on_ranks
from tools.report.numbers import aligned

if TYPE_CHECKING:
    from tools.layouts.train import Report

# Larger than the differences between correct layouts; bf16 and fp16 keep 8 and 11 bits.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
DIFFERENCES = ("loss", "norm", "gradient", "weight")
PRECISION = {"--bf16", "--no-bf16", "--fp16", "--pure-bf16"}
# Training settings that a comparison refuses, by reason.
REFUSED = {
    "a LAYOUT says it, such as tensor=2,sequence": (
        *("tensor_model_parallel_size", "model_parallel_size", "sequence_parallel"),
        *("tensor_parallel_mode", "tensor_parallel_depth"),
        *("context_parallel_size", "cp_comm_type"),
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
    """LAYOUT [LAYOUT ...]: serial, or e.g. tensor=2,data=2,sequence, data=2,zero=3, or
    tensor=4:2d."""

    steps: int = 3
    """Number of optimizer steps of each layout, from the start of training."""

    against: str = "serial"
    """Layout that the others are compared with; not serial for a model too large for a process."""

    tolerance: float | None = None
    """Largest accepted relative difference of losses, gradient norms, gradients and weights; by
    default depends on the precision."""

    kind: str | None = None
    """Kind of model, or module:NAME of your own; by default that of the preset's
    table [model], or the one in its name, or else gpt2."""

    json: Path | None = None
    """JSON file to write, with a row per layout."""

    def __post_init__(self) -> None:
        if not self.layouts:
            raise UsageError("LAYOUT", None, "given", works=("tensor=2",))
        positive(self, "steps", "tolerance")
        writable(self, "json")


@dataclass(frozen=True, kw_only=True)
class ComparedTraining(TrainingConfig):
    train_iters: int = 1000


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the comparison; returns the exit status."""
    with whole_program(environ), TemporaryDirectory() as folder:
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
    """(the settings, the name of the precision). Dropout, precision and layout of presets are
    ignored. Raises UsageError for flags that would do nothing."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments if word[:2] == "--"}
    for reason, names in REFUSED.items():
        for spelt in given & {spelling for n in names for spelling in (flag(n), switch(n, False))}:
            raise UsageError(spelt, None, f"left out: {reason}")
    # If a precision flag is given, those of presets are switched off.
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
    """The job of each layout, by name, the reference first. Raises ValueError for a layout at which
    this model or batch cannot be trained, and for data that cannot be read."""
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
        except UsageError as error:  # its suggestion may be refused here, so it is dropped
            cause = error.about(error.flag, error.value)
            raise ValueError(f"layout {layout.name}: {cause}") from None
    open_samples(config)
    return jobs


def run(jobs: Mapping[str, Job]) -> dict[str, list[Report]]:
    """The reports of each layout, by rank; raises ChildProcessError if one fails."""
    if count_gpus() < max(job.ranks for job in jobs.values()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise only some layouts would train on GPUs
    from tools.layouts.train import train_layout

    reports = {}
    for name, job in jobs.items():
        try:
            reports[name] = on_ranks(job.ranks, train_layout, job)
        except ChildProcessError as error:
            raise ChildProcessError(f"layout {name}: {error}") from None
    return reports


def row(name: str, reports: Sequence[Report], reference: Report) -> dict[str, Any]:
    """A layout's row in the JSON file. Differences are relative, and None if not finite; lists are
    by rank."""
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
    """The largest relative difference; NaN or infinite if just one of two values is not finite, as
    in a step that fp16 skips."""
    pairs = zip(found, wanted, strict=True)
    return float(
        np.max([abs(a - b) / abs(b) for a, b in pairs if isfinite(a) or isfinite(b)], initial=0)
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    costs = ("matrix GFLOPs", "parameters between steps, MB", "saved, MB", "sent, MB", "calls")
    lines = [["layout", *DIFFERENCES, *costs]]
    for each in rows:
        differences = [each[f"{name}_difference"] for name in DIFFERENCES]
        lines.append(
            [
                each["layout"],
                *("no number" if value is None else f"{value:.1e}" for value in differences),
                f"{max(each['matmul_flops']) / 1e9:,.3f}",
                f"{max(each['parameter_bytes']) / 1e6:,.3f}",
                f"{max(each['saved_bytes']) / 1e6:,.3f}",
                by_axis(each["sent_bytes"], lambda value: f"{value / 1e6:,.3f}"),
                by_axis(each["calls"], str),
            ]
        )
    return aligned(lines)


def by_axis(ranks: Sequence[Mapping[str, int]], shown: Callable[[int], str]) -> str:
    axes = dict.fromkeys(name for each in ranks for name in each)
    most = {name: max(each.get(name, 0) for each in ranks) for name in axes}
    return ", ".join(f"{name} {shown(value)}" for name, value in most.items()) or "none"
