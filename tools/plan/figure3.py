"""Figure 3 of the Colossal-AI paper: memory of a rank and the largest model, by tensor-parallel
mode; and the communication of each mode.

    n tokens of all ranks of a layer   h hidden size   P ranks = d q^2 = l^3

Elements that a rank sends in one layer of a transformer, forward and backward, without
recomputation:

    1d          8 (P - 1) / P n h
    2d, 2.5d    3 (q - 1) / q^2 (7 n h / d + 12 h^2)
    3d          (l - 1) / l^3 (39 n h + 36 h^2)

In all modes but 1d, statistics of norms come on top, a few numbers for each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron.config.model import RecomputeGranularity
from megatron.config.parallel import TrainingParallelConfig
from tools.layouts.layout import parse_layout
from tools.layouts.work import Call, Work
from tools.plan.hardware import Hardware
from tools.plan.record import table
from tools.plan.software import gpt2
from tools.plan.trace import Step
from tools.report.figures import PALETTE, SERIES, Axes, picture

Rows = list[dict[str, Any]]
LAYOUTS = (
    *("tensor=4", "tensor=4:2d"),
    *("tensor=8", "tensor=8:2.5d:2", "tensor=8:3d"),
    *("tensor=16", "tensor=16:2d", "tensor=16:2.5d:4"),
    *("tensor=64", "tensor=64:2d", "tensor=64:2.5d:4", "tensor=64:3d"),
)
CUBES = {2: "tensor=8:3d", 3: "tensor=27:3d", 4: "tensor=64:3d"}  # by side
PAPER = {4: 3e9, 16: 12e9}  # parameters of the largest model at batch 16, by GPUs
LAYERS = 14  # of the model whose memory is shown: 3.0 billion parameters at hidden size 4096
# Precision, recomputation, and tokens of a sample / those asked for.
TRIED: tuple[tuple[str, RecomputeGranularity, float], ...] = (
    ("fp16", "none", 1),
    ("fp16", "full", 1),
    ("fp16", "full", 0.5),
    ("fp32", "full", 1),
)
LINEARS = ((1, 3), (1, 1), (1, 4), (4, 1))  # of a layer: (columns in, out) / hidden size


@dataclass(frozen=True)
class Model:
    """A GPT-2, and the batch of the ranks of one layer, in samples."""

    hidden: int
    heads: int
    sequence: int
    batch: int
    recompute: RecomputeGranularity = "none"
    precision: str = "fp32"
    vocabulary: int = 50_257
    device: str = "cuda"

    def step(self, layout: str, layers: int) -> Step:
        found = parse_layout(layout)
        batch_ranks = TrainingParallelConfig(**found.settings).batch_parallel_size(found.ranks)
        config = gpt2(
            num_layers=layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=self.sequence,
            vocab_size=self.vocabulary,
            recompute_granularity=self.recompute,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            micro_batch_size=self.batch // batch_ranks,
            global_batch_size=self.batch,
            **found.settings,
        )
        config.check(found.ranks)
        return Step(config, found.ranks, self.precision, self.device)

    def layer(self, layout: str) -> Counter[Call]:
        """Collectives of one layer, forward and backward."""
        one, two = (self.step(layout, layers).trace.work for layers in (1, 2))
        return sum((two[phase].plus(one[phase], -1).calls for phase in one), Work().calls)


# The model whose memory is planned, and the one whose communication is counted: 64 ranks and sides
# of 3 divide it.
PLANNED = Model(hidden=4096, heads=64, sequence=1024, batch=16, precision="fp16")
COUNTED = Model(hidden=2304, heads=192, sequence=64, batch=144)


def coefficients(
    layout: str, linears: Sequence[tuple[float, float]] = LINEARS
) -> tuple[float, float]:
    """Coefficients (of n h, of h^2) of the elements that a rank sends for linear layers. In 1D the
    narrower side of each layer is that of the hidden states."""
    found = parse_layout(layout)
    parallel = TrainingParallelConfig(**found.settings)
    mode, side, d, ranks = found.mode, parallel.side, found.depth, found.ranks
    if mode == "1d":
        return 2 * (ranks - 1) / ranks * sum(map(min, linears)), 0.0
    weights = sum(x * y for x, y in linears)
    if mode == "3d":
        tokens = sum(3 * x + 2 * y for x, y in linears)
        return (side - 1) / side**3 * tokens, (side - 1) / side**3 * 3 * weights
    tokens = sum(x for x, _ in linears)
    return 3 * (side - 1) / side**2 * tokens / d, 3 * (side - 1) / side**2 * weights


def sent(calls: Counter[Call], step: Step) -> int:
    """Bytes that one rank sends."""
    rings = step.model.rings
    return sum(times * call.sent(rings[call.axis].ranks) for call, times in calls.items())


def hops(calls: Counter[Call], step: Step) -> int:
    """Hops of the rings, one after another."""
    ranks = {name: ring.ranks for name, ring in step.model.rings.items()}
    return sum(times * call.passes * (ranks[call.axis] - 1) for call, times in calls.items())


def largest(model: Model, layout: str, limit: float) -> int:
    """Parameters of the deepest model that fits; 0 if none does."""

    def total(layers: int) -> int:
        return model.step(layout, layers).memory["total"]

    two, three = total(2), total(3)
    layers = max(0, 2 + int((limit - two) / (three - two)))  # or one of its neighbours
    while layers and total(layers) > limit:
        layers -= 1
    while total(layers + 1) <= limit:
        layers += 1
    return model.step(layout, layers).parameters if layers else 0


def study(hardware: Hardware) -> dict[str, Any]:
    """JSON."""
    model, memory, sizes = PLANNED, Rows(), Rows()
    for layout in LAYOUTS:
        step = model.step(layout, LAYERS)
        recomputed = replace(model, recompute="full").step(layout, LAYERS)
        row = {"parameters": step.parameters, "states_bytes": sum(step.lasting.values())}
        row |= {"activations_bytes": step.activations, "recomputed_bytes": recomputed.activations}
        memory.append(_facts(layout) | row)
    for layout, (precision, recompute, share) in product(LAYOUTS, TRIED):
        sequence = round(share * model.sequence)
        tried = replace(model, precision=precision, recompute=recompute, sequence=sequence)
        facts = _facts(layout) | {"precision": precision, "recompute": recompute}
        parameters = largest(tried, layout, hardware.limit)
        paper = PAPER.get(parse_layout(layout).ranks)
        sizes.append(facts | {"sequence": sequence, "parameters": parameters, "paper": paper})
    return {
        "hardware": hardware.name,
        "memory_of_device_bytes": int(hardware.limit),
        "model": asdict(model) | {"layers": LAYERS},
        "memory_per_rank": memory,
        "largest_model": sizes,
        "sent_per_layer": [*map(_volume, LAYOUTS)],
        "growth_of_3d": [_growth(*each) for each in CUBES.items()],
    }


def _facts(layout: str) -> dict[str, Any]:
    found = parse_layout(layout)
    return {"gpus": found.ranks, "mode": found.mode, "layout": layout}


def _volume(layout: str) -> dict[str, Any]:
    """Volumes of a layer of COUNTED, in fp32. `published` compares with `of_square_linear`:
    elements of a linear layer with n = h, in units of h^2. pays_from_tokens_by_hidden: tokens /
    hidden size above which a layer sends less than in 1D on as many ranks."""
    n, h = COUNTED.batch * COUNTED.sequence, COUNTED.hidden
    step, (tokens, weights) = COUNTED.step(layout, 1), coefficients(layout)
    of_1d, _ = coefficients(f"tensor={step.ranks}")
    return {
        **_facts(layout),
        "sent_bytes": sent(COUNTED.layer(layout), step),
        "formula_bytes": 4 * (tokens * n * h + weights * h**2),
        "pays_from_tokens_by_hidden": weights / (of_1d - tokens) if of_1d != tokens else None,
        "of_square_linear": sum(coefficients(layout, [(1, 1)])),
        "published": published(layout),
    }


def published(layout: str) -> float:
    """The bandwidth cost in the paper's table."""
    found = parse_layout(layout)
    side, d = TrainingParallelConfig(**found.settings).side, found.depth
    return {
        "1d": 2 * (side - 1) / side,
        "2d": 6 * (side - 1) / side,
        "2.5d": 3 * (side - 1) * (d + 1) / (d * side),
        "3d": 6 * (side - 1) / side**3,
    }[found.mode]


