"""Draws a model that is sharded by a plan as figure 3 of the Megatron-LM paper draws a layer: which
weight is cut by columns or by rows, and where f and g stand. A lane is a rank, read downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from megatron.data.files import write_atomically
from megatron.libraries import Library
from tools.report.figures import PALETTE, SERIES, Axes
from tools.report.figures import picture as content_of

patches = Library("matplotlib.patches")

LANES = 2  # ranks that are drawn; the others are like these
BEFORE = ("f", "all-gather of tokens")  # communication of the input; other kinds are of the output
OF_GRADIENT = "sum of the gradient"
POINTS, MARGIN = 72, 6  # of an inch; of both sides of a drawing together
# In points, as all below: of the drawing, a lane, the space between lanes, a weight.
WIDTH, LANE, GAP, ICON = 382, 185, 11, (30, 22)
LETTERS = 76  # of a line
TEXT = 225  # the room beside a weight, over the width of a letter of one point
TITLE, NOTE, MARK, WEIGHT, SPACE = 20, 11, 32, 30, 10  # heights


class Row(NamedTuple):
    """A row of what `--show` prints. cells: its texts. name: of the modules, with * for a number;
    for a style that changes no weight its pattern. times: how many modules; 0 for such a style.
    cut: dim of the weight [in, out] that ranks share out. source: equal for column layers that read
    one tensor. order: ascending in the order in which the model calls its modules."""

    cells: tuple[str, str, str, str, str]
    name: str
    times: int = 0
    cut: int | None = None
    source: int | None = None
    order: int = 0


@dataclass
class Step:
    """Weights between two communications: of the input, and of the output; empty for none."""

    before: str
    source: int | None
    after: str = ""
    weights: list[Row] = field(default_factory=list)


@dataclass
class Block:
    """A module with what is cut in it. notes: what else the plan says of it."""

    name: str
    times: int
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def blocks_of(rows: Sequence[Row]) -> list[Block]:
    """The blocks of a model, in the order of its calls. A layer whose input needs no communication
    joins the block of the layers before it."""
    blocks: list[Block] = []
    readers: dict[int, str] = {}  # the first name, by source
    for row in sorted(rows, key=lambda row: (row.times == 0, row.order)):
        parent, _, name = row.name.rpartition(".")
        _, becomes, _, _, communication = row.cells
        if not row.times:
            fits = (each for each in blocks if fnmatchcase(each.name, row.name))
            if (found := next(fits, None)) is not None:
                found.notes.append(becomes)
            continue
        kinds = communication.split(", ") if communication else []
        before = next((each for each in kinds if each in BEFORE), "")
        after = ", ".join(each for each in kinds if each not in (*BEFORE, OF_GRADIENT))
        is_matmul = row.cut is not None or before or after
        if not is_matmul and OF_GRADIENT not in kinds:
            continue
        block = blocks[-1] if blocks else Block("", 0)
        last = block.steps[-1] if block.steps else None
        if last is not None and not last.after and not before:
            block.name = _common(block.name, parent)
        elif block not in blocks or block.name != parent:
            block, last = Block(parent, row.times), None
            blocks.append(block)
        if OF_GRADIENT in kinds:
            block.notes.append(f"{name}: whole on each rank, {OF_GRADIENT}")
        if not is_matmul:
            continue
        if last is None or row.source is None or last.source != row.source:
            if row.source in readers:
                block.notes.append(f"{name} reads what {readers[row.source]} reads: one {before}")
                before = ""
            last = Step(before, row.source)
            block.steps.append(last)
        if row.source is not None:
            readers.setdefault(row.source, name)
        last.weights.append(row)
        last.after = last.after or after
    return blocks


def _common(name: str, other: str) -> str:
    """The longest module name above both."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def write(file: Path, title: str, rows: Sequence[Row], legend: Sequence[str], ranks: int) -> None:
    """A .png or .svg file. legend: lines below. ranks: size of the tensor axis."""
    blocks = blocks_of(rows)
    lines = [*legend, "Filled: the part of a weight [in, out] that the rank holds."]
    lines = [part for line in lines for part in wrap(line, LETTERS, subsequent_indent="    ")]
    height = 2 * TITLE + sum(map(_height, blocks)) + NOTE * (len(lines) + 1)
    paint = partial(_paint, title=title, blocks=blocks, lines=lines, ranks=ranks, height=height)
    size = (WIDTH + MARGIN) / POINTS, (height + MARGIN) / POINTS
    write_atomically(file, content_of(paint, file.suffix[1:], size))


