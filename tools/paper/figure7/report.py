"""Writes the table, picture and numbers of both orders' results: figure7.md, .png, .json."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.config.parse import parse_call, user_errors
from megatron.libraries import Library
from megatron.train.metrics import read_metrics
from tools.paper.figure7.ending import diverged_at
from tools.paper.figure7.plan import ORDERS, Run, metrics_file, parse_name
from tools.paper.results import BLUE, ORANGE, Facts, as_png, points, write_results

matplotlib, plt = Library("matplotlib"), Library("matplotlib.pyplot")
lines = Library("matplotlib.lines")

LAST = 0.05  # share of a run's logged steps, whose mean is its final training loss
SMOOTHED = 10  # logged steps whose mean is a point of a curve
STYLES: Mapping[str, Mapping[str, Any]] = {
    "pre-ln": {"color": BLUE, "linestyle": "-", "label": "pre-LN, the paper's order"},
    "post-ln": {"color": ORANGE, "linestyle": "--", "label": "post-LN, the original order"},
}


def report(output: Path, runs: tuple[str, ...]) -> None:
    """Write the three files.

    Args:
        output: the folder of a run of scripts/paper/figure7.sh.
        runs: names of the trainings in it.
    """
    facts = [describe(output, parse_name(name)) for name in runs]
    write_results(output, "figure7", facts, table(facts), draw(facts))


def describe(output: Path, run: Run) -> Facts:
    """Facts of a run, for JSON: its settings, its curves, and its results, null if it diverged.

    Raises ValueError if a run that did not diverge has no step or no evaluation.
    """
    file = metrics_file(output, run)
    lines = read_metrics(file)
    steps = [line for line in lines if line.get("mlm_loss") is not None]
    checks = [line for line in lines if "validation_mlm_loss" in line]
    diverged = diverged_at(lines)
    if diverged is None and not (steps and checks):
        raise ValueError(f"{file}: no step, or no evaluation; run the script again with --fresh")
    last = [line["mlm_loss"] for line in steps[-max(1, round(LAST * len(steps))) :]]
    final = checks[-1] if diverged is None else {}
    return {
        "order": run.order,
        "depth": run.depth,
        "rate": run.rate,
        **json.loads(file.with_name("run.json").read_bytes()),
        "diverged_at": diverged,
        "steps": lines[-1]["step"],
        "seconds": steps[-1]["elapsed_seconds"] if steps else None,
        "train_loss": fmean(last) if diverged is None else None,
        "validation_loss": final.get("validation_mlm_loss"),
        "validation_sop_loss": final.get("validation_sop_loss"),
        "largest_gradient_norm": max(
            (line["grad_norm"] or float("inf") for line in steps), default=None
        ),
        "curve": points(steps, "mlm_loss"),
        "validation_curve": points(checks, "validation_mlm_loss"),
    }


def table(runs: Sequence[Facts]) -> str:
    """Markdown: a line for each rate and depth, with both orders."""
    lines = [
        "| rate | layers | parameters | train, pre-LN | post-LN | validation, pre-LN | post-LN |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate, depth in shapes(runs):
        found = [select(runs, order, rate, depth) for order in ORDERS]
        kinds = ("train_loss", "validation_loss")
        numbers = " | ".join(told_loss(each, kind) for kind in kinds for each in found)
        lines.append(f"| {rate:g} | {depth} | {found[0]['parameters']:,} | {numbers} |")
    return "\n".join(lines)


def told_loss(run: Facts, kind: str) -> str:
    """The loss of this kind, or why there is none."""
    if run["diverged_at"] is not None:
        return told_end(run)
    return "not finite" if run[kind] is None else f"{run[kind]:.3f}"


def told_end(run: Facts) -> str:
    return f"diverged at step {run['diverged_at']:,}"


def shapes(runs: Sequence[Facts]) -> list[tuple[float, int]]:
    """(rate, depth) of the runs, each pair once, in their order."""
    return list(dict.fromkeys((run["rate"], run["depth"]) for run in runs))


def select(runs: Sequence[Facts], order: str, rate: float, depth: int) -> Facts:
    wanted = (order, rate, depth)
    return next(run for run in runs if (run["order"], run["rate"], run["depth"]) == wanted)


def smooth(curve: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Last step and mean loss of each window of SMOOTHED points.

    A shorter curve stays as it is.
    """
    size = SMOOTHED if len(curve) >= SMOOTHED else 1
    windows = [curve[start : start + size] for start in range(len(curve) - size + 1)]
    return [each[-1][0] for each in windows], [fmean(loss for _, loss in each) for each in windows]


def draw(runs: Sequence[Facts]) -> bytes:
    """PNG: a panel for each depth, a row for each rate; masked-token loss over steps."""
    matplotlib.use("agg")
    rates = list(dict.fromkeys(run["rate"] for run in runs))
    depths = list(dict.fromkeys(run["depth"] for run in runs))
    size = (2.9 * len(depths) + 0.6, 2.8 * len(rates) + 0.7)
    figure, panels = plt.subplots(len(rates), len(depths), figsize=size, sharex=True, sharey=True,
                                  squeeze=False, layout="constrained")  # fmt: skip
    for row, rate in enumerate(rates):
        for column, depth in enumerate(depths):
            panel = panels[row][column]
            fill(panel, [select(runs, order, rate, depth) for order in ORDERS])
            panel.set_title(f"{depth} layers, rate {rate:g}", fontsize=11)
        panels[row][0].set_ylabel("masked-token loss (nats)")
    bound(panels[0][0], runs)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    curves, _ = panels[0][0].get_legend_handles_labels()
    dots = lines.Line2D(
        [], [], color="0.4", marker="o", markersize=3.5, linestyle="", label="validation"
    )
    figure.legend(handles=[*curves, dots], loc="outside upper center", ncols=3, frameon=False)
    picture = as_png(figure)
    plt.close(figure)
    return picture


def fill(panel: Any, runs: Sequence[Facts]) -> None:
    for run in runs:
        style = STYLES[run["order"]]
        checks = run["validation_curve"]
        panel.plot(*smooth(run["curve"]), linewidth=1.6, **style)
        panel.plot([step for step, _ in checks], [loss for _, loss in checks], "o", markersize=3.5,
                   color=style["color"])  # fmt: skip
        if run["diverged_at"] is not None:
            mark_end(panel, run, style["color"])
    panel.grid(axis="y", linewidth=0.5, alpha=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def mark_end(panel: Any, run: Facts, color: str) -> None:
    """A line where the run diverged, with the text beside it."""
    panel.axvline(run["diverged_at"], color=color, linestyle=":", linewidth=1.2)
    panel.text(run["diverged_at"], 0.98, f" {told_end(run)}", color=color, fontsize=8, rotation=90,
               va="top", transform=panel.get_xaxis_transform())  # fmt: skip


def bound(panel: Any, runs: Sequence[Facts]) -> None:
    """Fit the y-axis to the curves of completed runs, whatever a diverging one reached."""
    ends = [run for run in runs if run["diverged_at"] is None]
    if 0 < len(ends) < len(runs):
        low = min(loss for run in runs for loss in drawn(run))
        panel.set_ylim(0.95 * low, 1.1 * max(loss for run in ends for loss in drawn(run)))


def drawn(run: Facts) -> list[float]:
    return smooth(run["curve"])[1] + [loss for _, loss in run["validation_curve"]]


if __name__ == "__main__":
    with user_errors({}):
        parse_call(report, sys.argv[1:], {})()
