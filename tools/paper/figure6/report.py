"""Writes tables, picture and numbers of all sizes: figure6.md, figure6.png, figure6.json."""

import json
import sys
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from megatron.config.parse import parse_call, user_errors
from megatron.libraries import Library
from megatron.train.metrics import read_metrics
from tools.page import decimal, duration, whole
from tools.paper.figure6.findings import findings
from tools.paper.figure6.plan import Size, parse_name, result_file, run_folder
from tools.paper.results import BLACK, BLUE, GREEN, ORANGE, Facts, as_png, points, write_results
from tools.paper.tables import Table, listed, millions, of_lambada, of_wikitext, table_3
from tools.paper.training import ZERO_SHOT

figures, ticker = Library("matplotlib.figure"), Library("matplotlib.ticker")

COLORS = (ORANGE, GREEN, BLUE, BLACK)
STYLES = ("-", "--", "-.", ":")
# Keys that say where a record was measured, which is no part of the result.
LEFT_OUT = ("command", "checkpoint")


def report(output: Path, sizes: tuple[str, ...]) -> None:
    """Write the three files.

    Args:
        output: the folder of a run of scripts/paper/figure6.sh.
        sizes: names of the models in it, the smallest first.
    """
    runs = [describe(output, parse_name(name)) for name in sizes]
    write_results(output, "figure6", runs, markdown(runs), draw(runs))


def describe(output: Path, size: Size) -> Facts:
    """Facts of a size, for JSON: its settings, its curves, the records of its evaluations.

    Raises ValueError if it has no step or no evaluation.
    """
    folder = run_folder(output, size)
    lines = read_metrics(folder / "metrics.jsonl")
    curve, checks = points(lines, "loss"), points(lines, "validation_loss")
    if not curve or not checks:
        raise ValueError(
            f"{folder / 'metrics.jsonl'}: no step, or no evaluation; a preset with log_interval "
            "and eval_interval within train_iters would work"
        )
    records = {task: record(result_file(output, size, task)) for task in ZERO_SHOT}
    model = records["lambada"]["model"]
    embeddings = model["hidden_size"] * (model["vocab_size"] + model["max_position_embeddings"])
    logged = [line for line in lines if "loss" in line]
    return {
        "name": size.name,
        "layers": size.layers,
        "hidden": size.hidden,
        **json.loads((folder / "run.json").read_bytes()),
        "parameters_without_embeddings": model["parameters"] - embeddings,
        "steps": logged[-1]["step"],
        "samples": logged[-1]["samples"],
        "seconds": logged[-1]["elapsed_seconds"],
        "train_loss": curve[-1][1],
        "validation_loss": checks[-1][1],
        "validation_perplexity": exp(checks[-1][1]),
        "curve": curve,
        "validation_curve": checks,
        **records,
    }


def record(file: Path) -> Facts:
    """The record of an evaluation, without paths of the machine."""
    found = json.loads(file.read_bytes())
    data = [{**each, "file": Path(each["file"]).name} for each in found["data"]]
    return {name: found[name] for name in found if name not in LEFT_OUT} | {"data": data}


def markdown(runs: Sequence[Facts]) -> str:
    ours = [(told_size(run), run["wikitext103"], run["lambada"]) for run in runs]
    meanings = [("WikiText103", of_wikitext(runs[0]["wikitext103"])),
                ("LAMBADA", of_lambada(runs[-1]["lambada"]))]  # fmt: skip
    parts = [
        "# Figure 6 and table 3 in miniature",
        training_table(runs).markdown(),
        table_3(ours).markdown(),
        "## Is larger better?",
        listed(findings(runs)),
        "## What each number is of",
        listed(meanings),
    ]
    return "\n\n".join(parts)


def told_size(run: Facts) -> str:
    return f"{run['name']}, {millions(run['parameters'])}"


def training_table(runs: Sequence[Facts]) -> Table:
    rows = [
        (run["name"], whole(run["parameters"]), whole(run["parameters_without_embeddings"]),
         whole(run["steps"]), decimal(run["train_loss"], 3), decimal(run["validation_loss"], 3),
         decimal(run["validation_perplexity"]), duration(run["seconds"]))
        for run in runs
    ]  # fmt: skip
    head = ("layers x hidden", "parameters", "without embeddings", "steps", "last training loss",
            "validation loss", "validation perplexity", "trained in")  # fmt: skip
    return Table(head, rows)


def draw(runs: Sequence[Facts]) -> bytes:
    """PNG: validation perplexity over iterations, on a logarithmic scale."""
    figure = figures.Figure(figsize=(7.2, 4.4), layout="constrained")
    fill(figure.subplots(), runs)
    return as_png(figure)


def fill(axes: Any, runs: Sequence[Facts]) -> None:
    for number, run in enumerate(runs):
        steps, losses = zip(*run["validation_curve"], strict=True)
        axes.plot(steps, [exp(loss) for loss in losses], label=told_size(run),
                  marker="o", markersize=3, **style(number))  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set(xlabel="iteration", ylabel="validation perplexity")
    axes.grid(axis="y", linewidth=0.5, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="GPT-2, layers x hidden", frameon=False)


def style(number: int) -> Mapping[str, str]:
    return {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number % len(STYLES)]}


if __name__ == "__main__":
    with user_errors({}):
        parse_call(report, sys.argv[1:], {})()
