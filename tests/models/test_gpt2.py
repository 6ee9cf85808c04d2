"""GPT-2 against plain torch modules with the same weights, and the collectives that the paper's
section 3 counts. test_huggingface.py compares it with transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.data.gpt2 import GPT2Batch
from megatron.parallel.mesh import serial_mesh
from tests import plain
from tests.dist import Pool
from tests.tiny import (
    SEQUENCE,
    Communication,
    assert_gradients,
    mesh_of_ranks,
    samples,
    summed_loss,
    tiny_config,
    tiny_model,
    tiny_weights,
)

CPU = torch.device("cpu")


def with_documents(batch: GPT2Batch) -> GPT2Batch:
    """The samples cut into documents, differently for each; attention and positions reset."""
    starts = np.zeros_like(batch.tokens)
    for number, sample in enumerate(starts):
        for bound in (3 + number, 9, 10 + number):
            sample[bound:] = bound
    positions = np.arange(SEQUENCE) - starts
    return replace(batch, document_starts=starts, positions=positions)


@pytest.mark.parametrize("has_documents", [False, True])
def test_gpt2_equals_plain_torch(has_documents: bool) -> None:
    batch = with_documents(samples(3)) if has_documents else samples(3)
    model = tiny_model(serial_mesh())
    dense = plain.GPT2(tiny_weights(model), 4)
    loss, count = summed_loss(model, batch, CPU)
    expected = plain.summed_loss(dense(batch), batch)
    assert count == batch.loss_mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    wanted = {name: each.grad for name, each in dense.named_parameters()}
    gradients = {n: each.grad[: len(wanted[n])] for n, each in model.named_parameters()}
    assert_gradients(gradients, wanted, 1e-11)


LAYERS = 3
BATCH = 2
STREAM = ("allreduce_", (BATCH * SEQUENCE, 32))  # [n, h]
LOSS = [("allreduce_", (BATCH * SEQUENCE,)), ("allreduce_", (2, BATCH * SEQUENCE))]
Calls = list[tuple[str, tuple[int, ...]]]


def traffic(granularity: str) -> tuple[Calls, Calls]:
    """All collectives of (forward and loss, backward)."""
    config = tiny_config(num_layers=LAYERS, recompute_granularity=granularity, hidden_dropout=0.1)
    model, batch = tiny_model(mesh_of_ranks(2), config), samples(BATCH)
    with Communication() as forward:
        loss, _ = summed_loss(model, batch, torch.device("cpu"))
    with Communication() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("granularity", ["none", "selective"])
def test_two_forward_and_two_backward_per_layer(gloo: Pool, granularity: str) -> None:
    """Attention's core, which selective recomputation repeats, sends nothing."""
    for forward, backward in gloo.run(2, traffic, granularity):
        # g of the embedding, g of attention and MLP in each layer, the loss, and f of the head:
        # its gradient comes with the loss.
        assert forward == [STREAM] * (1 + 2 * LAYERS) + [*LOSS, STREAM]
        # f of MLP and attention in each layer.
        assert backward == [STREAM] * 2 * LAYERS
