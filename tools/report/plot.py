"""The losses of training runs: their curves, for pages and files, and the last figures."""

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megatron.config.parse import parse_call, user_errors
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from megatron.train.metrics import read_metrics
from tools.report.figures import PALETTE, SERIES, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = dict[str, Any]
FORMATS = (".png", ".svg", ".pdf")


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path,
    term: str = "loss",
) -> None:
    """Draw the losses of runs: training losses smoothed, with the raw ones paler behind, and
    validation losses dashed.

    Args:
        runs: folders of runs (their --save), or their files of metrics.
        output: the picture: .png, .svg or .pdf.
        term: name of the loss term in metrics.jsonl; a BERT also has mlm_loss and sop_loss, and the
            validation of a ViT top1 and top5.
    """
    if output.suffix not in FORMATS:
        raise UsageError("--output", output, f"a name ending in {', '.join(FORMATS)}")
    if not runs:
        raise UsageError("RUNS", None, "given: the folders of a --save")
    curves = {}
    for run in runs:
        file = run / "metrics.jsonl" if run.is_dir() else run
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there; the folder of a --save works")
        lines = read_metrics(file)
        keys = {key for line in lines for key in line if key.endswith(("loss", "top1", "top5"))}
        known = sorted({key.removeprefix("validation_") for key in keys})
        if term not in known:
            raise UsageError(
                "--term", term, f"a term of {file}: {', '.join(known) or 'it has none'}"
            )
        # Two runs may have folders of one name.
        name = file.parent.name if file.parent.name not in curves else str(file.parent)
        curves[name] = lines
    content = picture(
        lambda axes: draw_losses(axes, curves, term), output.suffix[1:], size=(8, 4.5)
    )
    write_atomically(output, content)


def main() -> None:
    with user_errors(os.environ):
        parse_call(plot, sys.argv[1:], os.environ)()


def last_figures(metrics: Sequence[Facts]) -> Facts:
    """The last losses, and the median of the logged tokens or images per second."""
    logged = [line for line in metrics if "loss" in line]
    validated = [line for line in metrics if "validation_loss" in line]
    if not logged:
        raise ValueError("metrics.jsonl has no step; train for at least --log-interval steps")
    rate = next(key for key in logged[-1] if key.endswith("_per_second"))
    return {
        "steps": logged[-1]["step"],
        "samples": logged[-1]["samples"],
        rate: statistics.median(line[rate] for line in logged),
        "train_loss": logged[-1]["loss"],
        "validation_loss": validated[-1]["validation_loss"] if validated else None,
    }


def smooth(values: Sequence[float]) -> list[float]:
    """Means over up to 4 % of the values before and after each; a straight line stays as it is."""
    last, reach = len(values) - 1, len(values) // 25
    # Near an end the window narrows on both sides, to show the first fall of a loss.
    reaches = [min(reach, place, last - place) for place in range(len(values))]
    return [
        statistics.fmean(values[place - near : place + near + 1])
        for place, near in enumerate(reaches)
    ]


def draw_losses(axes: "Axes", runs: Mapping[str, Sequence[Facts]], term: str = "loss") -> None:
    """Training losses, smoothed with the raw ones paler behind, and validation losses with dots.

    runs: {name: lines of its metrics.jsonl}; with several runs, each has a colour. term: name of
    the loss in the metrics.
    """
    for number, (name, lines) in enumerate(runs.items()):
        prefix = f"{name}, " if len(runs) > 1 else ""
        colour = SERIES[number % len(SERIES)]
        steps, losses = points(lines, term)
        if steps:
            axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.4)
            axes.plot(steps, smooth(losses), color=colour, label=f"{prefix}training")
        steps, losses = points(lines, f"validation_{term}")
        if steps:
            dots = colour if len(runs) > 1 else PALETTE["accent"]
            axes.plot(steps, losses, "o--", color=dots, markersize=4, label=f"{prefix}validation")
    axes.set(xlabel="step", ylabel="loss (nats)" if term == "loss" else term)
    axes.grid(axis="y")
    axes.legend()


def points(lines: Sequence[Facts], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have a value for the key."""
    having = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in having], [line[key] for line in having]
