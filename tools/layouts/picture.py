"""Draws which block of x, W and y of an MLP each rank of a layout holds, as figure 1 of the
Colossal-AI paper (arXiv:2110.14883) does; blocks.py reads the blocks from the code.

    python tools/layouts.py picture --layout tensor=4:2d                          # a table
    python tools/layouts.py picture --layout tensor=8:3d --output layout.svg

A LAYOUT is one of tools/compare_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from megatron.config.parallel import TrainingParallelConfig
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from megatron.libraries import Library
from tools.layouts.layout import Layout, parse_layout
from tools.report.figures import PALETTE, SERIES, Axes, draw, drawable
from tools.report.figures import picture as content_of
from tools.report.numbers import aligned
from tools.report.sections import Figure

if TYPE_CHECKING:
    from tools.layouts.blocks import Block, Blocks, Matrix

patches = Library("matplotlib.patches")

MOST_RANKS = 512  # of a pipeline stage: blocks of more are too small to see
POINTS, MARGIN = 72, 6  # of an inch; of both sides of a drawing together
WIDTH, LINES, LINE = 382, 294, 12  # in points: of the drawing, above its notes, of a line of these
# (left, top, width, height) of each matrix, in points: rows of x, y1 and y2 lie side by side, and
# so do columns of W1 and y1, and of W2 and y2. Not to scale: 4h is drawn as 2h.
PLACES = {
    "x": (14, 154, 86, 132),
    "W1": (114, 70, 168, 66),
    "y1": (114, 154, 168, 132),
    "W2": (296, 16, 86, 120),
    "y2": (296, 154, 86, 132),
}
FONTS = (10.0, 9.0, 8.0, 7.0, 6.0)  # of labels, the largest that fits
SHADES = (0.3, 0.62)  # of the first and the second round of colours
NOTE = "y1 = x W1, y2 = GeLU(y1) W2. Numbers: ranks that hold a block."
OF_ALL = " Grey: all do."
UNLABELLED = "A block without numbers is too small for them: the table has them."


def picture(*, layout: str, output: Path | None = None) -> None:
    """Show which block of x, W1, y1, W2 and y2 of an MLP, y1 = x W1 and y2 = GeLU(y1) W2, each rank
    of a layout holds, read from the code that cuts them. No process is started.

    Args:
        layout: LAYOUT of tools/compare_layouts.py, such as tensor=4:2d or tensor=2,data=2,sequence.
        output: the picture: .png or .svg. If not given, a table is printed.
    """
    drawable(SimpleNamespace(output=output), "output")
    try:
        blocks = read(parse_layout(layout))
    except UsageError as error:
        works = ("--layout", *error.works) if error.works else ()
        raise error.about("--layout", layout, works=works) from None
    if output is None:
        print(table(blocks))
    else:
        content = content_of(partial(paint, blocks=blocks), output.suffix[1:], size_of(blocks))
        write_atomically(output, content)


def layout_figure(layout: Layout) -> Figure:
    """The figure of a layout for a page. Raises UsageError for a layout that cannot be, and for one
    of more than MOST_RANKS ranks."""
    words = ", ".join(layout.name.split(","))  # a phone breaks the line at a blank
    caption = f"Blocks of an MLP that each rank holds: {words}"
    blocks = read(layout)
    return draw(partial(paint, blocks=blocks), caption, size_of(blocks))


def read(layout: Layout) -> Blocks:
    """The blocks of the layout. Raises UsageError as `layout_figure`."""
    # First of all, as factors of a huge number take for ever to find.
    if layout.ranks > MOST_RANKS * layout.size("pipeline"):
        raise UsageError("LAYOUT", layout.name, f"of at most {MOST_RANKS} ranks")
    try:
        TrainingParallelConfig(**layout.settings)
    except UsageError as error:
        cause = error.about(error.flag, error.value)
        raise UsageError("LAYOUT", layout.name, f"one that pretrain.py takes ({cause})") from None

    from tools.layouts.blocks import read_blocks

    return read_blocks(layout)


def table(blocks: Blocks) -> str:
    rows = [("matrix", "ranks", "rows", "columns")]
    for matrix in blocks.matrices:
        for block in matrix.blocks:
            spans = (f"{each.start}:{each.stop}" for each in (block.rows, block.columns))
            rows.append((matrix.name, ranks_in_words(block.ranks, blocks.ranks), *spans))
    shapes = (f"{each.name} [{each.rows}, {each.columns}]" for each in blocks.matrices)
    h = blocks.matrices[0].shape[1]
    return "\n".join([aligned(rows), "", f"{', '.join(shapes)}; h = {h}", *notes(blocks)])


def notes(blocks: Blocks) -> list[str]:
    """Sentences about the parts of the layout that the blocks do not show."""
    layout, found = blocks.layout, []
    if blocks.samples > 1:
        found.append(f"Tokens are those of {blocks.samples} samples, one after another.")
    if layout.zero == 3:
        found.append("W1 and W2 are as they are between steps: a layer in use is gathered.")
    elif layout.zero:
        gradients = " and gradients" * (layout.zero == 2)
        found.append(f"ZeRO stage {layout.zero} cuts optimizer states{gradients}, not W1 and W2.")
    if layout.size("pipeline") > 1:
        found.append("Ranks are those of the first pipeline stage; the others hold other layers.")
    return found


def ranks_in_words(ranks: Sequence[int], number: int) -> str:
    """Ranks of `number` ranks: "all", "0, 1", "0 to 7" or "0, 8 .. 56"."""
    if len(ranks) == number > 1:
        return "all"
    first, last = ranks[0], ranks[-1]
    step = ranks[1] - first if len(ranks) > 3 else 0
    if not step or tuple(ranks) != (*range(first, last + 1, step),):
        return ", ".join(map(str, ranks))
    return f"{first} to {last}" if step == 1 else f"{first}, {first + step} .. {last}"


def size_of(blocks: Blocks) -> tuple[float, float]:
    """In inches."""
    return (WIDTH + MARGIN) / POINTS, (_height(blocks) + MARGIN) / POINTS


def _height(blocks: Blocks) -> int:
    return LINES + LINE * (2 + len(notes(blocks)))


def paint(axes: Axes, blocks: Blocks) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(_height(blocks), 0))
    axes.set_axis_off()
    for line, word in enumerate(blocks.layout.name.split(",")):
        axes.text(0, 8 + 14 * line, word, size=11, weight="bold", va="center")
    fits = [_paint_matrix(axes, matrix, blocks.ranks) for matrix in blocks.matrices]
    is_grey = any(_is_all(each, blocks.ranks) for x in blocks.matrices for each in x.blocks)
    lines = [NOTE + OF_ALL * is_grey, *notes(blocks)] + [UNLABELLED] * (not all(fits))
    for line, text in enumerate(lines):
        style = {"size": 8, "color": PALETTE["soft"], "va": "top"}
        axes.text(0, LINES + LINE * line, text, **style)
    left, top, _, height = PLACES["x"]
    names = [f"sample {sample}" for sample in range(blocks.samples)]
    names = names if 1 < len(names) <= 4 else ["tokens"]
    for row, name in enumerate(names):
        style = {"size": 6.3, "color": PALETTE["soft"], "ha": "center", "va": "center"}
        axes.text(left - 7, top + height * (row + 0.5) / len(names), name, rotation=90, **style)


def _paint_matrix(axes: Axes, matrix: Matrix, ranks: int) -> bool:
    """Returns whether every block has room for its label."""
    left, top, width, height = PLACES[matrix.name]
    axes.text(left, top - 4, matrix.name, size=10, weight="bold", va="baseline")
    shape = f"{matrix.rows} \N{MULTIPLICATION SIGN} {matrix.columns}"
    axes.text(
        left + 5 + 9 * len(matrix.name),
        top - 4,
        shape,
        size=8,
        color=PALETTE["soft"],
        va="baseline",
    )
    across, down = width / matrix.shape[1], height / matrix.shape[0]
    fits = [_paint_block(axes, each, ranks, left, top, across, down) for each in matrix.blocks]
    return all(fits)


def _is_all(block: Block, ranks: int) -> bool:
    """Whether all of several ranks hold the block."""
    return len(block.ranks) == ranks > 1


def _paint_block(
    axes: Axes, block: Block, ranks: int, left: float, top: float, across: float, down: float
) -> bool:
    """across, down: points of a column and of a row. Returns whether its label fits."""
    x, y = left + across * block.columns.start, top + down * block.rows.start
    width, height = across * len(block.columns), down * len(block.rows)
    turn, colour = divmod(block.ranks[0] % (len(SERIES) * len(SHADES)), len(SERIES))
    is_grey = _is_all(block, ranks)
    face = (PALETTE["rest"], SHADES[0]) if is_grey else (SERIES[colour], SHADES[turn])
    style = {"facecolor": face, "edgecolor": PALETTE["paper"], "linewidth": 0.8}
    axes.add_patch(patches.Rectangle((x, y), width, height, **style))
    words = ranks_in_words(block.ranks, ranks)
    for size in FONTS:
        for text in (words, words.replace(" ", "\n")):
            lines = text.split("\n")
            if 0.62 * size * max(map(len, lines)) < width and 1.2 * size * len(lines) < height:
                at = x + width / 2, y + height / 2
                axes.text(*at, text, size=size, ha="center", va="center", linespacing=1)
                return True
    return False
