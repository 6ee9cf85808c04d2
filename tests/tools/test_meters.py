"""The work of a rank of a pipeline: it computes, keeps and sends."""

from collections import Counter

import pytest
import torch

from megatron.parallel.mesh import build_mesh
from megatron.parallel.pipeline import UNCUT, PipelinePlan
from megatron.train.state import build_state
from tests.dist import Pool
from tests.tiny import SEED, SEQUENCE, VOCABULARY, micro_batches, samples, tiny_section
from tools.layouts.meters import Counts, measure

BATCH, HIDDEN, LAYERS, MICRO_BATCHES = 2, 32, 4, 3
STREAM = BATCH * SEQUENCE * HIDDEN * 8  # bytes in fp64


def counted(plan: PipelinePlan, untied: bool) -> Counts:
    section = tiny_section(num_layers=LAYERS, untie_embeddings_and_output_weights=untied)
    mesh = build_mesh({"pipeline": plan.ranks}, "cpu")
    state = build_state(section, mesh, VOCABULARY, seed=SEED, dtype=torch.float64, pipeline=plan)
    return measure(state, micro_batches(samples(BATCH * MICRO_BATCHES), mesh, BATCH))


def plan_of(ranks: int, kind: str, virtual: int = 1) -> PipelinePlan:
    each = LAYERS // (ranks * virtual)
    layers = tuple(range(first, first + each) for first in range(0, LAYERS, each))
    return PipelinePlan(ranks=ranks, virtual=virtual, kind=kind, layers=layers)


@pytest.mark.parametrize("plan", [
    plan_of(2, "1f1b"), plan_of(2, "zb-h1"), plan_of(4, "gpipe"), plan_of(2, "interleaved", 2),
])  # fmt: skip
def test_messages_are_counted_where_they_are_sent(gloo: Pool, plan: PipelinePlan) -> None:
    """m of them leave each stage forward but the last one, and backward but the first one."""
    found = gloo.run(plan.ranks, counted, plan, True)
    for rank, each in enumerate(found):
        own = range(rank, plan.stages, plan.ranks)
        sends = sum((stage > 0) + (stage < plan.stages - 1) for stage in own)
        assert each.calls == Counter({"pipeline": MICRO_BATCHES * sends})
        assert each.sent_bytes == Counter({"pipeline": MICRO_BATCHES * sends * STREAM})


def test_the_ends_of_a_pipeline_add_up_their_tied_embedding(gloo: Pool) -> None:
    found = gloo.run(4, counted, plan_of(4, "1f1b"), False)
    rows = -(-VOCABULARY // 128) * 128
    for rank, each in enumerate(found):
        is_end = rank in (0, 3)
        assert each.calls["embedding_group"] == is_end
        # Each of two ranks sends all of it: half while it is summed, half while the sum returns.
        assert each.sent_bytes["embedding_group"] == is_end * rows * HIDDEN * 8


@pytest.mark.parametrize("plan", [plan_of(2, "1f1b"), plan_of(2, "interleaved", 2)])
def test_the_stages_compute_and_keep_what_one_process_does(gloo: Pool, plan: PipelinePlan) -> None:
    whole = gloo.run(1, counted, UNCUT, True)[0]
    found = gloo.run(plan.ranks, counted, plan, True)
    assert sum(each.matmul_flops for each in found) == whole.matmul_flops
    assert sum(each.parameter_bytes for each in found) == whole.parameter_bytes
    kept = sum(each.saved_bytes for each in found)
    ids = whole.saved_bytes - kept
    assert abs(ids) < 0.01 * kept, (kept, whole.saved_bytes)
