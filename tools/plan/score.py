"""Predicted seconds of measured iterations, and how far they are off.

A file of rows is CSV with the columns of `Row`; others are ignored. Three figures say how right the
predictions are: their errors; the share of pairs in the right order, of layouts of one model, batch
and number of GPUs whose times differ by more than 5 %; and the share of such groups in which the
fastest predicted layout is within 5 % of the fastest one.

An anchor is a measured row, too. Rows with its hidden size, tensor-parallel size and micro-batch
take as long for each layer as it does: kernels of the same shapes on the same hosts. Its own error
is not counted.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron.errors import UsageError
from megatron.libraries import Library
from tools.plan.hardware import Hardware
from tools.plan.software import gpt2, step_in
from tools.plan.timing import predict
from tools.plan.trace import Step

figures = Library("matplotlib.figure", "a run without --picture")

NEAR = 0.05  # of the time: closer layouts are a tie
VOCABULARY = 50_257  # of GPT-2
MULTIPLE = 128  # to which it is padded, times the tensor-parallel size
Key = tuple[int, int, int]
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A measured iteration of a GPT-2. sequence: tokens; global_batch, micro_batch: samples.
    recompute: none or full; where a file does not say so, none in a server, full beyond it."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    iteration_ms: float
    recompute: str = ""
    place: str = field(default="", compare=False)  # file and line

    def __post_init__(self) -> None:
        ranks = self.tensor * self.data * self.pipeline
        wrong = {
            f"gpus is {self.gpus}, tensor x data x pipeline {ranks}": ranks != self.gpus,
            "pipeline does not divide layers": self.layers % self.pipeline,
            "tensor does not divide heads": self.heads % self.tensor,
            "data x micro_batch does not divide global_batch": (
                self.global_batch % (self.data * self.micro_batch)
            ),
            "recompute is neither none nor full": self.recompute not in ("", "none", "full"),
            "iteration_ms is not above 0": not self.iteration_ms > 0,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(what)

    @property
    def shapes(self) -> Key:
        """The sizes that decide the time of a layer."""
        return self.hidden, self.tensor, self.micro_batch

    @property
    def group(self) -> tuple[int, ...]:
        """Layouts with the same one do the same work on as many GPUs."""
        model = self.hidden, self.heads, self.layers, self.sequence
        return *model, self.gpus, self.global_batch


def read_rows(file: Path, name: str) -> list[Row]:
    """name: of the flag. Raises UsageError that names the line."""
    columns = {each.name: each for each in fields(Row) if each.name != "place"}
    needed = [name for name in columns if name != "recompute"]
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            lost = [each for each in needed if each not in (reader.fieldnames or ())]
            if lost:
                raise UsageError(name, file, f"a table with the columns {', '.join(lost)}")
            rows = [_row(values, columns, f"{file}:{reader.line_num}") for values in reader]
    except (OSError, ValueError) as error:
        raise UsageError(name, file, f"a table of measured iterations ({error})") from error
    if not rows:
        raise UsageError(name, file, "a table with a row at least")
    return rows


def _row(values: Mapping[str, str], columns: Iterable[str], place: str) -> Row:
    given: dict[str, Any] = {"recompute": values.get("recompute") or ""}
    try:
        given |= {each: float(values[each]) for each in columns if each != "recompute"}
        whole = {
            each: int(given[each]) for each in given if each not in ("recompute", "iteration_ms")
        }
        if any(given[each] != number or number < 1 for each, number in whole.items()):
            raise ValueError("sizes are whole numbers above 0")
        return Row(**(given | whole), place=place)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


def step_of(row: Row, hardware: Hardware, software: str, precision: str) -> Step:
    """The step that the row measured, of this project or of a program of the authors."""
    is_in_server = row.gpus <= hardware.devices_per_server
    # The rows say nothing of their vocabulary. Unpadded at t = 1 and padded beyond is what fits.
    is_padded = row.tensor > 1 or software == "this project"
    config = gpt2(
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        sequence=row.sequence,
        vocabulary=VOCABULARY,
        multiple=MULTIPLE if is_padded else 1,
        recompute=row.recompute or ("none" if is_in_server else "full"),
        micro_batch=row.micro_batch,
        global_batch=row.global_batch,
        tensor=row.tensor,
        pipeline=row.pipeline,
    )
    return step_in(software, config, row.gpus, precision, hardware.device)


def score(
    rows: Sequence[Row], hardware: Hardware, software: str, anchors: Sequence[Row] = ()
) -> Found:
    """JSON. hardware: with the figures of this software (software.find_hardware)."""
    precision = hardware.default_precision if software == "this project" else "fp16"
    scales = _scales(anchors, hardware, software, precision)
    found = []
    for row in rows:
        step, scale = step_of(row, hardware, software, precision), scales.get(row.shapes, 1.0)
        predicted = 1000 * predict(step, hardware, scale).total
        found.append(
            {each.name: getattr(row, each.name) for each in fields(row) if each.name != "place"}
            | {"predicted": predicted, "measured": row.iteration_ms}
            | {"error": predicted / row.iteration_ms - 1}
            | {"is_anchor": row in anchors, "is_anchored": row.shapes in scales}
        )
    counted = [abs(each["error"]) for each in found if not each["is_anchor"]]
    if not counted:
        raise UsageError("--rows", None, "rows that are not all anchors")
    return {
        "hardware": hardware.name,
        "software": software,
        "rows": found,
        "mean_error": fmean(counted),
        "median_error": median(counted),
        "worst_error": max(counted),
        **_order(list(zip(rows, (each["predicted"] for each in found), strict=True))),
    }


def _scales(
    anchors: Sequence[Row], hardware: Hardware, software: str, precision: str
) -> dict[Key, float]:
    """By shapes, the factor of a layer's time with which the predicted time is the measured one:
    the median of several anchors."""
    scales = defaultdict[Key, list[float]](list)
    for row in anchors:
        step = step_of(row, hardware, software, precision)
        scales[row.shapes].append(_scale(step, hardware, row.iteration_ms / 1000))
    return {shapes: median(each) for shapes, each in scales.items()}


def _scale(step: Step, hardware: Hardware, seconds: float) -> float:
    """By the rule of false position: the time is nearly linear in the factor."""
    low, high = 0.5, 1.0
    first, second = (predict(step, hardware, each).total - seconds for each in (low, high))
    for _ in range(20):
        if abs(second) < 1e-9 * seconds or first == second:
            break
        low, high = high, max(0.0, high - second * (high - low) / (second - first))
        first, second = second, predict(step, hardware, high).total - seconds
    return high


def _order(predictions: Sequence[tuple[Row, float]]) -> Found:
    groups = defaultdict[tuple[int, ...], list[tuple[float, float]]](list)
    for row, predicted in predictions:
        groups[row.group].append((row.iteration_ms, predicted))
    several = [each for each in groups.values() if len(each) > 1]
    right = [*_right(several)]
    picks = [
        min(group, key=lambda each: each[1])[0] <= (1 + NEAR) * min(group)[0] for group in several
    ]
    return {
        "order_accuracy": fmean(right) if right else None,
        "pairs": len(right),
        "picks_near_the_best": sum(picks),
        "picks": len(picks),
    }


def _right(groups: Iterable[Iterable[tuple[float, float]]]) -> Iterator[bool]:
    """For each pair of different times, whether the predicted ones are in the same order."""
    for group in groups:
        for (a, x), (b, y) in combinations(group, 2):
            if max(a, b) > (1 + NEAR) * min(a, b):
                yield (a < b) == (x < y)


def text(found: Found) -> str:
    rows = found["rows"]
    lines = [
        f"{found['software']} on {found['hardware']}: {len(rows)} rows, "
        f"{sum(each['is_anchored'] for each in rows)} of them with an anchor of their shapes",
        f"error of a prediction: mean {found['mean_error']:.1%}, median "
        f"{found['median_error']:.1%}, worst {found['worst_error']:.1%}",
    ]
    if found["pairs"]:
        lines.append(
            f"order: {found['order_accuracy']:.1%} of {found['pairs']} pairs right; the best "
            f"predicted layout is within 5 % of the best one in {found['picks_near_the_best']} of "
            f"{found['picks']} groups"
        )
    worst = sorted(rows, key=lambda each: -abs(each["error"]))[:3]
    for each in worst:
        layout = f"t {each['tensor']}, d {each['data']}, p {each['pipeline']}"
        lines.append(
            f"  off most: hidden {each['hidden']}, {layout}, micro-batch {each['micro_batch']}: "
            f"{each['predicted']:.0f} ms, measured {each['measured']:.0f}"
        )
    return "\n".join(lines)


def draw(file: Path, found: Found) -> None:
    """Picture of the predicted over the measured time, by tensor-parallel size."""
    figure = figures.Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = found["rows"]
    for tensor in sorted({each["tensor"] for each in rows}):
        own = [each for each in rows if each["tensor"] == tensor]
        measured = [each["measured"] for each in own]
        left.plot(measured, [each["predicted"] for each in own], ".", label=f"t = {tensor}")
        right.plot(measured, [100 * each["error"] for each in own], ".")
    ends = [f(each["measured"] for each in rows) for f in (min, max)]
    left.plot(ends, ends, color="black", linewidth=0.5)
    left.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    left.legend()
    right.axhline(0, color="black", linewidth=0.5)
    right.set(xscale="log", xlabel="measured, ms", ylabel="error, %")
    figure.suptitle(f"{found['software']} on {found['hardware']}: {found['mean_error']:.1%}")
    figure.savefig(file, dpi=120)
