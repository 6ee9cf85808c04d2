"""Sequence parallelism and recomputation: bytes that a layer saves and sends.

One of t tensor-parallel ranks runs the forward and backward of a micro-batch in bf16 with dropout,
on tensors without memory (tools/plan/). Counted are the bytes saved between the two, each
storage once and without parameters, and the bytes that collectives send in a ring. A layer is the
difference between two layers and one, in units of s b h, the elements of the hidden states. The
formulas are from table 2 of [Korthikanti et al.](https://arxiv.org/abs/2205.05198). Like these
counts, they assume 2 bytes per element, and include dropout masks of one byte per element.

The benchmark also counts how often a step of a real model waits for the device: the host waits for
every value that it reads, so a GPU runs out of work. A step reads once: loss, gradient norm and
votes together. On a CPU nothing waits, but reads are counted in the same way.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator
from itertools import product

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from tools.layouts.meters import host_reads
from tools.plan.trace import Step

CUT, RATIO = ", sequence parallel", "kept / formula"
READING = """--preset miniature_gpt2 --vocab-size 512 --bf16 --hidden-dropout 0.1
--attention-dropout 0.1"""


def layer(rank: Rank, recomputed: str, t: int, is_cut: bool) -> Turn:
    words = f"--preset gpt2_30m --vocab-size 8192 --bf16 --tensor-model-parallel-size {t} "
    words += f"--recompute-granularity {recomputed} {'--sequence-parallel' if is_cut else ''}"
    configs = (steps.read([*words.split(), "--num-layers", layers], t) for layers in ("1", "2"))
    one, two = (Step(config, t, "bf16", rank.device_type) for config in configs)
    model, s = one.config.model, one.config.data.seq_length
    numbers = one.config.training.micro_batch_size * s * model.hidden_size
    scores = 5 * model.num_attention_heads * s / model.hidden_size
    matmuls = 24 + (scores if recomputed == "none" else 0)
    formula = (10 + matmuls) / t if is_cut else 10 + matmuls / t
    return lambda: {
        "kept": (two.trace.kept - one.trace.kept) / numbers,
        "sent": (two.sent("tensor") - one.sent("tensor")) / numbers,
        "formula": 2.0 if recomputed == "full" else formula,
    }


def reading(rank: Rank) -> Turn:
    step = steps.ours(rank, READING.split())

    def turn() -> Figures:
        with host_reads() as found:
            step()
        return {"reads": found.total()}

    return turn


def contenders(
    flags: Flags, tensor_model_parallel_size: tuple[int, ...] = (1, 2, 4)
) -> Iterator[Contender]:
    """Count for these numbers of ranks. Exit status 1 if a step reads more than once."""
    sizes, granularities = tensor_model_parallel_size, ("none", "selective", "full")
    for t, cut, recomputed in product(sizes, ("", CUT), granularities):
        if t > 1 or not cut:
            own = {"recomputed": recomputed, "t": t, "is_cut": bool(cut)}
            yield Contender(recomputed + cut, layer, own, group=f"t = {t}")
    yield Contender("host reads", reading, group="step")


COLUMNS = (
    Column("kept, s b h", "kept", "{:.1f}"),
    Column("formula, s b h", "formula", "{:.1f}"),
    Column(RATIO, "kept", "{:.2f}", per="formula"),
    Column("sent, s b h", "sent", "{:.1f}"),
    Column("reads", "reads", "{:g}"),
)


def result(found: Results) -> str:
    reads = found.range("reads", "{:g}")
    if RATIO not in found.columns:
        return f"Reads of a step: {reads}."
    kept = found.range(RATIO)
    return f"A layer keeps {kept} of what the formulas say. Reads of a step: {reads}."


def failure(found: Results) -> str:
    return "a step reads again" if found.median("step", "host reads", "reads") > 1 else ""


QUESTION = Question(contenders, COLUMNS, result, failure=failure, rounds=1)

if __name__ == "__main__":
    QUESTION.run()
