"""report.json and report.html from what the stages left: `python -m tools.quickstart.report`."""

import io
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from megatron.config.parse import user_errors
from megatron.train.metrics import read_metrics
from tools.corpus.shards import MANIFEST, placed
from tools.quickstart.page import page
from tools.quickstart.stages import read_stamp

STAGES = ("corpus", "clean", "tokenizer", "preprocess", "pretrain", "evaluate", "sample")
CORPUS_STEPS = ("clean", "dedup", "split")
LISTS = ("inputs", "shards", "versions")  # of a manifest
Facts = dict[str, Any]


def report(out: Path) -> None:
    """Write report.json and the page that shows it.

    Args:
        out: the folder of a run of the quickstart.
    """
    metrics = read_metrics(out / "metrics.jsonl")
    facts = gather(out, metrics)
    with placed(out / "report.json") as file:
        file.write(json.dumps(facts, indent=1).encode())
    with placed(out / "report.html") as file:
        file.write(page(facts, loss_curve(metrics)).encode())


def read_lines(path: Path) -> list[Facts]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def gather(out: Path, metrics: Sequence[Facts]) -> Facts:
    """The numbers of the run by the names of the contract."""
    stamps = read_stamps(out)
    manifests = {step: out / "corpus" / step / MANIFEST for step in CORPUS_STEPS}
    if stamps["corpus"]["commands"]:
        manifests = {"harvest": out / "corpus" / "harvest.json", **manifests}
    described = read_json(out / "run.json")
    return {
        "corpus": {step: step_facts(manifest) for step, manifest in manifests.items()},
        "layout": {
            **stamps["pretrain"]["facts"],
            **{key: value for key, value in described.items() if key != "layout"},
            **described["layout"],
        },
        "seconds": {name: stamp["seconds"] for name, stamp in stamps.items()},
        "training": training(metrics),
        "evaluation": read_json(out / "evaluation.json"),
        "samples": read_json(out / "samples.json"),
        "commands": {name: stamp["commands"] for name, stamp in stamps.items()},
    }


def step_facts(manifest: Path) -> Facts:
    """What a step's manifest says, without files and checksums, and the first line set aside."""
    facts = {key: value for key, value in read_json(manifest).items() if key not in LISTS}
    rejected = manifest.with_name("rejected.jsonl")
    return {**facts, "bad_lines": read_lines(rejected)[:1] if rejected.exists() else []}


def read_stamps(out: Path) -> dict[str, Facts]:
    """What the finished stages left; ValueError if one has not finished."""
    stamps = {}
    for name in STAGES:
        stamp = read_stamp(out, name)
        if stamp is None:
            raise ValueError(f"--out {out}: stage {name} has not finished; run the quickstart")
        stamps[name] = stamp
    return stamps


def training(metrics: Sequence[Facts]) -> Facts:
    """The last losses, and the median of the logged tokens per second."""
    logged = [line for line in metrics if "loss" in line]
    validated = [line for line in metrics if "validation_loss" in line]
    if not logged:
        raise ValueError("metrics.jsonl has no step; train for at least --log-interval steps")
    return {
        "steps": logged[-1]["step"],
        "samples": logged[-1]["samples"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in logged),
        "train_loss": logged[-1]["loss"],
        "validation_loss": validated[-1]["validation_loss"] if validated else None,
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


INK, MUTED, TRAIN, VALIDATION = "#010101", "#020202", "#030303", "#040404"
VARIABLES = {INK: "--ink", MUTED: "--line", TRAIN: "--train", VALIDATION: "--accent"}


def loss_curve(metrics: Sequence[Facts]) -> str:
    """Training and validation loss over steps as inline SVG in the page's own colours."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    settings = {"svg.fonttype": "none", "svg.hashsalt": "quickstart", "font.family": "sans-serif",
                "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED,
                "xtick.color": INK, "ytick.color": INK, "grid.color": MUTED, "font.size": 11,
                "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
        for key, label, style in (
            ("loss", "training", {"color": TRAIN, "linewidth": 1.2}),
            ("validation_loss", "validation", {"color": VALIDATION, "marker": "o"}),
        ):
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(axis="y", linewidth=0.6)
        axes.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True)
        plt.close(figure)
    return in_page(drawing.getvalue())


def in_page(svg: str) -> str:
    """The <svg> element alone: no document type, metadata or size, the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    )
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", '<svg role="img" aria-label="loss over steps"', 1)


if __name__ == "__main__":
    with user_errors({}):
        tyro.cli(report)
