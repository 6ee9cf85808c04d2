"""Recomputation: what it costs and saves.

Whole training steps of this project with --recompute-granularity none, selective and full, without
dropout and with the paper's, from the same weights on the same samples, whose losses have to be the
same bit for bit. FLOPs are those of tools/plan.py, with causal attention's products whole.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch._dynamo  # noqa: F401 - here, or the first recomputation would import it

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from tools.planning.trace import Step

RATIO = "its time / none's"


def contender(rank: Rank, flags: list[str]) -> Turn:
    return steps.ours(rank, flags, keeps=True)


def contenders(flags: Flags, preset: str = "gpt2_30m", bf16: bool = False) -> Iterator[Contender]:
    """Compare steps, of a preset of pretrain_gpt2.py, in fp32 or bf16."""
    for p, name in product((0.0, 0.1), ("none", "selective", "full")):
        words = ["--preset", preset, "--vocab-size", "8192", "--recompute-granularity", name]
        words += ["--attention-dropout", str(p), "--hidden-dropout", str(p)]
        words.append("--bf16" if bf16 else "--no-bf16")
        facts = {"flops": Step(steps.read(words), 1, "bf16" if bf16 else "fp32").executed_flops}
        group, own = f"dropout {p:g}", {"flags": words}
        yield Contender(name, contender, own, group=group, threads=2, same={"loss": 0}, facts=facts)


COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("its FLOPs / none's", "flops", "{:.3f}", "its / first"),
    Column("kept for the backward, MiB", "kept_bytes", "{:,.0f}", unit=2**20),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
)
RESULT = "With selective or full recomputation a step takes {} times as long."
QUESTION = Question(
    contenders, COLUMNS, lambda found: RESULT.format(found.range(RATIO)), turns=3, warm_up=2
)

if __name__ == "__main__":
    QUESTION.run()
