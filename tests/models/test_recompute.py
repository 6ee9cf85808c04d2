"""Dropout draws in each of its places; what the backward computes again draws the same and changes
no number. The matrix counts what is kept."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.parallel.dropout import Dropout
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import gather_whole, sharding_specs
from megatron.train.step import count, forward_backward
from tests.bert import bert_samples, bert_section
from tests.dist import Pool
from tests.llama import llama_section
from tests.tiny import (
    GRANULARITIES,
    mesh_of_ranks,
    micro_batches,
    run_whole,
    samples,
    tiny_model,
    tiny_section,
    tiny_state,
    whole_gradients,
)

CPU = torch.device("cpu")
BATCH = 4


class Kind(NamedTuple):
    section: Callable[..., ModelConfig]
    samples: Callable[[int], Any]


KINDS = {
    "gpt2": Kind(tiny_section, samples),
    "llama": Kind(llama_section, samples),
    "bert pre-ln": Kind(partial(bert_section, "pre-ln"), bert_samples),
    "bert post-ln": Kind(partial(bert_section, "post-ln"), bert_samples),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_dropout_alone_changes_the_loss(name: str) -> None:
    kind = KINDS[name]
    section = kind.section(hidden_dropout=0.5, attention_dropout=0.25)
    model = tiny_model(serial_mesh(), section)
    residual = [each for each in model.modules() if isinstance(each, Dropout)]
    cores = [each for each in model.modules() if isinstance(each, AttentionCore)]
    assert [each.p for each in residual] == [0.5] * (1 + 2 * section.num_layers)
    assert [each.dropout for each in cores] == [0.25] * section.num_layers
    assert len({each.name for each in (*residual, *cores)}) == 1 + 3 * section.num_layers

    def loss(active: object) -> float:
        for each in residual:
            each.p = 0.5 * (each is active)
        for each in cores:
            each.dropout = 0.25 * (each is active)
        ones = torch.ones(len(model.terms))
        return run_whole(model.train(), model, kind.samples(3), CPU, ones).sum().item()

    plain = loss(None)
    for each in (*residual, *cores):
        assert abs(loss(each) - plain) > 1e-3, each.name


Outcome = tuple[list[Tensor], dict[str, Tensor]]


def losses_and_gradients(kind: str, tensor_size: int, dropout: float, granularity: str) -> Outcome:
    """Two micro-batches run forward before the first runs backward."""
    mesh, (section, make) = mesh_of_ranks(tensor_size), KINDS[kind]
    settings = section(
        recompute_granularity=granularity, hidden_dropout=dropout, attention_dropout=dropout
    )
    model = tiny_model(mesh, settings).train()
    torch.manual_seed(len(granularity))  # must not matter
    before, losses = torch.get_rng_state(), []
    for batch in micro_batches(make(BATCH), mesh, 2):
        ones = torch.ones(len(model.terms))
        losses.append(run_whole(model, model, batch, CPU, ones).sum())
    for loss in losses:
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    table = sharding_specs(model)
    gradients = {n: gather_whole(each.grad, table[n]) for n, each in model.named_parameters()}
    return [loss.detach() for loss in losses], gradients


def outcomes(kind: str, tensor_size: int, dropout: float) -> dict[str, Outcome]:
    """By granularity."""
    return {each: losses_and_gradients(kind, tensor_size, dropout, each) for each in GRANULARITIES}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_same_bit_for_bit(gloo: Pool, kind: str, size: int) -> None:
    first = {}
    for dropout in (0.0, 0.2):
        for found in gloo.run(size, outcomes, kind, size, dropout):
            losses, gradients = found.pop("none")
            assert list(found) == ["full", "selective"]
            for again, gradients_again in found.values():
                assert losses == again
                for name, gradient in gradients.items():
                    assert torch.equal(gradient, gradients_again[name]), name
        first[dropout] = losses[0]
    assert first[0.0] != first[0.2]


def drawn_in_the_kernel(tensor_size: int, granularity: str, step: int) -> list[Tensor]:
    """Loss and a gradient of attention's weight, twice from the same step."""
    section = tiny_section(
        attention_dropout=0.2, attention_dropout_rng="kernel", recompute_granularity=granularity
    )
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # must not matter
        state = tiny_state(mesh_of_ranks(tensor_size), section)
        state.step = step
        batches = [samples(BATCH)]
        loss = forward_backward(state, batches, count(state, batches))
        gradients = whole_gradients(state.gradients)
        found += [loss, gradients["transformer.layers.0.attention.qkv.weight"]]
    return found


def test_what_a_kernel_draws_is_drawn_again(gloo: Pool) -> None:
    """In the backward, and by a run that resumes; another step draws other numbers."""
    for size in (1, 2):
        first = gloo.run(size, drawn_in_the_kernel, size, "none", 3)
        for granularity in GRANULARITIES:
            for found, wanted in zip(
                gloo.run(size, drawn_in_the_kernel, size, granularity, 3), first, strict=True
            ):
                assert torch.equal(found[0], wanted[0])
                assert torch.equal(found[1], wanted[1])
                assert torch.equal(found[2], wanted[0])
                assert torch.equal(found[3], wanted[1])
        assert gloo.run(size, drawn_in_the_kernel, size, "none", 4)[0][0] != first[0][0]
