"""How cost grows with the model.

Training steps of a model of which one size at a time is changed: layers, width (heads of one size),
sequence, vocabulary, and the ranks that it is cut over (one thread each, where all else has two).
On paper a step takes its FLOPs (of causal attention half) at the speed of its axis's first point,
which is the nearest to the model as it is; ranks that share a core share its speed, and what they
send takes no time. Memory is that of a rank's model at its peak, beyond what the first steps of any
model load and never give back; on paper it is that of tools/plan.py.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.processes import peak_memory
from benchmarks.report import Results
from tools.planning.trace import Step

TIME, MEMORY = ("seconds", "seconds on paper"), ("MiB of a rank", "MiB on paper")
TINY = """--preset quickstart --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
--vocab-size 8 --no-bf16"""
AXES = {
    "layers": ("--num-layers {n}", (8, 1, 2, 4, 16)),
    "width": ("--hidden-size {n} --num-attention-heads {heads}", (512, 128, 256, 1024)),
    "sequence": ("--seq-length {n} --max-position-embeddings {n}", (256, 128, 512, 1024, 2048)),
    "vocabulary": ("--vocab-size {n}", (4096, 1024, 16384, 65536)),
    "ranks": ("--tensor-model-parallel-size {n}", (1, 2, 4)),
}


def on_paper(flags: list[str], ranks: int, device: str) -> Figures:
    """Of a rank: FLOPs, bytes at the peak, and bytes that it sends."""
    config = steps.read(flags, ranks)
    step, on_gpu = (Step(config, ranks, steps.precision_of(config), d) for d in (device, "cuda"))
    # Of attention a GPU's kernel computes what is counted, the backward's scores aside.
    matmuls = [pair for work in on_gpu.work.values() for pair in work.matmuls.items()]
    flops = sum(times * each.flops * each.share for each, times in matmuls if not each.again)
    crowd = max(1.0, ranks / (os.cpu_count() or 1))
    own = {"flops": flops, "work": flops * crowd, "sent": step.sent("tensor")}
    return own | {"paper_bytes": step.memory["total"]}


def contender(rank: Rank, flags: list[str]) -> Turn:
    steps.ours(Rank(), TINY.split())()
    peak, step = peak_memory(rank.device_type), steps.ours(rank, flags)
    return lambda: step() | {"rank_bytes": peak()}


def contenders(
    flags: Flags, axes: tuple[str, ...] = tuple(AXES), preset: str = "gpt2_30m", bf16: bool = False
) -> Iterator[Contender]:
    """Measure, in fp32 or bf16. Axes: layers, width, sequence, vocabulary, ranks."""
    words = f"--preset {preset} --vocab-size 8192 --attention-dropout 0 --hidden-dropout 0 "
    words += "--bf16 " if bf16 else "--no-bf16 "
    for axis, n in [(name, n) for name in axes for n in AXES[name][1]]:
        ranks, threads = (n, 1) if axis == "ranks" else (1, 2)
        given = (words + AXES[axis][0].format(n=n, heads=n // 64)).split()
        yield Contender(
            f"{n:,}", contender, {"flags": given}, group=axis, ranks=ranks, threads=threads, x=n,
            facts=on_paper(given, ranks, flags.device),
        )  # fmt: skip


def result(found: Results) -> str:
    """The powers of the sizes that come nearest, on logarithmic axes."""
    said = {"Time": [], "Memory": []}
    for axis in dict.fromkeys(group for group, _ in found.rows):
        rows = [row for row in found.rows if row[0] == axis]
        sizes = np.log([found.contenders[row]["x"] for row in rows])
        for titles, powers in zip((TIME, MEMORY), said.values(), strict=True):
            costs = np.log([[found.median(*row, title) for title in titles] for row in rows])
            measured, paper = np.polyfit(sizes, costs, 1)[0]
            powers.append(f"{measured:.2f} of the {axis} (on paper {paper:.2f})")
    return " ".join(f"{what} grows as the power {', '.join(said[what])}." for what in said)


COLUMNS = (
    Column(TIME[0], "wall", "{:.3f}"),
    Column(TIME[1], lambda x, first: first["wall"] * x["work"] / first["work"], "{:.3f}"),
    Column("GFLOP/s of a rank", "flops", "{:.0f}", per="wall", unit=1e9),
    Column(MEMORY[0], "rank_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY[1], "paper_bytes", "{:,.0f}", unit=2**20),
    Column("MiB sent by a rank", "sent", "{:,.0f}", unit=2**20),
)
DRAWN = (" | ".join(TIME), " | ".join(MEMORY))
QUESTION = Question(contenders, COLUMNS, result, warm_up=2, picture="lines", drawn=DRAWN)

if __name__ == "__main__":
    QUESTION.run()
