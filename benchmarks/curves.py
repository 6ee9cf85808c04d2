"""Loss curves of runs that should agree: how far they are apart, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.machine import markdown

Curve = Sequence[float]  # a number for each step
Curves = Mapping[str, Curve]  # of each run


def gap(losses: Curve, reference: Curve) -> list[float]:
    """Absolute difference at the same step."""
    return [abs(a - b) for a, b in zip(losses, reference, strict=True)]


def largest(gap: Curve) -> tuple[float, int]:
    """(largest gap, the step it occurs at, counted from 1)."""
    value = max(gap)
    return value, [*gap].index(value) + 1


def gap_table(gaps: Curves) -> str:
    """Markdown."""
    header = ["run", "largest gap", "at step", "largest of steps 1 to 10", "of 11 to 100"]
    rows = []
    for name, each in gaps.items():
        value, step = largest(each)
        figures = [max(each[:10]), max(each[10:100]), fmean(each[-100:])]
        rows.append([name, f"{value:.1e}", step, *(f"{figure:.1e}" for figure in figures)])
    return markdown([*header, "mean of the last 100"], rows)


@dataclass(frozen=True)
class Column:
    """One comparison of the picture."""

    title: str
    losses: Curves
    gaps: Curves  # of runs that are in `losses`, in whose colours they are drawn
    gap_title: str
    limits: Mapping[str, float] = field(default_factory=dict)  # of the gaps, by what they are of


def draw(columns: Sequence[Column], file: Path) -> None:
    """In each column all losses, and below them each gap's largest value so far, on a log axis."""
    figure, grid = plt.subplots(
        2,
        len(columns),
        figsize=(5.5 * len(columns), 8.5),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, above, below in zip(columns, *grid, strict=True):
        draw_column(column, above, below)
    grid[0][0].set(ylabel="training loss of every step")
    grid[1][0].set(ylabel="gap, the largest so far")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def draw_column(column: Column, above: Axes, below: Axes) -> None:
    colours = dict(zip(column.losses, plt.colormaps["tab10"].colors, strict=False))
    for name, loss in column.losses.items():
        above.plot(range(1, len(loss) + 1), loss, color=colours[name], linewidth=0.8, label=name)
    for name, each in column.gaps.items():
        so_far = list(accumulate(each, max))
        below.plot(range(1, len(each) + 1), so_far, color=colours[name], label=name)
    for name, limit in column.limits.items():
        below.axhline(limit, color="black", linestyle="--", linewidth=0.8)
        below.annotate(
            f"tolerance of {name}",
            (1, limit),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
    above.set(title=column.title)
    below.set(yscale="log", xlabel="step", title=column.gap_title)
    above.legend(fontsize=9)
    for panel in (above, below):
        panel.grid(alpha=0.3)
