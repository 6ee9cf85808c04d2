"""Curves of runs from their metrics.jsonl: which there are, their x axis, and their drawings."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.errors import UsageError
from megatron.libraries import Library
from tools.report.figures import PALETTE, SERIES, SIZE, Axes, draw, picture
from tools.report.record import Facts, Lines, read_record, record_of
from tools.report.sections import Figure

artists, ticker = Library("matplotlib.lines"), Library("matplotlib.ticker")

Runs = Mapping[str, Lines]
"""Lines of each run, by its name."""
Against = Literal["steps", "tokens", "time"]

TERMS = ("loss", "top1", "top5")  # ends of the names of what an evaluation measures, too
RATE = "_per_second"
DASHES = {"-": "", "-.": " (dash-dotted)", ":": " (dotted)"}  # of runs beyond the colours
TIMES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
LETTERS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
BUCKETS = 1000  # of steps of a curve, each drawn by its least and its largest value


@dataclass(frozen=True)
class Panel:
    """A drawing of one number by step, of each run."""

    key: str
    """The key in lines of metrics; validation_KEY is drawn with dots."""
    title: str
    scale: float = 1.0
    """Factor of the values."""
    is_long: bool = False
    """Whether values are written as 12k and 1.5M."""
    is_noisy: bool = True
    """Whether a mean says more than each value."""


def read_run(run: Path) -> Lines:
    """Raises FileNotFoundError without a record, ValueError for one without a logged step."""
    file = record_of(run)
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; the folder of a --save works")
    lines = read_record(file)
    if not any("loss" in line for line in lines):
        raise ValueError(f"{file} has no step; train for at least --log-interval steps")
    return lines


def run_names(runs: Sequence[Path]) -> list[str]:
    """For each run the shortest part of its path in which they differ; of one run the last part.
    A folder and a file of one name keep the ending of the file."""
    files = [record_of(run).resolve() for run in runs]
    paths = [
        (each.parent if each.name == "metrics.jsonl" else each.with_suffix("")).parts
        for each in files
    ]
    first, last, shortest = 0, 0, min(map(len, paths))
    while first < shortest - 1 and len({path[first] for path in paths}) == 1:
        first += 1
    while last < shortest - first - 1 and len({path[-1 - last] for path in paths}) == 1:
        last += 1
    names = ["/".join(path[first : len(path) - last]) for path in paths]
    return [
        name + file.suffix * (file.name != "metrics.jsonl" and names.count(name) > 1)
        for name, file in zip(names, files, strict=True)
    ]


def loss_terms(lines: Lines) -> list[str]:
    """Names of the loss, its terms and what evaluations measure, the loss first."""
    keys = {key.removeprefix("validation_") for line in lines for key in line}
    return sorted(
        (key for key in keys if key.endswith(TERMS)), key=lambda key: (key != "loss", key)
    )


def unit_of(lines: Lines) -> str | None:
    """The unit of the run's throughput, tokens or images; None if no line has one."""
    keys = (key for line in reversed(lines) for key in line if key.endswith(RATE))
    return next((key.removesuffix(RATE) for key in keys), None)


def panels(runs: Runs) -> list[Panel]:
    """The panels of which a run has a value."""
    every = [line for lines in runs.values() for line in lines]
    units = sorted({unit for lines in runs.values() if (unit := unit_of(lines))})
    known = [
        *(term_panel(term) for term in loss_terms(every)),
        Panel("lr", "Learning rate", is_noisy=False),
        Panel("grad_norm", "Norm of the gradient"),
        *(Panel(unit + RATE, f"{unit.capitalize()} per second", is_long=True) for unit in units),
        Panel("mfu", "Model FLOPs utilisation (%)", scale=100),
        Panel("peak_memory_bytes", "Peak memory of a rank (GiB)", scale=2**-30, is_noisy=False),
    ]
    keys = {key for line in every for key, value in line.items() if value is not None}
    return [each for each in known if {each.key, f"validation_{each.key}"} & keys]


def term_panel(term: str) -> Panel:
    return Panel(term, "Loss (nats)" if term == "loss" else term)


