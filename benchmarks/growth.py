"""How time and memory of this project's training steps grow, beside what they would on paper.

One model, of which one size at a time is changed: layers, width (heads of one size), sequence,
vocabulary, and the ranks that it is cut over (one thread each, where all else has two). On paper a
step takes its FLOPs (of causal attention half) at the speed of the point that is nearest to the
model as it is, which is the first of its axis; ranks that share a core share its speed, and what
they send takes no time. Memory is that of a rank's model at its peak, beyond what the first steps
of any model load and never give back; on paper it is that of tools/plan.py.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.processes import peak_memory
from benchmarks.report import Results, markdown
from tools.planning import communication, memory, products
from tools.planning.hardware import load_hardware
from tools.planning.shape import shape_of

TIME, MEMORY = ("seconds", "seconds on paper"), ("MiB of a rank", "MiB on paper")
TINY = (
    *("--preset", "quickstart", "--num-layers", "1", "--hidden-size", "8", "--vocab-size", "8"),
    *("--num-attention-heads", "1", "--seq-length", "8", "--micro-batch-size", "1", "--no-bf16"),
)
# Flags by which an axis takes a value, with the size of a head.
FLAGS: dict[str, Callable[[int, int], list[str]]] = {
    "layers": lambda n, _: ["--num-layers", f"{n}"],
    "width": lambda n, head: ["--hidden-size", f"{n}", "--num-attention-heads", f"{n // head}"],
    "sequence": lambda n, _: ["--seq-length", f"{n}", "--max-position-embeddings", f"{n}"],
    "vocabulary": lambda n, _: ["--vocab-size", f"{n}"],
    "ranks": lambda n, _: ["--tensor-model-parallel-size", f"{n}"],
}


def on_paper(flags: list[str], ranks: int) -> Figures:
    """FLOPs of a rank, of causal attention half; its bytes at the peak; and bytes that it sends."""
    config = steps.read(flags, ranks)
    shape = shape_of(config, ranks, steps.precision_of(config))
    passes = 3 if shape.recompute == "none" else 4
    core = passes * sum(each.flops for each in products.attention(shape))
    calls = communication.tensor_calls(shape)
    return {
        "flops": products.executed_flops(shape) / ranks - core / 2,
        "paper_bytes": memory.memory(shape, load_hardware("cpu"))["total"],
        "sent": 2 * (ranks - 1) / ranks * sum(each.times * each.bytes for each in calls),
    }


def contender(rank: Rank, flags: list[str]) -> Turn:
    steps.ours(Rank(), TINY)()
    peak, paper = peak_memory(rank.device_type), on_paper(flags, rank.size)
    step = steps.ours(rank, flags)
    crowd = max(1.0, rank.size / (os.cpu_count() or 1))
    return lambda: {**(step() or {}), **paper, "crowd": crowd, "rank_bytes": peak()}


def seconds_on_paper(own: Figures, first: Figures) -> float | None:
    if not first:
        return None
    return float(own["flops"] * own["crowd"] / first["flops"] * first["wall"])


def axis(name: str, values: Sequence[int], flags: list[str]) -> Iterator[Contender]:
    """The point that is nearest to the model of the flags is the first."""
    config = steps.read(flags)
    model, s = config.model, config.data.seq_length
    sizes = (model.num_layers, model.hidden_size, s, model.vocab_size, 1)
    own = dict(zip(FLAGS, sizes, strict=True))[name]
    nearest = min(values, key=lambda value: abs(value - own), default=own)
    for value in sorted(values, key=lambda value: (value != nearest, value)):
        more = FLAGS[name](value, model.hidden_size // model.num_attention_heads)
        yield Contender(
            name=f"{value:,}",
            group=name,
            run=contender,
            arguments={"flags": [*flags, *more]},
            ranks=value if name == "ranks" else 1,
            threads=1 if name == "ranks" else 2,
            x=value,
        )


def exponent(points: dict[float, float]) -> float:
    """k of the power x^k that comes nearest, on logarithmic axes; NaN of fewer than two points."""
    points = {x: y for x, y in points.items() if y == y}
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(np.log([*points]), np.log([*points.values()]), 1)[0])


def summary(found: Results) -> str:
    """A sentence and a table: how much the last point of an axis takes of its first, and powers."""
    rows, said = [], []
    for group in dict.fromkeys(group for group, _ in found.rows):
        own = sorted((c.x, c.name) for c in found.question.contenders if c.group == group)
        for what, titles in (("time", TIME), ("memory", MEMORY)):
            pair = [{x: found.median(group, name, title) for x, name in own} for title in titles]
            ratios = [f"{each[own[-1][0]] / each[own[0][0]]:.2f}" for each in pair]
            powers = [f"{exponent(each):.2f}" for each in pair]
            rows.append([f"{group}, {own[0][1]} to {own[-1][1]}", what, *ratios, *powers])
            if what == "time":
                said.append(f"{powers[0]} of the {group} (on paper {powers[1]})")
    header = ["", "", "last / first", "on paper", "exponent", "on paper"]
    return f"Time grows as the power {', '.join(said)}.\n\n{markdown(header, rows)}"


def main(
    flags: Flags,
    layers: tuple[int, ...] = (1, 2, 4, 8, 16),
    width: tuple[int, ...] = (128, 256, 512, 1024),
    sequence: tuple[int, ...] = (128, 256, 512, 1024, 2048),
    vocabulary: tuple[int, ...] = (1024, 4096, 16384, 65536),
    ranks: tuple[int, ...] = (1, 2, 4),
    dtype: Literal["fp32", "bf16"] = "fp32",
    preset: str = "gpt2_30m",
    vocab_size: int = 8192,
) -> None:
    """Measure.

    Args:
        layers: values of this axis, or none; so are the next four.
        width: multiples of the model's head size.
        sequence: tokens of a sample.
        vocabulary: tokens that there are.
        ranks: tensor-parallel, one thread each.
        dtype: of weights and activations.
        preset: of pretrain_gpt2.py, a name or a file.
        vocab_size: but on the axis of vocabularies.
    """
    words = ["--preset", preset, "--vocab-size", str(vocab_size), "--attention-dropout", "0"]
    words += ["--hidden-dropout", "0", "--bf16" if dtype == "bf16" else "--no-bf16"]
    values = dict(zip(FLAGS, (layers, width, sequence, vocabulary, ranks), strict=True))
    ask(
        Question(
            title="How cost grows with the model",
            method=__doc__,
            contenders=[c for name, each in values.items() for c in axis(name, each, words)],
            columns=(
                Column(TIME[0], "wall", "{:.3f}"),
                Column(TIME[1], seconds_on_paper, "{:.3f}"),
                Column("GFLOP/s of a rank", "flops", "{:.0f}", per="wall", unit=1e9),
                Column(MEMORY[0], "rank_bytes", "{:,.0f}", unit=2**20),
                Column(MEMORY[1], "paper_bytes", "{:,.0f}", unit=2**20),
                Column("MiB sent by a rank", "sent", "{:,.0f}", unit=2**20),
            ),
            result=summary,
            warm_up=2,
            packages=("torch",),
            settings={"preset": Path(preset).name.removesuffix(".toml"), "dtype": dtype},
            picture="lines",
            drawn=(" | ".join(TIME), " | ".join(MEMORY)),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
