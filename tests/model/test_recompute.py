"""Activation checkpointing changes no number, with dropout on."""

import pytest
import torch
from torch import Tensor

from megatron.parallel.layout import layouts
from tests.dist import Pool
from tests.tiny import (
    gather_whole,
    mesh_of_ranks,
    micro_batches,
    samples,
    summed_loss,
    tiny_model,
    tiny_section,
)

CPU = torch.device("cpu")


def losses_and_gradients(
    tensor_size: int, checkpoint: bool, dropout: float
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two micro-batches run forward before the first runs backward, outside their position."""
    mesh = mesh_of_ranks(tensor_size)
    section = tiny_section(
        checkpoint_activations=checkpoint, hidden_dropout=dropout, attention_dropout=dropout
    )
    model, streams = tiny_model(mesh, section)
    torch.manual_seed(checkpoint)  # must not matter
    before = torch.get_rng_state()
    losses = []
    for number, batch in enumerate(micro_batches(samples(4), mesh, 2)):
        with streams.at(7, number):
            losses.append(summed_loss(model.train(), batch, CPU)[0])
    for loss in losses:
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    table = layouts(model)
    gradients = {n: gather_whole(each.grad, table[n]) for n, each in model.named_parameters()}
    return [loss.detach() for loss in losses], gradients


@pytest.mark.parametrize("size", [1, 2])
def test_loss_and_gradients_are_the_same_bit_for_bit(gloo: Pool, size: int) -> None:
    kept = gloo.run(size, losses_and_gradients, size, False, 0.2)
    recomputed = gloo.run(size, losses_and_gradients, size, True, 0.2)
    without = gloo.run(size, losses_and_gradients, size, False, 0.0)
    for (losses, gradients), (again, gradients_again) in zip(kept, recomputed, strict=True):
        assert losses == again
        for name, gradient in gradients.items():
            assert torch.equal(gradient, gradients_again[name]), name
    assert kept[0][0] != without[0][0]


def saved_bytes(checkpoint: bool) -> int:
    model, _ = tiny_model(mesh_of_ranks(1), tiny_section(checkpoint_activations=checkpoint))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = summed_loss(model.train(), samples(4), CPU)
    del loss
    return sum(kept.values())


def test_it_keeps_less() -> None:
    assert saved_bytes(True) < 0.5 * saved_bytes(False)
