"""BERT's objective: what its two losses are means of, and in which sizes its kernels are called."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.data.bert import BertBatch
from megatron.parallel.mesh import serial_mesh
from megatron.train.step import train_step
from tests import plain
from tests.bert import bert_samples, bert_section
from tests.tiny import assert_relative, micro_batches, tiny_state, tiny_weights, whole_gradients

GLOBAL_BATCH = 4


def plain_losses(model: plain.BERT, batch: BertBatch) -> tuple[Tensor, Tensor]:
    """The means that the paper's losses are, over one batch, as anyone would write them."""
    masked, order = model(batch)
    places = torch.from_numpy(batch.loss_mask) > 0
    of_masked = F.cross_entropy(masked[places], torch.from_numpy(batch.labels)[places])
    return of_masked, F.cross_entropy(order, torch.from_numpy(batch.is_swapped))


def test_the_loss_is_the_mean_over_masked_tokens_and_that_over_samples() -> None:
    state = tiny_state(serial_mesh(), bert_section(), OptimizerConfig(clip_grad=0.0))
    dense = plain.BERT(tiny_weights(state.model), 4)
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
    batches = [bert_samples(GLOBAL_BATCH, seed=seed) for seed in range(20)]
    masked = [int(batch.loss_mask.sum()) for batch in batches]
    assert len(set(masked)) > 5
    assert [int(batch.is_counted.sum()) for batch in batches] == masked
    assert [len(batch.masked) for batch in batches] == [-(-each // 16) * 16 for each in masked]
