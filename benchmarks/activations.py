"""Sequence parallelism and recomputation: what a layer keeps and sends.

One of t tensor-parallel ranks runs the forward and backward of a micro-batch in bf16 with dropout
on tensors without memory (tools/planning/trace.py): bytes that are kept between the two, each
memory once and without parameters, and bytes that collectives send in a ring. A layer is the
difference of two layers and one, in units of s b h, the numbers of the stream. The formulas are
those of table 2 of [Korthikanti et al.](https://arxiv.org/abs/2205.05198); like these counts they
are of 2 bytes a number, and with masks of dropout, a byte each.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from tools.planning.trace import Step

FLAGS = "--preset gpt2_30m --vocab-size 8192 --bf16 --tensor-model-parallel-size {}"
CUT, RATIO = ", sequence parallel", "kept / formula"


def layer(rank: Rank, recomputed: str, t: int, is_cut: bool) -> Turn:
    words = [*FLAGS.format(t).split(), "--recompute-granularity", recomputed]
    words += ["--sequence-parallel"] if is_cut else []
    configs = (steps.read([*words, "--num-layers", layers], t) for layers in "12")
    one, two = (Step(config, t, "bf16", rank.device_type) for config in configs)
    model, data = one.config.model, one.config.data
    numbers = one.config.training.micro_batch_size * data.seq_length * model.hidden_size
    scores = 5 * model.num_attention_heads * data.seq_length / model.hidden_size
    matmuls = 24 + (scores if recomputed == "none" else 0)
    formula = (10 + matmuls) / t if is_cut else 10 + matmuls / t
    return lambda: {
        "kept": (two.trace.kept - one.trace.kept) / numbers,
        "sent": (two.sent("tensor") - one.sent("tensor")) / numbers,
        "formula": 2.0 if recomputed == "full" else formula,
    }


def contenders(flags: Flags, tensor_parallel: tuple[int, ...] = (1, 2, 4)) -> Iterator[Contender]:
    """Count, for these numbers of ranks."""
    for t, cut, recomputed in product(tensor_parallel, ("", CUT), ("none", "selective", "full")):
        if t > 1 or not cut:
            own = {"recomputed": recomputed, "t": t, "is_cut": bool(cut)}
            yield Contender(recomputed + cut, layer, own, group=f"t = {t}")


COLUMNS = (
    Column("kept, s b h", "kept", "{:.1f}"),
    Column("formula, s b h", "formula", "{:.1f}"),
    Column(RATIO, "kept", "{:.2f}", per="formula"),
    Column("sent, s b h", "sent", "{:.1f}"),
)
RESULT = "A layer keeps {} of what the formulas say."
QUESTION = Question(
    contenders, COLUMNS, lambda found: RESULT.format(found.range(RATIO)), rounds=1, warm_up=0
)

if __name__ == "__main__":
    QUESTION.run()
