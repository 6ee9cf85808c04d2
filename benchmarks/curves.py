"""Loss curves of runs that should agree: how far they are apart, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Curves = Mapping[str, Sequence[float]]  # of each run: a number for each step


def largest(gap: Sequence[float]) -> tuple[float, int]:
    """(largest gap, the step it occurs at, counted from 1)."""
    value = max(gap)
    return value, gap.index(value) + 1


def gap_table(gaps: Curves) -> str:
    """Markdown."""
    lines = [
        "| run | largest gap | at step | largest of steps 1 to 10 | of 11 to 100 "
        "| mean of the last 100 |",
        "|---|---|---|---|---|---|",
    ]
    for name, gap in gaps.items():
        value, step = largest(gap)
        last = gap[-100:]
        figures = [max(gap[:10]), max(gap[10:100]), sum(last) / len(last)]
        cells = [name, f"{value:.1e}", str(step), *(f"{each:.1e}" for each in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(losses: Curves, gaps: Curves, file: Path) -> None:
    """All losses in one panel; below it each gap's largest value so far, on a log axis.

    gaps: of runs that are in `losses`, in whose colours they are drawn.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 9), sharex=True, layout="constrained")
    colours = dict(zip(losses, plt.colormaps["tab10"].colors, strict=False))
    for name, loss in losses.items():
        above.plot(range(1, len(loss) + 1), loss, color=colours[name], linewidth=0.8, label=name)
    for name, gap in gaps.items():
        below.plot(range(1, len(gap) + 1), list(accumulate(gap, max)), color=colours[name])
    above.set(ylabel="training loss", title="loss of every step, all runs over each other")
    below.set(yscale="log", xlabel="step", ylabel="largest so far", title="gap to the serial run")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(file, dpi=100)
    plt.close(figure)
