"""Predicted seconds of measured iterations, and how far they are off.

A file of rows is CSV with the columns of `Row`; others are ignored. Three figures say how right the
predictions are: their errors; the share of pairs in the right order, of layouts of one model, batch
and number of GPUs whose times differ by more than 5 %; and the share of such groups in which the
fastest predicted layout is within 5 % of the fastest one.

An anchor is a measured row, too. Rows of the same shapes take as long for each layer as it does:
their kernels are the same, on the same hosts. It is left out of all three figures itself.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron.errors import UsageError
from tools.plan.hardware import Hardware
from tools.plan.layers import Layer, Shape
from tools.plan.software import gpt2, step_in
from tools.plan.timing import layer_seconds, predict
from tools.plan.trace import Step
from tools.report.figures import PALETTE, picture

NEAR = 0.05  # of the time: closer layouts are a tie
VOCABULARY = 50_257  # of GPT-2
MULTIPLE = 128  # to which it is padded, times the tensor-parallel size
Key = tuple[int | str, ...]
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A measured iteration of a GPT-2. sequence: tokens; global_batch, micro_batch: samples.

    vocabulary: 0 where a file does not say so, for GPT-2's, which is then padded at tensor > 1
    alone: with that the authors' rows of one server fit. recompute: none, selective or full; where
    a file does not say so, none in a server and full beyond it.
    """

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
    virtual: int = 1
    sequence_parallel: int = 0
    vocabulary: int = 0
    recompute: str = ""
    place: str = field(default="", compare=False)  # file and line

    def __post_init__(self) -> None:
        ranks = self.tensor * self.data * self.pipeline
        wrong = {
            f"gpus is {self.gpus}, tensor x data x pipeline {ranks}": ranks != self.gpus,
            "pipeline x virtual does not divide layers": self.layers
            % (self.pipeline * self.virtual),
            "heads does not divide hidden": self.hidden % self.heads,
            "tensor does not divide heads": self.heads % self.tensor,
            "data x micro_batch does not divide global_batch": (
                self.global_batch % (self.data * self.micro_batch)
            ),
            "sequence_parallel is 0 or 1": self.sequence_parallel > 1,
            "recompute is none, selective or full": (
                self.recompute not in ("", "none", "selective", "full")
            ),
            "iteration_ms is above 0": not 0 < self.iteration_ms < inf,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(what)

    @property
    def group(self) -> Key:
        """Layouts with the same one do the same work on as many GPUs."""
        model = self.hidden, self.heads, self.layers, self.sequence, self.vocabulary
        return *model, self.gpus, self.global_batch


COLUMNS = {each.name: each for each in fields(Row) if each.name != "place"}
NEEDED = {name for name, each in COLUMNS.items() if each.default is MISSING}


def read_rows(file: Path, name: str) -> list[Row]:
    """name: of the flag. Raises UsageError that names the line."""
    place = str(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader, rows = csv.reader(stream), list[Row]()
            names = [each.strip() for each in next(reader, [])]
            if len({*names}) < len(names):
                raise ValueError("a column is there twice")
            for values in reader:
                if any(map(str.strip, values)):
                    place = f"{file}:{reader.line_num}"
                    if len(values) != len(names):
                        raise ValueError(f"{len(values)} values of {len(names)} columns")
                    rows.append(_row(dict(zip(names, values, strict=True)), place))
    except (OSError, ValueError, OverflowError, csv.Error) as error:
        columns = ", ".join(each for each in COLUMNS if each in NEEDED)
        allowed = f"a table with the columns {columns}, with commas between ({place}: {error})"
        raise UsageError(name, file, allowed) from error
    if not rows:
        raise UsageError(name, file, "a table with a row at least")
    return rows


def _row(values: Mapping[str, str], place: str) -> Row:
    given: dict[str, Any] = {}
    for name in COLUMNS.keys() & values.keys():
        if text := values[name].strip():
            kind = COLUMNS[name].type
            given[name] = text if kind == "str" else float(text)
            if kind == "int":
                if not given[name] >= (name in NEEDED) or given[name] % 1:
                    raise ValueError(f"{name} is {text}, not a whole number above 0")
                given[name] = int(given[name])
    if lost := NEEDED - given.keys():
        raise ValueError(f"without {min(lost)}")
    return Row(**given, place=place)


def step_of(row: Row, hardware: Hardware, software: str, precision: str) -> Step:
    """The step that the row measured, of this project or of a program of the authors."""
    is_in_server = row.gpus <= hardware.devices_per_server
    is_padded = row.vocabulary or row.tensor > 1 or software == "this project"
    try:
        config = gpt2(
            num_layers=row.layers,
            hidden_size=row.hidden,
            num_attention_heads=row.heads,
            seq_length=row.sequence,
            vocab_size=row.vocabulary or VOCABULARY,
            make_vocab_size_divisible_by=MULTIPLE if is_padded else 1,
            recompute_granularity=row.recompute or ("none" if is_in_server else "full"),
            micro_batch_size=row.micro_batch,
            global_batch_size=row.global_batch,
            tensor_model_parallel_size=row.tensor,
            pipeline_model_parallel_size=row.pipeline,
            num_virtual_stages_per_pipeline_rank=row.virtual,
            sequence_parallel=bool(row.sequence_parallel),
        )
        return step_in(software, config, row.gpus, precision, hardware.device)
    except ValueError as error:
        raise UsageError("--rows", row.place, f"a layout of this project ({error})") from error


def score(
    rows: Sequence[Row], hardware: Hardware, software: str, anchors: Sequence[Row] = ()
) -> Found:
    """JSON. hardware: with the figures of this software (software.find_hardware)."""
    precision = hardware.default_precision if software == "this project" else "fp16"
    given = hardware, software, precision
    measured = defaultdict[Shape, list[float]](list)
    for row in anchors:
        step = step_of(row, *given)
        measured[Shape.of(step)].append(_layer_seconds(step, hardware, row))
    anchored = with_layers(hardware, {shape: median(each) for shape, each in measured.items()})
    found, shapes = [], set[Shape]()
    for row in rows:
        step = step_of(row, *given)
        predicted, shape = 1000 * predict(step, anchored).total, Shape.of(step)
        shapes.add(shape)
        found.append(
            {name: getattr(row, name) for name in COLUMNS}
            | {"place": row.place, "predicted": predicted, "measured": row.iteration_ms}
            | {"error": predicted / row.iteration_ms - 1}
            | {"is_anchor": row in anchors, "is_anchored": shape in measured}
        )
    pairs = zip(rows, found, strict=True)
    counted = [(row, each) for row, each in pairs if not each["is_anchor"]]
    if not counted:
        raise UsageError("--rows", None, "rows that are not all anchors")
    if not measured.keys() <= shapes:
        places = (r.place for r in anchors if Shape.of(step_of(r, *given)) not in shapes)
        raise UsageError("--anchors", next(places), "of the shapes of a row at least")
    errors = [abs(each["error"]) for _, each in counted]
    return {
        "hardware": hardware.name,
        "software": software,
        "rows": found,
        "mean_error": fmean(errors),
        "median_error": median(errors),
        "worst_error": max(errors),
        **_order([(row, each["predicted"]) for row, each in counted]),
    }


def with_layers(hardware: Hardware, seconds: Mapping[Shape, float]) -> Hardware:
    """The hardware with these times of layers, forward and backward."""
    layers = (
        Layer(shape=shape, forward=each / 3, backward=each * 2 / 3)
        for shape, each in seconds.items()
    )
    return replace(hardware, layers=(*layers, *hardware.layers))


def _layer_seconds(step: Step, hardware: Hardware, row: Row) -> float:
    """The seconds of a layer with which the predicted time is the measured one, by the rule of
    false position: the time is nearly linear in them."""
    seconds, shape = row.iteration_ms / 1000, Shape.of(step)

    def excess(layer: float) -> float:
        return predict(step, with_layers(hardware, {shape: layer})).total - seconds

    high = layer_seconds(step, hardware)
    low = high / 2
    first, second = excess(low), excess(high)
    for _ in range(20):
        if abs(second) < 1e-9 * seconds:
            return high
        if first == second:
            break
        low, high = high, max(0.0, high - second * (high - low) / (second - first))
        first, second = second, excess(high)
    allowed = "a time that some speed of its layers explains"
    raise UsageError("--anchors", row.place, f"{allowed}: the rest alone takes longer")


def _order(predictions: Sequence[tuple[Row, float]]) -> Found:
    groups = defaultdict[Key, list[tuple[float, float]]](list)
    for row, predicted in predictions:
        groups[row.group].append((row.iteration_ms, predicted))
    several = [each for each in groups.values() if len(each) > 1]
    right = [*in_order(several)]
    picks = [
        min(group, key=lambda each: each[1])[0] <= (1 + NEAR) * min(group)[0] for group in several
    ]
    return {
        "order_accuracy": fmean(right) if right else None,
        "pairs": len(right),
        "picks_near_the_best": sum(picks),
        "picks": len(picks),
    }


def in_order(groups: Iterable[Iterable[tuple[float, float]]]) -> Iterator[bool]:
    """For each pair of different times, whether the predicted ones are in the same order."""
    for group in groups:
        for (a, x), (b, y) in combinations(group, 2):
            if max(a, b) > (1 + NEAR) * min(a, b):
                yield (a - b) * (x - y) > 0


def text(found: Found) -> str:
    rows = found["rows"]
    anchored = sum(each["is_anchored"] for each in rows)
    anchors = sum(each["is_anchor"] for each in rows)
    lines = [
        f"{found['software']} on {found['hardware']}: {len(rows)} rows, {anchored} of shapes that "
        f"an anchor has, {anchors} of them anchors themselves",
        f"error of a prediction: mean {found['mean_error']:.1%}, median "
        f"{found['median_error']:.1%}, worst {found['worst_error']:.1%}",
    ]
    if not all(each["recompute"] for each in rows):
        lines.insert(1, "assumed: no recomputation in a server, full recomputation beyond it")
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
            f"  off most: {Path(each['place']).name}, hidden {each['hidden']}, {layout}, "
            f"micro-batch {each['micro_batch']}: {each['predicted']:.0f} ms, "
            f"measured {each['measured']:.0f}"
        )
    return "\n".join(lines)


def draw(ending: str, found: Found) -> bytes:
    """Picture of the predicted over the measured time, by tensor-parallel size."""
    rows = found["rows"]
    ends = [f(each["measured"] for each in rows) for f in (min, max)]

    def paint(grid: Any) -> None:
        left, right = grid
        for tensor in sorted({each["tensor"] for each in rows}):
            own = [each for each in rows if each["tensor"] == tensor]
            measured = [each["measured"] for each in own]
            left.plot(measured, [each["predicted"] for each in own], ".", label=f"t = {tensor}")
            right.plot(measured, [100 * each["error"] for each in own], ".")
        left.plot(ends, ends, color=PALETTE["ink"], linewidth=0.5)
        left.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        left.legend()
        right.axhline(0, color=PALETTE["ink"], linewidth=0.5)
        right.set(xscale="log", xlabel="measured, ms", ylabel="error, %")

    title = f"{found['software']} on {found['hardware']}: {found['mean_error']:.1%}"
    return picture(paint, ending, (9, 4), (1, 2), title)
