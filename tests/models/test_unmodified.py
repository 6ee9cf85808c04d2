"""Unmodified models of transformers, as this project trains them, are what transformers computes;
and what a training does with a model is done with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.huggingface import Wide
from megatron.parallel.collectives import gather_from
from megatron.train.executor import on_device
from megatron.train.step import count, forward_backward
from tests.bert import bert_samples
from tests.dist import Pool
from tests.huggingface import by_their_names, hf_section, load_plain, plain_model
from tests.layouts.matrix import of_documents
from tests.tiny import (
    VOCABULARY,
    mesh_of_ranks,
    samples,
    tiny_state,
    whole_gradients,
    whole_weights,
)

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # of norms, relative


class Case(NamedTuple):
    model: str
    of_hf: dict[str, Any] = {}  # changes of config.json
    has_documents: bool = False

    @property
    def section(self) -> Any:
        return hf_section(self.model, self.of_hf)

    @property
    def batch(self) -> Any:
        """Three samples, each with as many counted tokens as its own mask says."""
        if self.model == "bert":
            return bert_samples(3)
        return of_documents(samples(3)) if self.has_documents else samples(3)


CASES = {
    "gpt2": Case("gpt2"),
    "gpt2, scores by layer": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, documents": Case("gpt2", has_documents=True),
    "gpt2, untied": Case("gpt2", {"tie_word_embeddings": False}),
    "llama": Case("llama"),
    "llama, documents": Case("llama", has_documents=True),
    "llama, tied, biases": Case(
        "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "llama, 1 key/value head": Case("llama", {"num_key_value_heads": 1}),
    "qwen3, larger heads": Case("qwen3", {"head_dim": 16}),
    "mistral, a window": Case("mistral"),
    "neox": Case("gpt_neox"),
    "neox, one after the other": Case("gpt_neox", {"use_parallel_residual": False}),
    "opt": Case("opt"),
    "opt, documents": Case("opt", has_documents=True),
    "gemma2, capped logits": Case("gemma2"),
    "bert": Case("bert"),
    "bert, untied": Case("bert", {"tie_word_embeddings": False}),
}


def mask_of(batch: Any) -> Tensor:
    """0 where a token may look, else -inf: [b, 1, s, s], said for each document."""
    rows, size = batch.tokens.shape
    mask = torch.full((rows, 1, size, size), -torch.inf, dtype=torch.float64)
    for row, starts in enumerate(batch.document_starts):
        for place, start in enumerate(starts):
            mask[row, 0, place, start : place + 1] = 0
    return mask


def their_loss(case: Case, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Of plain transformers: (logits [n, vocabulary], mean loss over counted tokens)."""
    arguments = {"input_ids": torch.from_numpy(batch.tokens)}
    if case.model == "bert":
        arguments["attention_mask"] = torch.from_numpy(batch.is_real).long()
        arguments["token_type_ids"] = torch.from_numpy(batch.token_types)
    elif case.has_documents:
        arguments["position_ids"] = torch.from_numpy(batch.positions)
        arguments["attention_mask"] = mask_of(batch)
    with Wide():
        logits = model(**arguments, use_cache=False).logits.flatten(0, 1)
    labels, counted = (torch.from_numpy(each).flatten() for each in (batch.labels, batch.loss_mask))
    losses = F.cross_entropy(logits, labels, reduction="none")
    return logits.detach(), (losses * counted).sum() / counted.sum()


def distance(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """Relative to the norm of the other, or to `least`: the bias of keys has no gradient in
    theory."""
    assert one.shape == other.shape
    norm = float(other.norm())
    return float((one - other).norm()) / (norm if norm > 1e-9 * least else least)


def differences(tensor_size: int) -> dict[str, dict[str, float]]:
    """Of each case, on this rank: logits, loss and each gradient against plain transformers."""
    mesh, found = mesh_of_ranks(tensor_size), {}
    for name, case in CASES.items():
        state, batch = tiny_state(mesh, case.section), case.batch
        plain = plain_model(case.section)
        load_plain(plain, by_their_names(state.model, whole_weights(state.model)))
        with torch.no_grad():
            moved = on_device(batch, CPU)
            logits = gather_from(state.model(moved), -1, mesh.tensor)[:, :VOCABULARY]
            total = state.model(moved, torch.ones(1, dtype=torch.float64))
            loss = float(total) / state.model.denominators(batch)[0]
        forward_backward(state, [batch], count(state, [batch]))
        gradients = by_their_names(state.model, whole_gradients(state.gradients))
        wanted, their = their_loss(case, plain, batch)
        their.backward()
        theirs = {
            each: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for each, parameter in plain.named_parameters()
        }
        assert theirs.keys() == gradients.keys()
        norm = float(torch.nn.utils.get_total_norm(theirs.values()))
        found[name] = {
            "logits": distance(logits, wanted),
            "loss": abs(loss - float(their)) / float(their),
            **{each: distance(gradients[each], theirs[each], norm) for each in theirs},
        }
    return found


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_it_is_what_transformers_computes(gloo: Pool, tensor_size: int) -> None:
    for of_rank in gloo.run(tensor_size, differences, tensor_size):
        assert of_rank.keys() == CASES.keys()
        for name, found in of_rank.items():
            wrong = {each: value for each, value in found.items() if not value <= TOLERANCE}
            assert not wrong, f"{name}: {wrong}"