def _growth(side: int, layout: str) -> dict[str, Any]:
    """A layer in 3D on more ranks: with the same problem, and with as many times the tokens."""
    calls, step = COUNTED.layer(layout), COUNTED.step(layout, 1)
    more = replace(COUNTED, batch=step.ranks * COUNTED.batch // 8)
    return {
        "side": side,
        "gpus": step.ranks,
        "calls": sum(calls.values()),
        "hops": hops(calls, step),
        "sent_bytes_of_rank": sent(calls, step),
        "sent_bytes_of_all": step.ranks * sent(calls, step),
        "sent_bytes_of_rank_with_more_tokens": sent(more.layer(layout), step),
    }


def text(found: dict[str, Any]) -> str:
    """The study as readable tables."""

    def shown(key: str, value: Any) -> Any:
        if value is None:
            return ""
        return f"{value / 1e9:.3f} GB" if key.endswith("bytes") else value

    return "\n\n".join(
        f"{name}\n{table([{key: shown(key, row[key]) for key in row} for row in rows])}"
        for name, rows in found.items()
        if isinstance(rows, list) and rows
    )


DASHES = {4: ":", 8: "-.", 16: "--", 64: "-"}  # by GPUs
MARKERS = {"1d": "s", "2d": "o", "2.5d": "^", "3d": "D"}


def draw(ending: str, found: dict[str, Any]) -> bytes:
    """Memory and the largest model by ranks, and the bytes that a layer sends by tokens."""
    model, memory = found["model"], found["memory_per_rank"]
    tried = {"precision": "fp16", "recompute": "full", "sequence": model["sequence"]}
    best = [row for row in found["largest_model"] if tried.items() <= row.items()]
    colours = dict(zip(MARKERS, SERIES, strict=False))
    ticks = sorted({row["gpus"] for row in memory})

    def by_gpus(axes: Axes, rows: Rows, key: str, title: str, label: str) -> None:
        for mode, marker in MARKERS.items():
            own = [row for row in rows if row["mode"] == mode]
            gpus, values = [row["gpus"] for row in own], [row[key] / 1e9 for row in own]
            axes.plot(gpus, values, color=colours[mode], marker=marker, label=mode)
        claim = {row["gpus"]: row["paper"] / 1e9 for row in rows if row.get("paper")}
        if claim:
            axes.plot([*claim], [*claim.values()], "k*", markersize=14, label="the paper")
        axes.set(title=title, xlabel="GPUs", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(ticks, map(str, ticks))
        low, high = axes.get_ylim()
        values = [digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5)]
        values = [value for value in values if low <= value <= high]
        axes.set_yticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()

    def by_tokens(axes: Axes) -> None:
        ratios = [2 ** (power / 8) for power in range(-16, 49)]
        for row in found["sent_per_layer"]:
            if (mode := row["mode"]) == "1d":
                continue
            tokens, weights = coefficients(row["layout"])
            of_1d, _ = coefficients(f"tensor={row['gpus']}")
            shares = [(tokens * ratio + weights) / (of_1d * ratio) for ratio in ratios]
            line, name = DASHES[row["gpus"]], f"{mode} on {row['gpus']}"
            axes.plot(ratios, shares, line, color=colours[mode], label=name)
        axes.axhline(1, color=PALETTE["ink"], linewidth=0.8)
        axes.set(title="bytes that a rank sends in a layer", xlabel="tokens n / hidden size h")
        axes.set(ylabel="of those in 1d", xscale="log", ylim=(0, 3))

    def paint(grid: Any) -> None:
        lasting = "weights, gradients and optimizer's state of a rank"
        kept = "activations of a rank, nothing recomputed"
        by_gpus(grid[0, 0], memory, "states_bytes", lasting, "GB")
        by_gpus(grid[0, 1], memory, "activations_bytes", kept, "GB")
        most = "largest model, all recomputed"
        by_gpus(grid[1, 0], best, "parameters", most, "billion parameters")
        by_tokens(grid[1, 1])
        for axes in grid.flat:
            axes.grid()
            axes.legend(fontsize=8)

    title = (
        f"GPT-2, hidden {model['hidden']}, sequence {model['sequence']}, batch {model['batch']}, "
        f"fp16; memory of {model['layers']} layers; {found['hardware']}"
    )
    return picture(paint, ending, (13, 9), (2, 2), title)
