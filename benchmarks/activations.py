"""Sequence parallelism and recomputation: what a layer keeps and sends.

One of t tensor-parallel ranks runs the forward and backward of a micro-batch in bf16 on tensors
without memory (tools/planning/trace.py): bytes that are kept between the two, each memory once and
without parameters, and bytes that collectives send in a ring. A layer is the difference of two
layers and one, in units of s b h, the numbers of the stream. The formulas are those of table 2 of
[Korthikanti et al.](https://arxiv.org/abs/2205.05198); like these counts they are of 2 bytes a
number, and with masks of dropout, a byte each.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.report import Results
from tools.planning.trace import Step

KEPT, CUT = "kept, s b h", ", sequence parallel"


def layer(rank: Rank, flags: list[str], t: int) -> Turn:
    configs = (steps.read([*flags, "--num-layers", layers], t) for layers in "12")
    one, two = (Step(config, t, "bf16", rank.device_type) for config in configs)
    model, s = one.config.model, one.config.data.seq_length
    numbers = one.config.training.micro_batch_size * s * model.hidden_size
    scores = 5 * model.num_attention_heads * s / model.hidden_size
    whole = 24 + (scores if model.recompute_granularity == "none" else 0)
    formula = (10 + whole) / t if one.config.parallel.cuts_stream else 10 + whole / t
    return lambda: {
        "kept": (two.trace.kept - one.trace.kept) / numbers,
        "sent": (two.sent("tensor") - one.sent("tensor")) / numbers,
        "formula": 2.0 if model.recompute_granularity == "full" else formula,
    }


def contenders(
    flags: Flags,
    dropout: tuple[float, ...] = (0.0, 0.1),
    tensor_parallel: tuple[int, ...] = (1, 2, 4),
) -> Iterator[Contender]:
    """Count, for these rates of dropout and numbers of ranks."""
    for p, t, cut in product(dropout, tensor_parallel, ("", CUT)):
        for recomputed in ("none", "selective", "full") if t > 1 or not cut else ():
            words = f"--preset gpt2_30m --vocab-size 8192 --bf16 --attention-dropout {p} "
            words += f"--hidden-dropout {p} --recompute-granularity {recomputed} "
            words += f"--tensor-model-parallel-size {t} {'--sequence-parallel' if cut else ''}"
            own, group = {"flags": words.split(), "t": t}, f"t = {t}, dropout {p:g}"
            yield Contender(recomputed + cut, layer, own, group=group)


def result(found: Results) -> str:
    pairs = (
        f"{found.median(group, name, KEPT):.1f} instead of {found.median(group, whole, KEPT):.1f} "
        f"({whole} recomputed, {group})"
        for group, name in found.rows
        if name.endswith(CUT) and (whole := name.removesuffix(CUT)) != "full"
    )
    return f"With sequence parallelism a layer keeps {', '.join(pairs)} s b h bytes."


TITLES = {KEPT: "kept", "formula, s b h": "formula", "sent, s b h": "sent"}
COLUMNS = [Column(title, key, "{:.1f}") for title, key in TITLES.items()]
QUESTION = Question(contenders, COLUMNS, result, rounds=1, warm_up=0)

if __name__ == "__main__":
    QUESTION.run()
