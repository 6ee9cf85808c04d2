"""What the metrics of a training run say: last losses, speed, and the curve for a page."""

import io
import re
import statistics
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]
CURVE_STYLE = """
svg { width: 100%; min-width: 32rem; height: auto; display: block; }
"""


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


INK, MUTED, TRAIN, VALIDATION = "#010101", "#020202", "#030303", "#040404"
VARIABLES = {INK: "--ink", MUTED: "--line", TRAIN: "--train", VALIDATION: "--accent"}


def loss_curve(
    metrics: Sequence[Facts], term: str = "loss", unit: str = "loss (nats per token)"
) -> str:
    """Training and validation loss over steps as inline SVG in the page's own colours.

    term: of the loss, as metrics call it.
    """
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
            (term, "training", {"color": TRAIN, "linewidth": 1.2}),
            (f"validation_{term}", "validation", {"color": VALIDATION, "marker": "o"}),
        ):
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step", ylabel=unit)
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
