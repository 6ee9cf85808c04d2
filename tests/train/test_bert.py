"""BERT's steps: one answer for every layout and split of the batch, whatever is masked."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.data.bert import BertBatch
from megatron.models.bert import BERT
from megatron.parallel.kernels import padded_rows
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import mean_losses
from megatron.train.objectives import MaskedTokensAndOrder
from megatron.train.step import StepResult, count, forward_backward, train_step
from tests.bert import bert_samples, bert_section, whole_bert
from tests.dist import Pool
from tests.tiny import (
    assert_gradients,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    tiny_state,
    tiny_weights,
    whole_gradients,
    whole_weights,
)

GLOBAL_BATCH, STEPS = 4, 5
Outcome = tuple[list[StepResult], dict[str, Tensor], dict[str, Tensor]]


def outcome(tensor_size: int, micro_batch_size: int, order: str) -> Outcome:
    """(what each step saw, gradients of the first, weights after the last), tensors whole."""
    mesh = mesh_of_ranks(tensor_size)
    state = tiny_state(mesh, bert_section(order))
    batches = micro_batches(bert_samples(GLOBAL_BATCH), mesh, micro_batch_size)
    forward_backward(state, batches, count(state, batches))
    gradients, results = whole_gradients(state.gradients), []
    for step in range(STEPS):
        batch = bert_samples(GLOBAL_BATCH, first=step * GLOBAL_BATCH)
        results.append(train_step(state, micro_batches(batch, mesh, micro_batch_size), 1e-3))
    return results, gradients, whole_weights(state.model)


@cache
def alone(order: str) -> Outcome:
    """The run of one process with the whole batch at once."""
    return outcome(1, GLOBAL_BATCH, order)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for one, other in zip(actual[0], expected[0], strict=True):
        assert one.tokens == other.tokens
        assert one.terms == pytest.approx(other.terms, rel=1e-12)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
    assert_gradients(actual[1], expected[1], 1e-11)
    for name, weight in actual[2].items():
        assert_relative(weight, expected[2][name], 1e-11, name)


@pytest.mark.parametrize("order", ["pre-ln", "post-ln"])
@pytest.mark.parametrize(
    ("world", "tensor_size", "micro"), [(1, 1, 1), (2, 2, 2), (2, 1, 1), (4, 2, 1), (4, 4, 4)]
)
def test_every_layout_and_split_gives_the_same_run(
    gloo: Pool, world: int, tensor_size: int, micro: int, order: str
) -> None:
    if world == 1:
        assert_same(outcome(1, micro, order), alone(order))
        return
    for each in gloo.run(world, outcome, tensor_size, micro, order):
        assert_same(each, alone(order))


def plain_losses(model: torch.nn.Module, batch: BertBatch) -> tuple[Tensor, Tensor]:
    """The means that the paper's losses are, over one batch, as anyone would write them."""
    arrays = (batch.tokens, batch.token_types, batch.is_real, batch.labels, batch.is_swapped)
    tokens, types, is_real, labels, is_swapped = map(torch.from_numpy, arrays)
    masked, order = model(tokens, types, is_real)
    places = torch.from_numpy(batch.loss_mask).flatten() > 0
    of_masked = F.cross_entropy(masked[places], labels.flatten()[places])
    return of_masked, F.cross_entropy(order, is_swapped)


def test_the_loss_is_the_mean_over_masked_tokens_and_that_over_samples() -> None:
    state = tiny_state(serial_mesh(), bert_section(), OptimizerConfig(clip_grad=0.0))
    dense = whole_bert(BERT, bert_section(), tiny_weights(state.model))
    batch = bert_samples(GLOBAL_BATCH)
    assert len(set(batch.loss_mask.sum(axis=1).tolist())) > 1, "samples differ in masked tokens"
    masked, order = plain_losses(dense, batch)
    (masked + order).backward()
    result = train_step(state, micro_batches(batch, state.mesh, 1), 0.0)
    assert result.terms == pytest.approx({"mlm_loss": masked.item(), "sop_loss": order.item()})
    assert result.loss == pytest.approx((masked + order).item(), rel=1e-12)
    assert result.tokens == batch.is_real.sum()
    expected = {name: each.grad for name, each in dense.named_parameters()}
    for name, gradient in whole_gradients(state.gradients).items():
        if not name.endswith("qkv.bias"):
            assert_relative(gradient, expected[name].reshape(gradient.shape), 1e-11, name)


def test_masked_tokens_come_in_few_sizes() -> None:
    """Or steps would be slower, and memory would grow with each new size (kernels.padded_rows)."""
    sizes = []

    def model(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(inputs[3]))
        return torch.zeros(()), torch.zeros(GLOBAL_BATCH, 2)

    batches = [bert_samples(GLOBAL_BATCH, seed=seed) for seed in range(20)]
    for batch in batches:
        MaskedTokensAndOrder().sums(model, batch, torch.device("cpu"), torch.ones(2))
    masked = [int(batch.loss_mask.sum()) for batch in batches]
    assert len(set(masked)) > 5
    assert sizes == [padded_rows(each) for each in masked]


class Split:
    samples_per_epoch = 7

    def batch(self, numbers: range) -> BertBatch:
        parts = [vars(bert_samples(1, first=number)) for number in numbers]
        return BertBatch(**{n: np.concatenate([part[n] for part in parts]) for n in parts[0]})


def evaluated(tensor_size: int, micro_batch_size: int) -> dict[str, float]:
    mesh = mesh_of_ranks(tensor_size)
    state = tiny_state(mesh, bert_section())
    return mean_losses(state.model, MaskedTokensAndOrder(), Split(), 7, micro_batch_size, mesh)


def test_evaluation_depends_on_neither_batch_size_nor_layout(gloo: Pool) -> None:
    expected = evaluated(1, 7)
    assert expected.keys() == {"mlm_loss", "sop_loss"}
    for each in [evaluated(1, 3), *gloo.run(2, evaluated, 2, 2), *gloo.run(2, evaluated, 1, 2)]:
        assert each == pytest.approx(expected, rel=1e-12)
