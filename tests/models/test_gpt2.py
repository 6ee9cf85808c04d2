"""GPT-2 against plain torch modules and against transformers' GPT-2, with the same weights."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.gpt2 import GPT2Batch
from megatron.models.gpt2 import document_mask
from megatron.parallel.layers import AttentionCore, SharedDropout
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.evaluate import whole_logits
from tests.dist import Pool
from tests.models.dense import dense_gpt2
from tests.tiny import (
    GRANULARITIES,
    SEQUENCE,
    VOCABULARY,
    assert_gradients,
    gather_whole,
    mesh_of_ranks,
    rows,
    samples,
    scatter_weights,
    summed_loss,
    tiny_model,
    tiny_section,
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


@pytest.mark.parametrize("prepare", [lambda batch: batch, with_documents])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_equals_plain_modules(
    prepare: Callable[[GPT2Batch], GPT2Batch], granularity: str
) -> None:
    section = tiny_section(recompute_granularity=granularity)
    model, _ = tiny_model(serial_mesh(), section)
    weights = {name: weight.double() for name, weight in tiny_weights(model).items()}
    dense = dense_gpt2(section, VOCABULARY, weights)
    batch = prepare(samples(3))

    (loss, count), (expected, _) = (summed_loss(each, batch, CPU) for each in (model, dense))
    assert count == batch.loss_mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)

    loss.backward()
    expected.backward()
    wanted = dict(dense.named_parameters())
    gradients = {
        n: each.grad[: wanted[n].shape[0]] if n == "word_embedding.weight" else each.grad
        for n, each in model.named_parameters()
    }
    assert_gradients(
        gradients, {n: wanted[n].grad.view_as(gradient) for n, gradient in gradients.items()}, 1e-11
    )


def test_a_document_is_read_as_if_it_were_alone() -> None:
    model, _ = tiny_model(serial_mesh())
    batch = with_documents(samples(2))
    tokens, positions, labels, starts = (
        torch.from_numpy(array)
        for array in (batch.tokens, batch.positions, batch.labels, batch.document_starts)
    )
    together = model(tokens, positions, labels, starts).view(tokens.shape)
    documents = 0
    for sample in range(2):
        bounds = [*starts[sample].unique().tolist(), SEQUENCE]
        for start, stop in pairwise(bounds):
            own = slice(sample, sample + 1), slice(start, stop)
            alone = model(tokens[own], torch.arange(stop - start)[None], labels[own])
            torch.testing.assert_close(together[own][0], alone, rtol=1e-12, atol=1e-12)
            documents += 1
    assert documents == 8
    assert not torch.allclose(together, model(tokens, positions, labels).view(tokens.shape))


def test_the_mask_is_causal_and_within_documents() -> None:
    mask = document_mask(torch.tensor([[0, 0, 2, 2]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask.tolist() == [[[[bool(each) for each in row] for row in expected]]]


def test_a_later_token_changes_nothing_before_it() -> None:
    model, _ = tiny_model(serial_mesh())
    tokens = torch.from_numpy(samples(1).tokens)
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % VOCABULARY
    first, second = (whole_logits(model, serial_mesh(), each) for each in (tokens, changed))
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.isclose(first[:, 9:], second[:, 9:]).all(-1).any()


def test_every_dropout_has_its_own_place_and_probability() -> None:
    model, _ = tiny_model(
        serial_mesh(), tiny_section(attention_dropout=0.1, hidden_dropout=0.2, num_layers=3)
    )
    residual = [each for each in model.modules() if isinstance(each, SharedDropout)]
    attention = [each for each in model.modules() if isinstance(each, AttentionCore)]
    assert [each.p for each in residual] == [0.2] * (1 + 2 * 3)
    assert [each.dropout for each in attention] == [0.1] * 3
    places = {each.name for each in residual + attention}
    assert len(places) == 1 + 3 * 3


# Name here, name there; True where transformers stores a weight [in, out].
OUTSIDE = [
    ("word_embedding.weight", "transformer.wte.weight", False),
    ("position_embedding.weight", "transformer.wpe.weight", False),
    ("final_norm.weight", "transformer.ln_f.weight", False),
    ("final_norm.bias", "transformer.ln_f.bias", False),
]
INSIDE = [
    ("attention_norm", "ln_1", False),
    ("attention.qkv", "attn.c_attn", True),
    ("attention.output", "attn.c_proj", True),
    ("mlp_norm", "ln_2", False),
    ("mlp.up", "mlp.c_fc", True),
    ("mlp.down", "mlp.c_proj", True),
]
NAMES = OUTSIDE + [
    (
        f"transformer.layers.{layer}.{ours}.{kind}",
        f"transformer.h.{layer}.{theirs}.{kind}",
        is_transposed and kind == "weight",
    )
    for layer in range(2)
    for ours, theirs, is_transposed in INSIDE
    for kind in ("weight", "bias")
]


def from_transformers(
    theirs: dict[str, Tensor], shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """{our name: weight or gradient} of theirs, [Q; K; V] unfolded."""
    return {
        name: (theirs[other].T if is_transposed else theirs[other]).reshape(shapes[name])
        for name, other, is_transposed in NAMES
    }


@pytest.fixture(scope="module")
def transformers_run() -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """(weights, logits, loss, gradients) of GPT2LMHeadModel in our names; fp32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    section = tiny_section()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=section.hidden_size,
        n_layer=section.num_layers,
        n_head=section.num_attention_heads,
    )
    torch.manual_seed(5)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = samples(3)
    logits = model(torch.from_numpy(batch.tokens)).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), reduction="none"
    )
    loss = (losses * torch.from_numpy(batch.loss_mask).flatten()).sum()
    loss.backward()
    named = dict(model.named_parameters())
    assert set(named) == {other for _, other, _ in NAMES}, "transformers ties the head"
    ours, _ = tiny_model(serial_mesh(), section)
    shapes = {name: weight.shape for name, weight in tiny_weights(ours).items()}
    weights = from_transformers({n: each.detach() for n, each in named.items()}, shapes)
    gradients = from_transformers({n: each.grad for n, each in named.items()}, shapes)
    return weights, logits.detach(), loss.detach(), gradients


