"""What a training step of a case takes on paper, of one rank, by the formulas of tools/plan.py."""

from functools import cache

from tools.planning.shape import Shape

from benchmarks.cases import Case
from megatron.config.model import RecomputeGranularity
from tools.planning import communication, memory, products
from tools.planning.hardware import Hardware, load_hardware


def shape(
    case: Case,
    tensor_parallel: int = 1,
    recompute: RecomputeGranularity = "none",
    width: int = 4,
) -> Shape:
    """width: bytes of a weight and of an activation."""
    return Shape(
        kind="gpt2",
        layers=case.num_layers,
        hidden=case.hidden_size,
        heads=case.heads,
        sequence=case.sequence,
        positions=case.sequence,
        vocabulary=case.vocab_size,
        divisible_by=case.divisible_by,
        batch=case.batch,
        micro_batches=1,
        tensor=tensor_parallel,
        data=1,
        width=width,
        recompute=recompute,
        attention_dropout=False,
        hidden_dropout=False,
    )


def flops(step: Shape, *, causal: bool = True) -> float:
    """Of the matrix products, those that the backward pass computes again included.

    causal: half of attention's products are left out, as they may be.
    """
    passes = 3 if step.recompute == "none" else 4
    attention = passes * sum(each.flops for each in products.attention(step))
    return products.executed_flops(step) / step.tensor - attention / 2 * causal


def sent(step: Shape) -> float:
    """Bytes; a ring sends every number 2 (t - 1) / t times."""
    calls = communication.tensor_calls(step)
    return 2 * (step.tensor - 1) / step.tensor * sum(each.times * each.bytes for each in calls)


def held(step: Shape) -> int:
    """Bytes, at the most, on a CPU."""
    return memory.memory(step, _cpu())["total"]


@cache
def _cpu() -> Hardware:
    return load_hardware("cpu")
