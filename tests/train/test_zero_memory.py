"""ZeRO divides its tensors: bytes of live tensors between steps, and most of them in a step. In
stage 3 the weights of a layer are gathered while the one before it computes."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from megatron.parallel.buckets import IN_FLIGHT, GradientBuckets
from megatron.parallel.zero3 import Unit
from megatron.train.state import DTYPES, TrainState
from megatron.train.step import train_step
from tests.dist import on_ranks
from tests.tiny import (
    Watch,
    live_memories,
    live_tensors,
    mesh_of_ranks,
    rows,
    samples,
    tiny_config,
    tiny_state,
)
from tests.tools.plan.counted import Sums
from tools.layouts.work import Meter

LAYERS = 6
# Wide, of few tokens, and recomputed: weights take the memory, not activations.
SECTION = tiny_config(num_layers=LAYERS, hidden_size=128, recompute_granularity="full")
BUCKET_BYTES = 3 * 2**17  # of half of the gradients of a layer, or less
WIDE = 4  # bytes of a gradient, master or moment
WIDTHS = {"bf16": 2, "fp32": 4}  # bytes of a weight


@dataclass(frozen=True)
class Memory:
    """By one rank. Numbers of elements are those of whole buckets, with what fills them up."""

    lasting: int  # bytes between steps
    more: int  # bytes, at most, in a step
    sums: int  # of gradients that are under way, at most
    elements: int
    buckets: list[int]  # elements of each
    layers: list[int]  # and of those of layers, in stage 3


@pytest.mark.parametrize(("precision", "ranks"), [("bf16", 4), ("fp32", 2)])
@on_ranks("ranks")
def test_what_lasts_and_what_a_step_adds_are_divided(precision: str, ranks: int) -> None:
    of_stages = [hold(precision, stage) for stage in (0, 1, 2, 3)]
    activations = of_stages[0].more
    for stage, found in enumerate(of_stages):
        each = found.lasting / found.elements
        assert each == pytest.approx(bytes_each(precision, stage, ranks), rel=0.05), stage
        wanted = activations + in_flight(found, precision, stage, ranks)
        # When most gradients are there some activations are gone, up to 5.1 % of it all.
        assert 0.94 * wanted < found.more < 1.05 * wanted, stage
        assert stage < 2 or found.sums == IN_FLIGHT, stage


def bytes_each(precision: str, stage: int, ranks: int) -> float:
    """Lasting bytes of a parameter: of its weight, gradient, master and two moments. In fp32 the
    weight is its own master, but in stage 3 no weight lasts."""
    width, has_masters = WIDTHS[precision], precision != "fp32" or stage == 3
    weight = 0 if stage == 3 else width
    gradient = WIDE / (ranks if stage >= 2 else 1)
    return weight + gradient + (2 + has_masters) * WIDE / (ranks if stage >= 1 else 1)


def in_flight(found: Memory, precision: str, stage: int, ranks: int) -> float:
    """Bytes of a step beside activations: gradients of the bucket that fills and of those that are
    reduced, with the sums that arrive; weights of the layer in use and of the next one, and from
    stage 3 on both of all that is in no layer."""
    if stage < 2:
        return 0
    # In stage 2 the tied embedding, whose gradients the head begins, is in the last bucket.
    divided = found.layers if stage == 3 else found.buckets[:-1]
    rest = sum(found.buckets) - sum(found.layers) if stage == 3 else found.buckets[-1]
    # Biases of a layer, in the bucket that fills, come after weights that begin the next one.
    filling, arriving = most(divided, IN_FLIGHT + 2), most(divided, IN_FLIGHT)
    gradients = WIDE * (filling + arriving / ranks + rest)
    if stage == 2:
        return gradients
    return gradients + WIDTHS[precision] * (2 * sum(found.layers) / LAYERS + rest)


def most(sizes: list[int], number: int) -> int:
    """The largest number of elements of so many neighbours."""
    return max(sum(sizes[first : first + number]) for first in range(len(sizes)))


def hold(precision: str, stage: int) -> Memory:
    gc.collect()
    before = live_memories()
    make = partial(GradientBuckets.for_master_weights, bucket_bytes=BUCKET_BYTES)
    with patch.object(GradientBuckets, "for_master_weights", make):
        state = tiny_state(mesh_of_ranks(1), SECTION, dtype=DTYPES[precision], zero_stage=stage)
    sums = Sums()
    # The memory that kernels of CPUs take for a moment depends on the processor.
    plain = patch("megatron.parallel.kernels.use_cpu_kernels", new=False)
    with plain, patch("megatron.parallel.bucket.start_sum", sums.start):
        step(state)
        gc.collect()
        lasting = [size for key, size in live_memories().items() if before.get(key) != size]
        with Meter(state.mesh, live_tensors(), follows_real=True) as meter:
            step(state)
    sizes = [bucket.size for bucket in state.gradients.buckets]
    layers = [bucket.size for bucket in state.gradients.buckets if bucket.is_of_layer]
    return Memory(sum(lasting), meter.peak, sums.most, sum(sizes), sizes, layers)


def step(state: TrainState) -> None:
    batch = samples(state.mesh.data.size)
    train_step(state, [rows(batch, slice(state.mesh.data.rank, state.mesh.data.rank + 1))], 1e-3)


def matmuls_after_gathers(prefetches: bool) -> list[int]:
    state = tiny_state(mesh_of_ranks(1), tiny_config(num_layers=LAYERS), zero_stage=3)
    after: list[int] = []

    def see(function: Any, args: object, result: object) -> None:
        name = function.overloadpacket.__name__
        if name.startswith(("allgather", "_allgather")):
            after.append(0)
        elif name in ("mm", "addmm", "addmm_", "_linear_pointwise"):
            after[:] = [1 + each for each in after]

    alone = nullcontext() if prefetches else patch.object(Unit, "start", lambda unit: None)
    with alone, Watch(see):
        step(state)
    return after


@on_ranks(2)
def test_zero_3_prefetches_layers() -> None:
    both = (matmuls_after_gathers(each) for each in (True, False))
    earlier = [one - other for one, other in zip(*both, strict=True) if one != other]
    of_layer, others = earlier[0], LAYERS - 1  # matmuls of a forward; layers after another one
    assert earlier == [of_layer] * others + [2 * of_layer] * others
