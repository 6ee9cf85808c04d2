"""Pictures of a plan and of figure 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.planning.record import HELD, TIMES

# Of the palette of Okabe and Ito, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#999999", "#CC79A7", "#009E73")
PAPER, PREDICTED = "#999999", "#0072B2"


def draw_plan(file: Path, planned: Mapping[str, Any]) -> None:
    """Where the time of a step and the memory of a device go."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    upper, lower = figure.subplots(2)
    seconds, held = planned["predicted_step_seconds"], planned["memory_per_rank_bytes"]
    times = {told: seconds[name] for name, told in TIMES.items() if name != "total"}
    _stack(upper, times, "s")
    upper.set_xlabel("seconds of a step")
    # Of logits and the backward of a layer only the larger is there at a time.
    smaller = min(("logits", "one_layer"), key=lambda name: held[name])
    kinds = {
        told.removesuffix(", or"): held[name] / 1e9
        for name, told in HELD.items()
        if name not in ("total", smaller)
    }
    _stack(lower, kinds, "GB")
    limit = planned["memory_of_device_bytes"] / 1e9
    lower.axvline(limit, color="#333333", linestyle="--", linewidth=1.2)
    lower.text(limit, 1.02, "what a device has", ha="center", fontsize=9,
               transform=lower.get_xaxis_transform())  # fmt: skip
    lower.set_xlim(0, 1.08 * max(limit, sum(kinds.values())))
    lower.set_xlabel("GB of a rank")
    ranks = planned["model"]["tensor"] * planned["model"]["data"]
    figure.suptitle(
        f"{planned['parameters'] / 1e9:.2f}B parameters on {ranks} devices "
        f"({planned['hardware']['name']}): {planned['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {100 * planned['mfu']:.0f} %"
    )
    figure.savefig(file, dpi=150)


def _stack(axes: Axes, parts: Mapping[str, float], unit: str) -> None:
    """One bar of parts side by side."""
    start = 0.0
    for (name, value), colour in zip(parts.items(), COLOURS, strict=False):
        looks: dict[str, Any] = {"color": colour, "label": f"{name}, {value:.3g} {unit}"}
        if "hidden" in name:
            looks |= {"color": "none", "edgecolor": colour, "hatch": "///"}
        axes.barh(0, value, left=start, **looks)
        start += value
    axes.set_yticks([])
    axes.set_xlim(0, 1.02 * start)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def draw_study(file: Path, found: Mapping[str, Any]) -> None:
    """Figure 5 as in the paper, and beside it strong scaling and the number of heads."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    weak, strong, heads = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    rows = found["figure_5"]
    labels = [str(each["gpus"]) for each in rows]
    _pairs(weak, labels, rows, "{:.0f}")
    weak.axvline(3.5, color="#333333", linewidth=0.8)
    weak.text(1.5, 113, "model parallel", ha="center")
    weak.text(5.5, 113, "model + data parallel", ha="center")
    weak.set(xlabel="GPUs", ylabel="weak scaling, % of linear", ylim=(0, 120))
    handles, names = weak.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    _pairs(strong, [str(each["gpus"]) for each in found["strong_scaling"]],
           found["strong_scaling"], "{:.2f}")  # fmt: skip
    strong.set(xlabel="GPUs", ylabel="strong scaling of 1.2B, speed-up", ylim=(0, 5))
    _pairs(heads, [str(each["heads"]) for each in found["heads"]], found["heads"], "{:.0f}")
    heads.set(xlabel="heads of 8.3B on 8 GPUs", ylabel="% of linear", ylim=(0, 120))
    figure.savefig(file, dpi=150)


def _pairs(axes: Axes, labels: Sequence[str], rows: Sequence[Mapping[str, Any]], form: str) -> None:
    """The paper's bar and the predicted one of each row."""
    for shift, key, colour in ((-0.2, "paper", PAPER), (0.2, "predicted", PREDICTED)):
        places = [number + shift for number in range(len(rows))]
        bars = axes.bar(places, [each[key] for each in rows], 0.38, color=colour, label=key)
        axes.bar_label(bars, [form.format(each[key]) for each in rows], fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), labels)
    axes.spines[["top", "right"]].set_visible(False)