def left_out(name: str, lines: Lines) -> list[str]:
    """Sentences about the values that are not finite, which no curve can show."""
    texts = []
    for term in (*loss_terms(lines), "grad_norm"):
        for key in (term, f"validation_{term}"):
            values = [line[key] for line in lines if key in line]
            if missing := values.count(None):
                of_all = f"{missing} of {len(values)} values of {key}"
                texts.append(f"{name}: {of_all} are not finite and left out.")
    return texts


def points(lines: Lines, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have a value for the key."""
    having = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in having], [line[key] for line in having]


def positions(lines: Lines, against: Against, steps: Sequence[int]) -> Any:
    """The x of these steps: the steps, tokens (or images) trained, or seconds of training without
    evaluations and saves.

    Lines count since the one before, also in a resumed run; steps without a line, whose process was
    killed after a save, count as those of the next line. Time starts where the record does. Raises
    UsageError if the lines have no throughput.
    """
    if against == "steps":
        return np.asarray(steps, float)
    logged = [line for line in lines if "loss" in line]
    rate = f"{unit_of(lines)}{RATE}"
    if not all(rate in line and "step_seconds" in line for line in logged):
        raise UsageError("--against", against, "steps with this run, whose lines have no times")
    ends = [line["step"] for line in logged]
    start = lines[0]["step"] if against == "time" and "started" in lines[0] else 0
    of_step = [
        line["step_seconds"] * (line[rate] if against == "tokens" else 1.0) for line in logged
    ]
    totals = np.cumsum(np.diff([start, *ends]) * of_step)
    return np.interp(steps, [start, *ends], [0.0, *totals])


def smooth(values: Sequence[float]) -> list[float]:
    """Means over up to 4 % of the values before and after each; a straight line stays as it is."""
    # At the start the window narrows on both sides, to show the first fall of a loss. At the end
    # that would show single values, so a line through the last ones goes on.
    place, most = np.arange(len(values)), len(values) // 25
    near = np.minimum(most, np.minimum(place, len(values) - 1 - place))
    first = np.asarray(values[:1])  # without it the sums of equal values have no rounding errors
    above = np.asarray(values) - first
    sums = np.cumsum([0.0, *above])
    means = (sums[place + near + 1] - sums[place - near]) / (2 * near + 1)
    if most:
        window = place[-2 * most - 1 :]
        means[-most:] = np.polyval(np.polyfit(window, above[window], 1), window[-most:])
    return (first + means).tolist()


def thinned(x: Any, values: Sequence[float]) -> tuple[Any, Any]:
    """Enough of a long curve to draw it: the least and the largest value of each bucket."""
    x, y = np.asarray(x), np.asarray(values)
    if len(y) <= 2 * BUCKETS:
        return x, y
    edges = np.linspace(0, len(y), BUCKETS + 1).astype(int)
    kept = {0, len(y) - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(y[start:end].argmin()), start + int(y[start:end].argmax())}
    places = sorted(kept)
    return x[places], y[places]


def look(number: int) -> tuple[str, str]:
    """Colour and dashes of a run, by its number."""
    return SERIES[number % len(SERIES)], [*DASHES][number // len(SERIES) % len(DASHES)]


def legend(runs: Runs) -> list[tuple[str, str]]:
    """(colour, name) of several runs."""
    looks = ((name, *look(number)) for number, name in enumerate(runs))
    return [(colour, name + DASHES[dash]) for name, colour, dash in looks if len(runs) > 1]


def draw_panel(axes: Axes, runs: Runs, panel: Panel, against: Against = "steps") -> None:
    """A curve of each run, smoothed with the raw one paler behind; validations with dots."""
    curves: list[tuple[int, str, Any, Any]] = []
    for number, lines in enumerate(runs.values()):
        for key in (panel.key, f"validation_{panel.key}"):
            steps, values = points(lines, key)
            if steps:
                x = positions(lines, against, steps)
                curves.append((number, key, x, np.asarray(values) * panel.scale))
    clock, seconds = "s", 1
    if against == "time":
        longest = max((x.max() for _, _, x, _ in curves), default=0)
        clock, seconds = next((each for each in TIMES if longest >= 2 * each[1]), TIMES[-1])
    for number, key, x, y in curves:
        colour, dash = look(number)
        prefix, x = f"{[*runs][number]}, " if len(runs) > 1 else "", x / seconds
        if key == panel.key:
            marker = "o" if len(y) == 1 else ""
            axes.plot(*thinned(x, y), color=colour, linewidth=0.8, alpha=0.4)
            label = f"{prefix}training"
            line = thinned(x, smooth(y) if panel.is_noisy else y)
            width = 1.5 + 0.8 * min(len(runs) - 1 - number, 2)  # an equal curve covers no other
            style = {"color": colour, "linewidth": width, "markersize": 4 + width, "label": label}
            axes.plot(*line, dash + marker, **style)
        else:
            dots = colour if len(runs) > 1 else PALETTE["accent"]
            label = f"{prefix}validation"
            axes.plot(*thinned(x, y), "o--", color=dots, markersize=4, label=label)
    unit = unit_of(next(iter(runs.values())))
    labels = {"steps": "step", "tokens": unit, "time": f"training time ({clock})"}
    axes.set(xlabel=labels[against])
    axes.grid(axis="y")
    axes.ticklabel_format(axis="y", useOffset=False)
    if panel.is_long:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(short))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=against != "time"))
    if against != "time":
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(short))


def short(number: float, place: object = None) -> str:
    """12k, 1.5M, 3B: a number on an axis."""
    for letter, size in LETTERS:
        if abs(number) >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.4g}"


def draw_losses(axes: Axes, runs: Runs, term: str = "loss", against: Against = "steps") -> None:
    """Training losses and validation losses of a term, with their names."""
    panel = term_panel(term)
    draw_panel(axes, runs, panel, against)
    axes.set(ylabel="loss (nats)" if term == "loss" else term)
    axes.legend()


def caption(panel: Panel, runs: Runs) -> str:
    has_dots = any(f"validation_{panel.key}" in line for each in runs.values() for line in each)
    return panel.title + "; validation with dots" * has_dots


def draw_curves(runs: Runs, against: Against = "steps") -> list[Figure]:
    """A figure of a page for each panel."""
    figures = []
    for panel in panels(runs):
        paint = partial(draw_panel, runs=runs, panel=panel, against=against)
        figures.append(draw(paint, caption(panel, runs), legend=legend(runs)))
    return figures


def picture_of(runs: Runs, ending: str, against: Against = "steps") -> bytes:
    """All panels as the content of one file that ends in `ending`: png, svg or pdf."""
    shown = panels(runs)
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)

    def paint(grid: Any) -> None:
        cells = np.ravel(grid)
        for axes, panel in zip(cells, shown, strict=False):
            draw_panel(axes, runs, panel, against)
            axes.set_title(caption(panel, runs), loc="left", fontsize="medium")
        for axes in cells[len(shown) :]:
            axes.set_axis_off()
        if len(runs) > 1:
            looks = [look(number) for number in range(len(runs))]
            keys = [artists.Line2D([], [], color=colour, linestyle=dash) for colour, dash in looks]
            across = max(1, 100 // (max(map(len, runs)) + 8))
            figure, place = cells[0].figure, "outside upper left"
            figure.legend(keys, [*runs], loc=place, ncols=across)

    return picture(paint, ending, (SIZE[0] * columns, SIZE[1] * rows), grid=(rows, columns))


def last_figures(metrics: Lines) -> Facts:
    """The last losses, and the median of the logged tokens or images per second, if any are."""
    logged = [line for line in metrics if "loss" in line]
    validated = [line for line in metrics if "validation_loss" in line]
    if not logged:
        raise ValueError("metrics.jsonl has no step; train for at least --log-interval steps")
    rate = f"{unit_of(logged)}{RATE}"
    rates = [line[rate] for line in logged if line.get(rate) is not None]
    return {
        "steps": logged[-1]["step"],
        "samples": logged[-1].get("samples"),
        **({rate: statistics.median(rates)} if rates else {}),
        "train_loss": logged[-1]["loss"],
        "validation_loss": validated[-1]["validation_loss"] if validated else None,
    }
