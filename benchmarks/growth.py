"""How time and memory of this project's training steps grow, beside what they would on paper.

    python benchmarks/growth.py [--preset FILE] [--threads N] [--json FILE] [--picture FILE]

One model, of which one size at a time is changed: layers, width (heads of one size), sequence
length, vocabulary, and the ranks that it is cut over (one thread each). Every point
has processes of its own; those of one axis take turns. The same axes stand beside it for the
paper's largest model on a cluster, on paper alone.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import on_paper
from benchmarks.cases import OURS, Case
from benchmarks.comparison import ROOT, Result, Settings, measure, started
from benchmarks.growth_picture import draw
from benchmarks.growth_report import every_point, growth, summary
from benchmarks.machine import JsonFile, facts, told, write_json
from benchmarks.train_step import read_case
from benchmarks.turns import Contender
from megatron.config.model import RecomputeGranularity

WARM_STEPS = 2
RANKS = "ranks"
# The field of a case that is changed.
FIELDS = {
    "layers": "num_layers",
    "width": "hidden_size",
    "sequence": "sequence",
    "vocabulary": "vocab_size",
}
Point = dict[str, Any]

# The paper's largest model with its batch, and what one V100 of its cluster sustains (section 5.1).
LARGEST = Case(
    name="gpt2_scaling_8.3b",
    num_layers=72,
    hidden_size=3072,
    heads=32,
    vocab_size=51_200,
    batch=8,
    sequence=1024,
)
CLUSTER = {"tensor_parallel": 8, "flops_per_second": 39e12, "bytes_per_second": 300e9}
KINDS: tuple[RecomputeGranularity, ...] = ("none", "full")  # on the cluster
CLUSTER_AXES = {
    "layers": (18, 36, 72, 144, 288),
    "width": (768, 1536, 3072, 6144, 12288),
    "sequence": (512, 1024, 2048, 4096, 8192),
    "vocabulary": (12_800, 25_600, 51_200, 102_400, 204_800),
    RANKS: (1, 2, 4, 8, 16),
}


def at(case: Case, axis: str, value: int) -> Case:
    """The case with this size alone changed; ranks are no part of it."""
    if axis == RANKS:
        return case
    changed = replace(case, **{FIELDS[axis]: value})
    heads = changed.hidden_size * case.heads // case.hidden_size
    return replace(changed, heads=heads)


def settings_at(base: Settings, axis: str, value: int) -> Settings:
    if axis == RANKS:
        return replace(base, tensor_parallel=value, threads=value)
    return replace(base, case=at(base.case, axis, value))


@contextmanager
def processes(points: Mapping[int, Settings]) -> Iterator[dict[str, Contender]]:
    """Of every point by its value, warmed up."""
    with ExitStack() as stack:
        found = {
            str(value): stack.enter_context(started(settings, [OURS]))[OURS]
            for value, settings in points.items()
        }
        for contender in found.values():
            contender.ask("losses", steps=WARM_STEPS)
        yield found


def bytes_of_nothing(base: Settings) -> int:
    """What the first steps of any model load and never give back."""
    case = replace(
        base.case, num_layers=1, hidden_size=8, heads=1, vocab_size=8, sequence=8, batch=1
    )
    with processes({0: replace(base, case=case)}) as found:
        return int(found["0"].ask("memory")[0]["bytes"])


def measured(base: Settings, axis: str, values: Sequence[int], nothing: int) -> list[Point]:
    points = {value: settings_at(base, axis, value) for value in values}
    with processes(points) as found:
        results = measure(base, found)
    return [point(points[value], value, results[str(value)], nothing) for value in values]


def point(settings: Settings, value: int, result: Result, nothing: int) -> Point:
    """Seconds of a step (CPU: of all ranks together), bytes that a rank's model takes at its peak,
    and the same on paper.

    nothing: of `bytes_of_nothing`.
    """
    ranks = settings.tensor_parallel
    step = on_paper.shape(settings.case, ranks)
    return {
        "value": value,
        "seconds": median(result.wall),
        "cpu_seconds": median(result.cpu),
        "rounds": result.wall,
        "bytes": result.peak_memory / ranks - nothing,
        "paper": {
            "flops": on_paper.flops(step),
            "bytes": on_paper.held(step),
            "communicated": on_paper.sent(step),
        },
    }


def expect_seconds(base: Settings, axis: str, points: Sequence[Point], cores: int) -> None:
    """Write what every point would take at the arithmetic a second of the model as it is.

    cores: that the ranks have; where there are more ranks than cores, they share them.
    """
    own = 1 if axis == RANKS else getattr(base.case, FIELDS[axis])
    nearest = min(points, key=lambda each: abs(each["value"] - own))
    rate = nearest["paper"]["flops"] / nearest["seconds"]
    for each in points:
        crowd = max(1.0, each["value"] / cores) if axis == RANKS else 1.0
        each["paper"]["seconds"] = each["paper"]["flops"] / rate * crowd


def cluster(axis: str, value: int) -> Point:
    """Seconds of arithmetic and of communication on paper, by what is computed again."""
    ranks = value if axis == RANKS else int(CLUSTER["tensor_parallel"])
    case = at(LARGEST, axis, value)
    steps = {each: on_paper.shape(case, ranks, each, 2) for each in KINDS}
    return {
        "value": value,
        **{
            granularity: {
                "arithmetic": on_paper.flops(step, causal=False) / CLUSTER["flops_per_second"],
                "communication": on_paper.sent(step) / CLUSTER["bytes_per_second"],
            }
            for granularity, step in steps.items()
        },
    }


def recorded(base: Settings, chosen: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """All that there is to tell. chosen: values by axis."""
    nothing = bytes_of_nothing(base)
    record: dict[str, Any] = {
        **facts("torch"),
        "dtype": base.dtype,
        "threads": base.threads,
        "rounds": base.rounds,
        "case": json.loads(base.case.written()),
        "bytes_of_nothing": nothing,
    }
    print(told(record))
    record["axes"] = {axis: measured(base, axis, chosen[axis], nothing) for axis in chosen}
    for axis, points in record["axes"].items():
        expect_seconds(base, axis, points, record["cores"])
    record["growth"] = {axis: growth(points) for axis, points in record["axes"].items()}
    record["cluster"] = CLUSTER
    record["on_cluster"] = {
        axis: [cluster(axis, value) for value in CLUSTER_AXES[axis]] for axis in chosen
    }
    return record


def main(
    preset: Path = ROOT / "scripts" / "presets" / "gpt2_30m.toml",
    layers: tuple[int, ...] = (1, 2, 4, 8, 16),
    width: tuple[int, ...] = (128, 256, 512, 1024),
    sequence: tuple[int, ...] = (128, 256, 512, 1024, 2048),
    vocabulary: tuple[int, ...] = (1024, 4096, 16384, 65536),
    ranks: tuple[int, ...] = (1, 2, 4),
    dtype: Literal["fp32", "bf16"] = "fp32",
    threads: int = 2,
    vocab_size: int = 8192,
    rounds: int = 5,
    json_file: JsonFile = None,
    picture: Path | None = None,
) -> None:
    """Measure and print.

    Args:
        preset: of pretrain_gpt2.py; model and micro-batch are read from it.
        layers: values of this axis, ascending, or none; so are the next four.
        width: multiples of the preset's head size.
        sequence: tokens of a sample.
        vocabulary: tokens that there are.
        ranks: tensor-parallel, one thread each.
        dtype: of weights and activations.
        threads: but on the axis of ranks.
        vocab_size: on the other axes, where the preset has none.
        rounds: times that every point of an axis has its turn, one step each.
        json_file: where every figure is written.
        picture: PNG.
    """
    base = Settings(
        case=read_case(preset, vocab_size, None, False),
        dtype=dtype,
        threads=threads,
        tensor_parallel=1,
        device="cpu",
        rounds=rounds,
        steps=1,
    )
    lists = zip((*FIELDS, RANKS), (layers, width, sequence, vocabulary, ranks), strict=True)
    record = recorded(base, {axis: values for axis, values in lists if values})
    print(every_point(record), summary(record), sep="\n\n")
    write_json(json_file, record)
    if picture is not None:
        draw(picture, record)


if __name__ == "__main__":
    tyro.cli(main)
