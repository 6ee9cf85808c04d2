"""BERT's heads for tasks; test_huggingface.py compares the pretrained ones with transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import FinetunedConfig
from megatron.data.bert import BertBatch
from megatron.models.gpt import dropout_keys
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.executor import on_device
from tests import plain
from tests.bert import bert_config, bert_samples
from tests.dist import Pool
from tests.tiny import SEQUENCE, mesh_of_ranks, tiny_model, tiny_weights


def inputs(count: int) -> BertBatch:
    return on_device(bert_samples(count), torch.device("cpu"))


HEADS: dict[str, tuple[Any, ...]] = {
    "classifier": (3, 3, 1),
    "choice": (3, 1, 1),
    "span": (3, SEQUENCE, 2),
}


def finetuned_config(head: Any) -> FinetunedConfig:
    config = bert_config("pre-ln")
    labels = ("no", "maybe", "yes") if head == "classifier" else ()
    return FinetunedConfig(**vars(config), head=head, labels=labels)


def scores(head: str, tensor_size: int) -> Tensor:
    model = tiny_model(mesh_of_ranks(tensor_size), finetuned_config(head))
    return model.eval()(inputs(3)).detach()


@pytest.mark.parametrize("head", HEADS)
def test_task_heads_equal_plain_modules(gloo: Pool, head: str) -> None:
    model = tiny_model(serial_mesh(), finetuned_config(head))
    dense, batch = plain.BERT(tiny_weights(model), 4), bert_samples(3)
    assert any("pooler" in name for name in sharding_specs(model)) == (head != "span")
    x = dense.encode(batch)
    expected = plain.linear(x if head == "span" else dense.pool(x), dense.head).view(HEADS[head])
    if head == "span":
        expected = expected.masked_fill(~torch.from_numpy(batch.is_real)[..., None], -torch.inf)
    for each in [scores(head, 1), *gloo.run(2, scores, head, 2)]:
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_dropout_stands_before_the_head_in_training_alone(head: str) -> None:
    config = replace(finetuned_config(head), hidden_dropout=0.25)
    model: Any = tiny_model(serial_mesh(), config)
    seen: dict[str, Tensor] = {}
    body = model.encoder.final_norm if model.pooler is None else model.pooler
    body.register_forward_hook(lambda each, given, out: seen.update(body=out.detach()))
    model.head.register_forward_pre_hook(lambda each, given: seen.update(head=given[0].detach()))
    model.eval()(inputs(3))
    assert torch.equal(seen["head"], seen["body"])
    model.train()(inputs(3))
    kept = seen["head"] != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(seen["head"][kept], seen["body"][kept] / 0.75)
    batch = inputs(4)  # as two samples of two sequences
    batch = batch.with_arrays(tokens=batch.tokens.view(2, 2, -1), numbers=batch.numbers[:2])
    assert len(dropout_keys(batch).unique()) == batch.tokens.numel()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_narrow_formats_are_told_apart(head: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model(serial_mesh(), finetuned_config(head), dtype=dtype)
    with torch.no_grad():
        model.head.bias.fill_(64)
    found = model(inputs(3))
    found = found[found.isfinite()]  # not of padding
    assert found.dtype == torch.float32
    assert len(found.flatten().unique()) == found.numel(), "to the eighth of a unit many are equal"
    found.sum().backward()
    gradients = {each.dtype for each in model.parameters() if each.grad is not None}
    assert gradients == {dtype}
    assert model.head.weight.grad.abs().min() > 0
