"""How cost grows with the model.

Training steps of a model with one size changed at a time: layers, width (with heads of fixed size),
sequence, vocabulary, and the ranks that it is sharded over (one thread each; all others have two).
Time on paper is the step's FLOPs (half for causal attention) at the speed of the axis's first
point, which is nearest to the original model. Ranks that share a core share its speed, and
communication takes no time. Memory is the peak of a rank's model, without what the first steps of
any model load and never free; on paper it is that of tools/plan.py.
"""

if not __package__:  # run as a file, only benchmarks/ is on the path
    __import__("start")

import os
from collections.abc import Iterator
from typing import Literal

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.processes import peak_memory
from tools.plan.trace import Step

CORES = os.cpu_count() or 1
TIME, MEMORY = "time / on paper", "memory / on paper"
TINY = """--preset quickstart --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
--vocab-size 8 --no-bf16"""
WORDS = "--vocab-size 8192 --attention-dropout 0 --hidden-dropout 0 --no-bf16 --preset"
Axis = Literal["layers", "width", "sequence", "vocabulary", "ranks"]
AXES: dict[Axis, tuple[str, tuple[int, ...]]] = {  # flags of a size, and sizes
    "layers": ("--num-layers {n}", (8, 1, 2, 4, 16)),
    "width": ("--hidden-size {n} --num-attention-heads {heads}", (512, 128, 256, 1024)),
    "sequence": ("--seq-length {n} --max-position-embeddings {n}", (256, 128, 512, 1024, 2048)),
    "vocabulary": ("--vocab-size {n}", (4096, 1024, 16384, 65536)),
    "ranks": ("--tensor-model-parallel-size {n}", (1, 2, 4)),
}


def on_paper(flags: list[str], ranks: int, device: str) -> Figures:
    """Estimates per rank: FLOPs, the same as work of a core, and peak bytes."""
    config = steps.read(flags, ranks)
    # A GPU's attention kernel computes the counted FLOPs, except for the scores in the backward.
    step, on_gpu = (Step(config, ranks, "fp32", each) for each in (device, "cuda"))
    matmuls = [pair for work in on_gpu.work.values() for pair in work.matmuls.items()]
    flops = sum(times * each.flops * each.share for each, times in matmuls if not each.again)
    work = flops * max(1, ranks / CORES)
    return {"flops": flops, "work": work, "paper_bytes": step.memory["total"]}


def contender(rank: Rank, flags: list[str]) -> Turn:
    steps.ours(Rank(), TINY.split())()
    peak, step = peak_memory(rank.device_type), steps.ours(rank, flags)
    return lambda: step() | {"rank_bytes": peak()}


def contenders(
    flags: Flags, axes: tuple[Axis, ...] = tuple(AXES), preset: str = "gpt2_30m"
) -> Iterator[Contender]:
    """Measure, in fp32."""
    for axis, n in [(name, n) for name in axes for n in AXES[name][1]]:
        ranks, threads = (n, 1) if axis == "ranks" else (1, 2)
        own = f"{WORDS} {preset} {AXES[axis][0]}".format(n=n, heads=n // 64).split()
        yield Contender(
            f"{n:,}",
            contender,
            {"flags": own},
            group=axis,
            ranks=ranks,
            threads=threads,
            facts=on_paper(own, ranks, flags.device),
            x=n,
        )


def seconds_on_paper(own: Figures, first: Figures) -> float:
    return float(first["wall"] * own["work"] / first["work"])


COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("seconds on paper", seconds_on_paper, "{:.3f}"),
    Column(TIME, lambda own, first: own["wall"] / seconds_on_paper(own, first), "{:.2f}"),
    Column("MiB of a rank", "rank_bytes", "{:,.0f}", unit=2**20),
    Column("MiB on paper", "paper_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY, "rank_bytes", "{:.2f}", per="paper_bytes"),
)
RESULT = "A step takes {} of its seconds on paper, and {} of its memory on paper."
QUESTION = Question(
    contenders,
    COLUMNS,
    lambda found: RESULT.format(found.range(TIME), found.range(MEMORY)),
    warm_up=2,
    picture="lines",
    drawn=("seconds | seconds on paper", "MiB of a rank | MiB on paper"),
)

if __name__ == "__main__":
    QUESTION.run()
