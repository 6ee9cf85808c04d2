"""Context parallelism: who has which tokens, what models sum, and masks at the edges of parts, on
ranks that are threads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data.bert import BertBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.parallel.context import Context, gather_tokens, local_tokens, token_order
from megatron.parallel.factory import layer_factory
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.train.executor import on_device
from tests import threads
from tests.bert import bert_config, bert_samples
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    SEQUENCE,
    VOCABULARY,
    assert_gradients,
    samples,
    scatter_weights,
    tiny_config,
    tiny_weights,
)

KINDS = ("a2a", "p2p")
CPU = torch.device("cpu")
# Lengths of the documents of each sample: of 1, 2 and all tokens; cuts lie on multiples of 2.
DOCUMENTS = ((1, 2, 1, 4, 8), (SEQUENCE,), (2, 2, 2, 2, 8), (7, 8, 1))
# Real tokens of each sample. Two or three of 4 ranks have nothing but padding.
LENGTHS = (4, 2, 3, 1)


def on_ranks(ranks: int, kind: str, function: Any, *arguments: Any) -> Any:
    def run(mesh: Mesh) -> Any:
        return function(replace(mesh, cp_comm_type=kind), *arguments)

    return threads.run("1d", {"context": ranks}, run)


def test_each_rank_has_its_tokens() -> None:
    for ranks, kind, order in (
        (1, "p2p", [[*range(8)]]),
        (2, "a2a", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, "p2p", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (4, "a2a", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, "p2p", [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ):
        assert token_order(8, ranks, kind).tolist() == order
    batch = samples(1).take(np.array([1, 3, 5])).take(np.array([2, 0]))
    assert batch.token_order.tolist() == [5, 1]


@pytest.mark.parametrize(("size", "ranks", "kind"), [(9, 2, "a2a"), (6, 2, "p2p"), (4, 4, "p2p")])
def test_tokens_that_ranks_cannot_divide_have_no_order(size: int, ranks: int, kind: str) -> None:
    assert isinstance(refusal(lambda: token_order(size, ranks, kind)), ValueError)


def tokens_of(mesh: Mesh, batch: GPT2Batch) -> tuple[GPT2Batch, Tensor]:
    """(the rank's batch, tokens of the whole samples from all ranks)"""
    own = local_tokens(batch, mesh)
    assert local_tokens(own, mesh) is own
    return own, gather_tokens(torch.from_numpy(own.tokens), mesh)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_read_all_tokens_once_and_fill_up_samples(kind: str, cut: int) -> None:
    size = SEQUENCE - cut
    whole = packed(4)
    whole = replace(whole.take(np.arange(size)), token_order=None)
    whole = replace(whole, document_starts=whole.document_starts[:, :size])
    found = on_ranks(2, kind, tokens_of, whole)
    assert sum(own.num_tokens for own, _ in found) == whole.num_tokens
    for rank, (own, tokens) in enumerate(found):
        order = token_order(SEQUENCE, 2, kind)[rank]
        assert own.token_order.tolist() == order.tolist()
        assert tokens[:, :size].tolist() == whole.tokens.tolist()
        assert not tokens[:, size:].any()
        filled = np.pad(whole.loss_mask, [(0, 0), (0, cut)])
        assert own.loss_mask.tolist() == filled[:, order].tolist()
        starts = own.document_starts  # attention reads those of all tokens
        assert starts[:, :size].tolist() == whole.document_starts.tolist()
        assert starts.shape == (4, SEQUENCE)


def test_padding_before_a_token_is_refused_under_p2p() -> None:
    batch = padded(4)
    left = replace(batch, is_real=batch.is_real[:, ::-1].copy())
    for kind, real in (("a2a", left), ("p2p", batch)):
        on_ranks(2, kind, lambda mesh, real=real: local_tokens(real, mesh))
    error = refusal(lambda: on_ranks(2, "p2p", lambda mesh: local_tokens(left, mesh)))
    assert isinstance(error, ValueError)
    assert str(error).startswith("is_real")


def test_a_ring_refuses_a_mask_of_ones_own() -> None:
    def attend(mesh: Mesh) -> Tensor:
        q = torch.zeros(1, 1, 4, 2)
        core = layer_factory(mesh).attention_core(0.0, "core")
        return core(q, q, q, mask=torch.ones(1, 1, 4, 8, dtype=torch.bool), is_causal=False)

    error = refusal(lambda: on_ranks(2, "p2p", attend), kind=ValueError)
    assert str(error).startswith("cp_comm_type p2p")


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    def attend(mesh: Mesh) -> Tensor:
        q = torch.zeros(1, 3, 4, 2)
        return layer_factory(mesh).attention_core(0.0, "core")(q, q, q, None, True)

    error = refusal(lambda: on_ranks(2, "a2a", attend), kind=ValueError)
    assert str(error).startswith("3 heads")


def summed(mesh: Mesh, xs: Tensor, ys: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(Context.sum or whole of this rank's x, the gradient of x if this rank's y is that of it)"""
    x = xs[mesh.context.rank].clone().requires_grad_()
    out = getattr(Context(mesh), name)(x)
    out.backward(ys[mesh.context.rank])
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sum", "whole"])
def test_sums_over_ranks_and_their_gradients(kind: str, name: str) -> None:
    """Each rank uses what it gets in its own way; <y, A x> is <A' y, x> over all ranks."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(4, 3, SEQUENCE // 4, 5, generator=generator, dtype=torch.float64)
    size = SEQUENCE if name == "whole" else SEQUENCE // 4
    ys = torch.randn(4, 3, size, 5, generator=generator, dtype=torch.float64)
    found = on_ranks(4, kind, summed, xs, ys, name)
    order = torch.from_numpy(token_order(SEQUENCE, 4, kind))
    for rank, (out, gradient) in enumerate(found):
        expected, its_y = xs.sum(0), ys.sum(0)
        if name == "whole":
            expected = torch.cat([*xs], 1)[:, order.flatten().argsort()]
            its_y = its_y[:, order[rank]]
        torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gradient, its_y, rtol=1e-14, atol=1e-14)


def packed(count: int) -> GPT2Batch:
    """Samples of documents, whose positions begin anew."""
    lengths = [np.array(each) for each in DOCUMENTS[:count]]
    starts = np.stack([np.repeat(each.cumsum() - each, each) for each in lengths])
    batch = samples(count)
    return replace(batch, document_starts=starts, positions=np.arange(SEQUENCE) - starts)


def padded(count: int) -> BertBatch:
    """A batch with the lengths LENGTHS; each sample's first token is masked."""
    batch = bert_samples(count)
    is_real = np.arange(SEQUENCE) < np.array(LENGTHS[:count])[:, None]
    mask = np.zeros_like(batch.loss_mask)
    mask[:, 0] = 1
    return replace(batch, is_real=is_real, loss_mask=mask, labels=np.maximum(batch.labels, 1))


Result = tuple[Tensor, Mapping[str, Tensor]]


def trained(mesh: Mesh, config: Any, batch: Any) -> Result:
    """(this rank's terms of the loss, of the gradients)"""
    model = build_model(config, mesh, VOCABULARY, seed=SEED, dtype=torch.float64)
    scatter_weights(model, tiny_weights(model))
    scales = torch.ones(2 if config.kind == "bert" else 1, dtype=torch.float64)
    losses = model(on_device(local_tokens(batch, mesh), CPU), scales)
    losses.sum().backward()
    return losses.detach(), {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }


def added(results: Sequence[Result]) -> Result:
    losses, gradients = zip(*results, strict=True)
    names = gradients[0]
    return sum(losses), {name: sum(each[name] for each in gradients) for name in names}


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "documents": (tiny_config(num_layers=1), packed(4)),
    "documents, dropout": (tiny_config(num_layers=1, **DROPOUT), packed(4)),
    "padding": (bert_config(num_layers=1), padded(4)),
    "padding, dropout": (bert_config(num_layers=1, **DROPOUT), padded(4)),
}


@cache
def alone(name: str) -> Result:
    return trained(serial_mesh(), *MODELS[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_documents_and_padding_at_the_edges_of_parts(name: str, ranks: int, kind: str) -> None:
    losses, gradients = added(on_ranks(ranks, kind, trained, *MODELS[name]))
    torch.testing.assert_close(losses, alone(name)[0], rtol=1e-12, atol=0)
    assert_gradients(dict(gradients), dict(alone(name)[1]), 1e-12)


@pytest.mark.parametrize("config", [tiny_config(), bert_config()], ids=["gpt2", "bert"])
def test_a_model_refuses_whole_samples(config: Any) -> None:
    batch = bert_samples(2) if config.kind == "bert" else samples(2)

    def run(mesh: Mesh) -> None:
        model = build_model(config, mesh, VOCABULARY, seed=SEED, dtype=torch.float64)
        model(on_device(batch, CPU))

    refusal(lambda: on_ranks(2, "a2a", run), "local_tokens", kind=ValueError)
