"""Drawings for pages and for files: one style, in the colours of the page.

A drawing is a function that fills matplotlib's axes.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron.config.checks import writable
from megatron.errors import UsageError, flag
from megatron.libraries import Library, load
from tools.report.sections import COLOURS, Figure, themed

FORMATS = (".png", ".svg")

matplotlib, figures = Library("matplotlib"), Library("matplotlib.figure")

Axes = Any  # matplotlib's, which is imported when a figure is drawn

# {name: colour}, such as "ink" and "accent"; SERIES: those of curves and bars, in order.
PALETTE = {name: light for name, (light, _) in COLOURS.items()}
SERIES = tuple(PALETTE[f"c{number}"] for number in range(6))

# 390 points across: about the width of a phone, where the text therefore keeps its size.
SIZE = (5.4, 3.0)
LARGEST = 1.5  # a figure grows to this many pixels a point

STYLE = {
    "svg.fonttype": "none",  # text stays text: it is searched, copied and read aloud
    "svg.hashsalt": "report",  # the same drawing has the same bytes
    "text.parse_math": False,  # a "$" in a name is a dollar
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": PALETTE["ink"],
    "axes.labelcolor": PALETTE["ink"],
    "axes.edgecolor": PALETTE["line"],
    "xtick.color": PALETTE["ink"],
    "ytick.color": PALETTE["ink"],
    "grid.color": PALETTE["line"],
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def drawable(config: object, field: str) -> None:
    """Refuse a picture that cannot be drawn or written. The field is a Path or None."""
    path: Path | None = getattr(config, field)
    if path is None:
        return
    if path.suffix not in FORMATS:
        works = (flag(field), str(path.with_suffix(FORMATS[0])))
        raise UsageError(flag(field), path, f"a name ending in {' or '.join(FORMATS)}", works=works)
    writable(config, field)
    load("matplotlib", f"a run without {flag(field)}")


def picture(
    paint: Callable[[Any], object],
    ending: str,
    size: tuple[float, float] = SIZE,
    grid: tuple[int, int] = (1, 1),
    title: str = "",
    **save: Any,
) -> bytes:
    """The content of a file that ends in `ending`: png, svg or pdf. size: in inches. grid: rows and
    columns of axes, which `paint` gets as an array; a grid of one is the axes themselves. title: of
    the whole picture."""
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The reader's own fonts have the letters that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = figures.Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=STYLE["font.size"])
        paint(figure.subplots(*grid))
        for axis in (each for axes in figure.axes for each in (axes.xaxis, axes.yaxis)):
            if axis.get_scale() == "log" and axis.isDefault_majfmt:
                axis.set_major_formatter("{x:,g}")  # matplotlib's writes powers as formulas
        if ending == "svg":
            save = {"metadata": {"Date": None}} | save
        figure.savefig(content, format=ending, dpi=130, **save)
    return content.getvalue()


def draw(
    paint: Callable[[Axes], object],
    caption: str = "",
    size: tuple[float, float] = SIZE,
    legend: Sequence[tuple[str, str]] = (),
) -> Figure:
    """A figure of a page: an SVG element in the page's colours. legend: see `Figure`."""
    svg = picture(paint, "svg", size, transparent=True).decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg).group()
    opening = (
        f'<svg {box} style="max-width:{72 * LARGEST * size[0]:.0f}px" role="img" '
        f'aria-label="{escape(caption)}">'
    )
    return Figure(themed(re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)), caption, legend)
