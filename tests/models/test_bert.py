"""BERT and its heads for tasks; test_huggingface.py compares it with transformers."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import FinetunedConfig
from megatron.models.bert import FinetunedBert
from megatron.parallel.layers import SharedDropout
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.objectives import MaskedTokensAndOrder
from tests.bert import bert_model, bert_samples, bert_section, whole_bert
from tests.dist import Pool
from tests.tiny import (
    SEQUENCE,
    Communication,
    mesh_of_ranks,
    tiny_model,
    tiny_weights,
)

CPU = torch.device("cpu")
ONES = torch.ones(2)
ORDERS = ("pre-ln", "post-ln")


def inputs(count: int) -> list[Tensor]:
    batch = bert_samples(count)
    return [torch.from_numpy(each) for each in (batch.tokens, batch.token_types, batch.is_real)]


def training_loss(order: str, **dropout: float) -> Tensor:
    """Sum of both losses in training mode."""
    model, streams = tiny_model(serial_mesh(), bert_section(order, **dropout))
    with streams.at(3, 0):
        return MaskedTokensAndOrder().sums(model.train(), bert_samples(3), CPU, ONES).sum()


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_stands_in_all_its_places(order: str) -> None:
    """Each place draws: with all others switched off, it alone changes the loss."""
    plain = training_loss(order)
    places = ["embedding_dropout", "attention_dropout", "mlp_dropout"]
    for place in places:
        section = bert_section(order, hidden_dropout=0.5)
        model, streams = tiny_model(serial_mesh(), section)
        found = [m for name, m in model.named_modules() if name.endswith(f".{place}")]
        assert len(found) == (1 if place == "embedding_dropout" else section.num_layers)
        for module in model.modules():
            if isinstance(module, SharedDropout) and module not in found:
                module.p = 0.0
        with streams.at(3, 0):
            loss = MaskedTokensAndOrder().sums(model.train(), bert_samples(3), CPU, ONES).sum()
        assert (loss - plain).abs() > 1e-3, place
    assert (training_loss(order, attention_dropout=0.5) - plain).abs() > 1e-3


@pytest.mark.parametrize("order", ORDERS)
def test_decay_and_initial_values_are_the_papers(order: str) -> None:
    section = bert_section(order)
    before_residuals = 0.02 / sqrt(2 * section.num_layers)
    for name, spec in sharding_specs(bert_model(serial_mesh(), order)).items():
        is_vector = name.endswith("bias") or "norm" in name
        assert spec.decay != is_vector, name
        if is_vector:
            assert (spec.std, spec.fill) == (None, float(name.endswith("norm.weight"))), name
        else:
            scaled = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert spec.std == (before_residuals if scaled else 0.02), name


HEADS: dict[str, tuple[Any, ...]] = {
    "classifier": (3, 3),
    "choice": (3, 1),
    "span": (3, SEQUENCE, 2),
}


def finetuned_section(head: Any) -> FinetunedConfig:
    section = bert_section("pre-ln")
    labels = ("no", "maybe", "yes") if head == "classifier" else ()
    return FinetunedConfig(**vars(section), head=head, labels=labels)


def scores(head: str, tensor_size: int) -> Tensor:
    model, _ = tiny_model(mesh_of_ranks(tensor_size), finetuned_section(head))
    return model.eval()(*inputs(3)).detach()


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_tasks_have_their_shapes_and_equal_plain_modules(gloo: Pool, head: str) -> None:
    model, _ = tiny_model(serial_mesh(), finetuned_section(head))
    dense = whole_bert(FinetunedBert, finetuned_section(head), tiny_weights(model))
    assert any("pooler" in name for name in sharding_specs(model)) == (head != "span")
    expected = dense(*inputs(3))
    assert expected.shape == HEADS[head]
    for each in [scores(head, 1), *gloo.run(2, scores, head, 2)]:
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_dropout_stands_before_the_head_in_training_alone(head: str) -> None:
    section = replace(finetuned_section(head), hidden_dropout=0.25)
    model: Any = tiny_model(serial_mesh(), section)[0]
    seen: dict[str, Tensor] = {}
    body = model.encoder if model.pooler is None else model.pooler
    body.register_forward_hook(lambda each, given, out: seen.update(body=out.detach()))
    model.head.register_forward_pre_hook(lambda each, given: seen.update(head=given[0].detach()))
    model.eval()(*inputs(3))
    assert torch.equal(seen["head"], seen["body"])
    model.train()(*inputs(3))
    kept = seen["head"] != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(seen["head"][kept], seen["body"][kept] / 0.75)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_narrow_formats_are_told_apart(head: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model(serial_mesh(), finetuned_section(head), dtype=dtype)[0]
    with torch.no_grad():
        model.head.bias.fill_(64)
    found = model(*inputs(3))
    assert found.dtype == torch.float32
    assert len(found.flatten().unique()) == found.numel(), "to the eighth of a unit many are equal"
    found.sum().backward()
    gradients = {each.dtype for each in model.parameters() if each.grad is not None}
    assert gradients == {dtype}
    assert model.head.weight.grad.abs().min() > 0


def collectives(tensor_size: int) -> list[tuple[str, tuple[int, ...]]]:
    model = bert_model(mesh_of_ranks(tensor_size))
    batch = bert_samples(2)
    picked = torch.from_numpy(batch.loss_mask).flatten().nonzero()[:, 0]
    with Communication() as communication:
        losses, order = model(*inputs(2), picked, torch.from_numpy(batch.labels).flatten()[picked])
        (losses.sum() + order.sum()).backward()
    return [
        (name, shape) for name, shape in communication.calls if len(shape) == 2 and shape[0] > 2
    ]


def test_two_all_reduces_a_layer_each_way_and_none_of_the_vocabulary(gloo: Pool) -> None:
    picked, h = int(bert_samples(2).loss_mask.sum()), bert_section().hidden_size
    for calls in gloo.run(2, collectives, 2):
        shapes = [shape for _, shape in calls]
        layers = bert_section().num_layers
        assert shapes.count((2 * SEQUENCE, h)) == 1 + 2 * layers + 2 * layers
        assert shapes.count((picked, h)) == 1  # the backward of the head's f
        assert len(shapes) == 2 + 4 * layers
