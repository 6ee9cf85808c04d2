"""What `scaling.py` has measured: tables, a page, and a picture like the paper's figure 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import percent
from benchmarks.machine import markdown
from benchmarks.scaling_configurations import (
    BOTH,
    HALVED,
    HIDDEN,
    LAYERS,
    MODEL,
    NUMBER_OF_HEADS,
    SEQUENCE,
    STRONG_SCALING,
    VOCABULARY,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
TITLES = {
    MODEL: "Weak scaling, model parallel: share of linear",
    BOTH: "Weak scaling, model and data parallel: share of linear",
    STRONG_SCALING: "Strong scaling: speed-up",
    NUMBER_OF_HEADS: "Number of heads: share of linear",
}
HEADER = ["model", "heads", "parameters", "t x d", "seconds of an iteration", "TFLOP/s of a rank",
          "MFU", "communication: tensor", "data", "measured", "predicted", "paper"]  # fmt: skip
SMALL = (
    f"the models of table 1 with 1/{HIDDEN} of their width, 1/{LAYERS} of the layers and "
    f"1/{HALVED} of the heads, on 1/{SEQUENCE} of the sequence and 1/{VOCABULARY} of the vocabulary"
)
COLOURS = {"paper": "#999999", "predicted": "#56B4E9", "measured": "#c44e52"}


def tables(found: Record) -> str:
    parts = []
    for study, title in TITLES.items():
        rows = [row(found, each) for each in found["points"] if each["study"] == study]
        parts.append(f"### {title}\n\n{markdown(HEADER, rows)}")
    return "\n\n".join(parts)


def row(found: Record, point: Record) -> list[str]:
    """Of one point; where nothing was measured the reason stands in place of the seconds."""
    own, form = found["configurations"][point["configuration"]], form_of(point)
    named = [own["model"], own["heads"], count(own["parameters"])]
    named.append(f"{own['tensor_parallel']} x {own['data_parallel']}")
    predicted = ""
    if point["predicted"] is not None:
        predicted = f"{form.format(point['predicted'])} ({own['predicted_seconds']:.3f} s)"
    beside = [predicted, form.format(point["paper"])]
    if point["measured"] is None:
        return [*named, f"not measured: {point['reason']}", *[""] * 5, *beside]
    return [
        *named,
        spread(own["seconds"], "{:.3f}"),
        f"{own['tflops']:.3g}",
        percent(own["mfu"]),
        *(share((own["communication"] or {}).get(axis)) for axis in ("tensor", "data")),
        spread(point["measured"], form),
        *beside,
    ]


def share(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return ""
    return f"{percent(figures['share'])} ({percent(figures['exposed_share'])})"


def spread(figures: Mapping[str, float], form: str) -> str:
    """Median, and in brackets the 10th and the 90th percentile."""
    low, high = (form.format(figures[name]).removesuffix(" %") for name in ("p10", "p90"))
    return f"{form.format(figures['median'])} ({low} to {high})"


def form_of(point: Record) -> str:
    return "{:.2f}" if point["study"] == STRONG_SCALING else "{:.1f} %"


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def page(found: Record, picture: str | None) -> str:
    shown = [f"![Measured beside the paper's figure 5]({picture})"] if picture else []
    formulas = [f"- {name}: {told}" for name, told in found["formulas"].items()]
    parts = [
        "# Scaling: section 5.1 measured",
        *result(found),
        f"    {found['command']}",
        " ".join(about(found)),
        *shown,
        tables(found),
        "## How it is measured",
        "\n".join([*formulas, *notes(found)]),
    ]
    return "\n\n".join(parts) + "\n"


def result(found: Record) -> Iterator[str]:
    """Weak scaling on the most ranks on which it was measured."""
    shares = []
    for study, name in ((MODEL, "model parallel"), (BOTH, "model and data parallel")):
        points = [p for p in found["points"] if p["study"] == study and p["measured"] is not None]
        if points:
            own = found["configurations"][points[-1]["configuration"]]
            layout = f"t x d = {own['tensor_parallel']} x {own['data_parallel']}"
            shares.append(
                f"{name} ({layout}) {spread(points[-1]['measured'], form_of(points[-1]))}"
            )
    if shares:
        yield f"**Share of linear: {'; '.join(shares)}.**"


def about(found: Record) -> Iterator[str]:
    is_cpu = found["device"] == "cpu"
    threads = f" with {found['threads_per_process']} thread each" if is_cpu else ""
    yield f"On {found['processes']} processes{threads}"
    yield f"({found['cpu'] if is_cpu else found['device']}, {found['cores']} cores, torch"
    yield f"{found['torch']}), in {found['precision']}. Of {found['rounds']} rounds, in each of"
    yield f"which every configuration takes {found['steps_of_a_round']} steps after"
    yield f"{found['warm_up_steps']} that are not timed, medians (10th to 90th percentile): of the"
    yield "seconds over all steps, of what is compared with one rank over the rounds."
    if found["miniature"]:
        yield f"**In miniature**: {SMALL}; the paper's figures are those of its own models."


def notes(found: Record) -> Iterator[str]:
    yield (
        "- Every layer is recomputed in the backward and dropout is on, as in the paper; batch 8 "
        "for each copy of the model. A step is the program's own, from the batch to the updated "
        "weights, and is over when it is on the slowest rank."
    )
    peak = found["peak"]
    yield (
        f"- Peak: {peak['value'] / 1e12:.4g} TFLOP/s of a rank ({peak['source']})."
        if peak
        else "- No peak is known of this device, and so there is no MFU."
    )
    if found["hardware"]:
        yield f"- Predicted by tools/plan.py for {found['hardware']}."
    if found["device"] == "cpu":
        yield (
            "- The ranks of a CPU share its memory bandwidth and caches, of which a rank alone has "
            "all; so efficiency is lost that GPUs with a memory each do not lose. Copies that "
            "exchange nothing but gradients (d = 2) show how much that is at most."
        )
    yield from (f"- {each}" for each in found["warnings"])


def draw(file: Path, found: Record) -> None:
    """Weak scaling in the paper's order, strong scaling and heads; with the 10th and 90th
    percentile of the rounds."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    weak, strong, heads = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    panels = {
        weak: ((MODEL, BOTH), "ranks", "weak scaling, % of linear"),
        strong: ((STRONG_SCALING,), "ranks", "strong scaling, speed-up"),
        heads: ((NUMBER_OF_HEADS,), "heads", "% of linear"),
    }
    for axes, (wanted, label, title) in panels.items():
        points = [each for each in found["points"] if each["study"] in wanted]
        configurations = [found["configurations"][each["configuration"]] for each in points]
        bars(axes, points)
        axes.set_xticks(range(len(points)), [str(each[label]) for each in configurations])
        axes.set(xlabel=label, ylabel=title)
        axes.spines[["top", "right"]].set_visible(False)
    weak.axvline(3.5, color="#333333", linewidth=0.8)
    for place, name in ((1.5, MODEL), (5.5, BOTH)):
        weak.text(place, 1.0, name, ha="center", va="bottom", transform=weak.get_xaxis_transform())
    kind = "in miniature (the paper's bars are of its own models), " if found["miniature"] else ""
    figure.suptitle(f"{kind}{found['processes']} processes, {found['precision']}", fontsize=10)
    handles = [Patch(color=COLOURS[series], label=series) for series in series_of(found["points"])]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=150)


def series_of(points: Sequence[Record]) -> list[str]:
    has_prediction = any(each["predicted"] is not None for each in points)
    return ["paper", *["predicted"] * has_prediction, "measured"]


def bars(axes: Axes, points: Sequence[Record]) -> None:
    shown = series_of(points)
    width = 0.8 / len(shown)
    for place, point in enumerate(points):
        for number, series in enumerate(shown):
            bar(axes, place + (number + 0.5) * width - 0.4, width, series, point)


def bar(axes: Axes, place: float, width: float, series: str, point: Record) -> None:
    value = point[series]
    if value is None:
        axes.text(place, 0, " not run", rotation=90, ha="center", va="bottom", fontsize=7)
        return
    errors = None
    if series == "measured":
        middle = value["median"]
        errors = [[middle - value["p10"]], [value["p90"] - middle]]
        value = middle
    drawn = axes.bar(place, value, 0.94 * width, yerr=errors, color=COLOURS[series], capsize=2)
    form = form_of(point).removesuffix(" %").replace(".1", ".0")
    axes.bar_label(drawn, [form.format(value)], fontsize=7, padding=2)