def _height(block: Block) -> int:
    height = TITLE * bool(block.name) + NOTE * len(block.notes) + SPACE
    for step in block.steps:
        height += SPACE + WEIGHT * len(step.weights)
        height += MARK * (bool(step.before) + bool(step.after))
    return height


def _paint(
    axes: Axes, title: str, blocks: Sequence[Block], lines: Sequence[str], ranks: int, height: int
) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(0, 8, title, size=11, weight="bold", va="center")
    soft = {"size": 8, "color": PALETTE["soft"]}
    for rank, x in enumerate(_lanes()):
        axes.text(x + LANE / 2, TITLE + 8, f"rank {rank} of {ranks}", ha="center", va="center",
                  **soft)  # fmt: skip
    y = float(2 * TITLE)
    for block in blocks:
        if block.name:
            times = f"{block.times} x" * (block.times > 1)
            axes.text(0, y + 10, block.name, size=9, weight="bold", va="center")
            axes.text(WIDTH, y + 10, times, ha="right", va="center", **soft)
            y += TITLE
        for note in block.notes:
            axes.text(0, y + 4, note, va="center", **soft)
            y += NOTE
        for number in range(len(block.steps)):
            y = _paint_step(axes, block, number, ranks, y)
        y += SPACE
    for line in lines:
        axes.text(0, y + 6, line, va="center", **soft)
        y += NOTE


def _lanes() -> list[float]:
    return [rank * (LANE + GAP) for rank in range(LANES)]


def _paint_step(axes: Axes, block: Block, number: int, ranks: int, y: float) -> float:
    """Returns where the next step begins."""
    step = block.steps[number]
    line = {"color": PALETTE["soft"], "linewidth": 1, "zorder": 1}
    middles = [x + LANE / 2 for x in _lanes()]
    if step.before:
        for x in middles:
            axes.plot([WIDTH / 2, x], [y + MARK / 2, y + MARK + SPACE], **line)
        _paint_mark(axes, step.before, y + MARK / 2)
        y += MARK
    elif number > 0 and not block.steps[number - 1].after:
        for x in middles:
            axes.plot([x, x], [y - SPACE, y + SPACE], **line)
    y += SPACE
    height = WEIGHT * len(step.weights)
    for rank, x in enumerate(_lanes()):
        card = {"facecolor": PALETTE["card"], "edgecolor": PALETTE["line"], "linewidth": 0.8}
        axes.add_patch(patches.Rectangle((x, y), LANE, height, zorder=2, **card))
        for line_number, row in enumerate(step.weights):
            _paint_weight(axes, block, row, rank, ranks, x + 6, y + WEIGHT * line_number)
    y += height
    if step.after:
        for x in middles:
            axes.plot([x, WIDTH / 2], [y, y + MARK / 2 + 4], **line)
        _paint_mark(axes, step.after, y + MARK / 2 + 4)
        y += MARK
    return y


def _paint_mark(axes: Axes, text: str, y: float) -> None:
    style = {"facecolor": PALETTE["paper"], "edgecolor": PALETTE["ink"], "linewidth": 1}
    shape = "circle,pad=0.3" if len(text) == 1 else "round,pad=0.3"
    axes.text(WIDTH / 2, y, text, size=9, ha="center", va="center", zorder=3,
              bbox={"boxstyle": shape, **style})  # fmt: skip


def _paint_weight(
    axes: Axes, block: Block, row: Row, rank: int, ranks: int, x: float, y: float
) -> None:
    width, height = ICON
    y += (WEIGHT - height) / 2
    own = [0.0, 0.0, 1.0, 1.0]  # x, y, width and height as shares of the whole
    if row.cut is not None:
        side = 1 - row.cut  # columns lie along x
        own[side], own[2 + side] = rank / ranks, 1 / ranks
    box = (x + own[0] * width, y + own[1] * height), own[2] * width, own[3] * height
    axes.add_patch(patches.Rectangle(*box, facecolor=SERIES[rank], linewidth=0, zorder=3))
    outline = {"facecolor": "none", "edgecolor": PALETTE["ink"], "linewidth": 0.8, "zorder": 4}
    axes.add_patch(patches.Rectangle((x, y), width, height, **outline))
    how = {None: "whole", 0: "rows", 1: "columns"}[row.cut]
    name = row.name.removeprefix(f"{block.name}.")
    times = f"  ({row.times} x)" * (row.times != block.times)
    text = f"{name}: {how}"
    size = min(8, TEXT / len(text))
    axes.text(x + width + 8, y + 5, text, size=size, va="center", zorder=4)
    soft = {"size": 7, "color": PALETTE["soft"], "va": "center", "zorder": 4}
    axes.text(x + width + 8, y + 17, row.cells[3] + times, **soft)
