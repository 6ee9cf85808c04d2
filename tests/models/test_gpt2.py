"""The collectives of GPT-2 that the paper's section 3 counts. test_huggingface.py compares its
numbers with transformers, and tests/optim/test_adam.py with plain torch."""

import pytest
import torch

from tests.dist import on_ranks
from tests.tiny import (
    SEQUENCE,
    Communication,
    mesh_of_ranks,
    samples,
    summed_loss,
    tiny_config,
    tiny_model,
)

LAYERS = 3
BATCH = 2
STREAM = ("allreduce_", (BATCH * SEQUENCE, 32))  # [n, h]
LOSS = [("allreduce_", (BATCH * SEQUENCE,)), ("allreduce_", (2, BATCH * SEQUENCE))]


@pytest.mark.parametrize("granularity", ["none", "selective"])
@on_ranks(2)
def test_two_forward_and_two_backward_per_layer(granularity: str) -> None:
    """Attention's core, which selective recomputation repeats, sends nothing."""
    config = tiny_config(num_layers=LAYERS, recompute_granularity=granularity, hidden_dropout=0.1)
    model, batch = tiny_model(mesh_of_ranks(2), config), samples(BATCH)
    with Communication() as forward:
        loss, _ = summed_loss(model, batch, torch.device("cpu"))
    with Communication() as backward:
        loss.backward()
    # g of the embedding, g of attention and MLP in each layer, the loss, and f of the head: its
    # gradient comes with the loss.
    assert forward.calls == [STREAM] * (1 + 2 * LAYERS) + [*LOSS, STREAM]
    # f of MLP and attention in each layer.
    assert backward.calls == [STREAM] * 2 * LAYERS
