"""The picture of `growth.py`: a column for each axis; time, memory, and time on a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PAPER, SENT = "#c44e52", "#333333", "#4c72b0"
TITLES = {
    "layers": "layers",
    "width": "hidden size",
    "sequence": "tokens of a sample",
    "vocabulary": "tokens in the vocabulary",
    "ranks": "tensor-parallel ranks",
}


def draw(file: Path, record: dict[str, Any]) -> None:
    """Write a PNG of what `growth.py` has recorded."""
    from matplotlib.figure import Figure

    axes = list(record["axes"])
    figure = Figure(figsize=(1 + 2.7 * len(axes), 9), layout="constrained")
    parts = figure.subfigures(3, 1)
    titles = _titles(record)
    for row, (part, title) in enumerate(zip(parts, titles, strict=True)):
        part.suptitle(title, fontsize=11, x=0.01, ha="left")
        panels = part.subplots(1, len(axes), sharey=True, squeeze=False)[0]
        for panel, axis in zip(panels, axes, strict=True):
            _panel(panel, row, record["axes"][axis], record["on_cluster"][axis])
            panel.set_xlabel(TITLES[axis], fontsize=9)
        panels[0].set_ylabel("MiB" if row == 1 else "seconds")
        panels[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120)


def _titles(record: dict[str, Any]) -> tuple[str, str, str]:
    case, cluster = record["case"], record["cluster"]
    machine = f"{case['name']}, {record['dtype']}, {record['cores']} cores"
    return (
        f"A step ({machine})",
        f"Memory of a rank ({machine})",
        f"A step of 8.3 billion parameters on paper (batch 8, t = {cluster['tensor_parallel']}, "
        f"{cluster['flops_per_second'] / 1e12:.0f} TFLOP/s a rank and "
        f"{cluster['bytes_per_second'] / 1e9:.0f} GB/s between them)",
    )


def _panel(panel: "Axes", row: int, here: list[Any], there: list[Any]) -> None:
    if row == 2:
        _on_cluster(panel, there)
    else:
        _beside(panel, here, *(("seconds", 1.0), ("bytes", 2.0**20))[row])
    panel.set_xscale("log")
    panel.set_yscale("log")
    values = [each["value"] for each in (there if row == 2 else here)]
    panel.set_xticks(values, [f"{each:,}" for each in values], fontsize=7)
    panel.minorticks_off()
    panel.grid(visible=True, color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _beside(panel: "Axes", points: list[dict[str, Any]], what: str, unit: float) -> None:
    values = [each["value"] for each in points]
    on_paper = [each["paper"][what] / unit for each in points]
    panel.plot(values, on_paper, color=PAPER, linestyle="--", label="on paper")
    measured = [each[what] / unit for each in points]
    panel.plot(values, measured, color=OURS, marker="o", markersize=4, label="measured")


def _on_cluster(panel: "Axes", points: list[dict[str, Any]]) -> None:
    values = [each["value"] for each in points]
    for granularity, style, words in (
        ("full", "-", "layers\nrecomputed"),
        ("none", "--", "all\nkept"),
    ):
        for kind, color in (("arithmetic", PAPER), ("communication", SENT)):
            # One rank says nothing, which has no place on a logarithmic axis.
            seconds = [each[granularity][kind] or float("nan") for each in points]
            panel.plot(values, seconds, color=color, linestyle=style, label=f"{kind}, {words}")