def logits_loss_gradients(
    tensor_size: int, weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mesh = mesh_of_ranks(tensor_size)
    model, _ = tiny_model(mesh, dtype=torch.float32)
    scatter_weights(model, weights)
    batch = samples(3)
    logits = whole_logits(model, mesh, torch.from_numpy(batch.tokens))
    loss, _ = summed_loss(model, batch, CPU)
    loss.backward()
    table = sharding_specs(model)
    gradients = {n: gather_whole(each.grad, table[n]) for n, each in model.named_parameters()}
    return logits, loss.detach(), gradients


@pytest.mark.parametrize("size", [1, 2])
def test_it_equals_transformers(
    gloo: Pool,
    transformers_run: tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]],
    size: int,
) -> None:
    weights, expected_logits, expected_loss, expected_gradients = transformers_run
    for logits, loss, gradients in gloo.run(size, logits_loss_gradients, size, weights):
        assert (logits - expected_logits).abs().max() <= 1e-4
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert_gradients(gradients, expected_gradients, 1e-5)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model, _ = tiny_model(serial_mesh())
    batch = samples(3)
    together = whole_logits(model, serial_mesh(), torch.from_numpy(batch.tokens))
    for number in range(3):
        one = rows(batch, slice(number, number + 1))
        alone = whole_logits(model, serial_mesh(), torch.from_numpy(one.tokens))
        torch.testing.assert_close(alone[0], together[number], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_logits_of_few_rows_are_those_of_many() -> None:
    model, _ = tiny_model(serial_mesh(), dtype=torch.float32)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    many = model.logits(x)
    for count in range(1, 12):
        few = model.logits(x[:count])
        assert few.shape == (count, many.shape[1])
        torch.testing.assert_close(few, many[:count], rtol=1e-5, atol=1e-6)


def gradient_of_three_rows(count: int) -> Tensor:
    """Where logits of so many are asked for."""
    model, _ = tiny_model(mesh_of_ranks(2))
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    model.logits(x[:count])[:3].sum().backward()
    assert x.grad is not None
    return x.grad[:3]


def test_gradients_of_few_rows_are_those_of_many(gloo: Pool) -> None:
    for few, many in zip(*(gloo.run(2, gradient_of_three_rows, n) for n in (3, 20)), strict=True):
        torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)
