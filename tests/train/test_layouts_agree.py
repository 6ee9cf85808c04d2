"""One answer for every layout: the paper's claim that cutting the model changes nothing."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.train.evaluate import whole_logits
from megatron.train.step import count, forward_backward, train_step
from tests.dist import Pool
from tests.tiny import (
    assert_gradients,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_state,
    whole_gradients,
    whole_weights,
)

GLOBAL_BATCH = 4
STEPS = 5


@dataclass(frozen=True)
class Outcome:
    """What one rank says of a run of several steps; all tensors whole."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]  # of the mean over all counted tokens, in the first step
    norms: list[float]
    losses: list[float]
    weights: dict[str, Tensor]


def outcome(tensor_size: int, micro_batch_size: int, dtype: torch.dtype) -> Outcome:
    mesh = mesh_of_ranks(tensor_size)
    state = tiny_state(mesh, dtype=dtype)
    logits = whole_logits(state.model, mesh, torch.from_numpy(samples(2).tokens))

    batches = micro_batches(samples(GLOBAL_BATCH), mesh, micro_batch_size)
    counts = count(state, batches)
    loss = all_reduce(forward_backward(state, batches, counts), mesh.data)
    gradients = whole_gradients(state.gradients)

    results = []
    for step in range(STEPS):
        batch = samples(GLOBAL_BATCH, first=step * GLOBAL_BATCH)
        results.append(train_step(state, micro_batches(batch, mesh, micro_batch_size), 1e-3))
    assert (state.step, state.samples) == (STEPS, STEPS * GLOBAL_BATCH)
    return Outcome(
        logits=logits,
        loss=(loss / counts[1:]).item(),
        gradients=gradients,
        norms=[result.grad_norm for result in results],
        losses=[result.loss for result in results],
        weights=whole_weights(state.model),
    )


def outcomes(tensor_size: int, micro_batch_size: int) -> list[Outcome]:
    return [outcome(tensor_size, micro_batch_size, each) for each in (torch.float64, torch.float32)]


@cache
def alone() -> list[Outcome]:
    """The run of one process with the whole batch at once."""
    return outcomes(1, GLOBAL_BATCH)


def assert_agree(actual: list[Outcome], expected: list[Outcome]) -> None:
    for own, wanted, tolerance in zip(actual, expected, (1e-10, 1e-5), strict=True):
        assert_relative(own.logits, wanted.logits, tolerance, "logits")
        assert own.loss == pytest.approx(wanted.loss, rel=tolerance)
        assert_gradients(own.gradients, wanted.gradients, tolerance)
        assert own.losses == pytest.approx(wanted.losses, rel=tolerance)
        assert own.norms == pytest.approx(wanted.norms, rel=tolerance)
    # In fp32 Adam amplifies the rounding noise of the key bias, whose gradient is zero in theory.
    for name, weight in actual[0].weights.items():
        torch.testing.assert_close(weight, expected[0].weights[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_the_micro_batch_size_does_not_matter(micro_batch_size: int) -> None:
    assert_agree(outcomes(1, micro_batch_size), alone())


@pytest.mark.parametrize(
    ("world", "tensor_size", "micro_batch_size"),
    [
        pytest.param(2, 2, 4, id="t2"),
        pytest.param(2, 2, 1, id="t2-4-micro-batches"),
        pytest.param(4, 4, 2, id="t4"),
        pytest.param(2, 1, 1, id="d2-2-micro-batches"),
        pytest.param(2, 1, 2, id="d2"),
        pytest.param(4, 1, 1, id="d4"),
        pytest.param(4, 2, 1, id="t2-d2-2-micro-batches"),
        pytest.param(4, 2, 2, id="t2-d2"),
    ],
)
def test_every_layout_gives_one_answer(
    gloo: Pool, world: int, tensor_size: int, micro_batch_size: int
) -> None:
    for each in gloo.run(world, outcomes, tensor_size, micro_batch_size):
        assert_agree(each, alone())


def test_the_masks_are_uneven_and_the_norm_is_of_all_gradients() -> None:
    counts = samples(GLOBAL_BATCH).loss_mask.sum(axis=1).tolist()
    assert len(set(counts)) == GLOBAL_BATCH, "a mean of means would pass"
    for run, tolerance in zip(alone(), (1e-10, 1e-5), strict=True):
        norm = torch.nn.utils.get_total_norm(run.gradients.values())
        assert run.norms[0] == pytest.approx(norm.item(), rel=tolerance)
