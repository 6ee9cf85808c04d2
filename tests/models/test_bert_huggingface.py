"""BERT equals transformers given the same weights: logits, losses and every gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron.config.model import BertConfig
from megatron.models.registry import build_model
from megatron.parallel.collectives import gather_from
from megatron.parallel.sharding import sharding_specs
from tests.bert import bert_samples, bert_section
from tests.dist import Pool
from tests.tiny import (
    SEQUENCE,
    VOCABULARY,
    assert_gradients,
    assert_relative,
    gather_whole,
    mesh_of_ranks,
    scatter_weights,
)
from tests.tools.convert.berts import NAMES
from tests.tools.convert.models import randomise
from tools.convert.bert import PRETRAINED
from tools.convert.table import Family
from tools.convert.weights import resolve

FAMILIES = {family.fields["residual_order"]: family for family in PRETRAINED}
BATCH = bert_samples(6)
INPUTS = [torch.from_numpy(each) for each in (BATCH.tokens, BATCH.token_types, BATCH.is_real)]
LABELS, MASK, IS_SWAPPED = (
    torch.from_numpy(each)
    for each in (BATCH.labels, BATCH.loss_mask.astype(bool), BATCH.is_swapped)
)
Found = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Logits of both heads, without those at padding; gradients by our names."""


def section_of(order: str) -> BertConfig:
    return bert_section(order, num_layers=3, hidden_size=48, init_method_std=0.05)


def make_theirs(order: str, dtype: torch.dtype) -> Any:
    """Random in every parameter."""
    section, name = section_of(order), NAMES[order]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        num_hidden_layers=section.num_layers,
        hidden_size=section.hidden_size,
        intermediate_size=4 * section.hidden_size,
        num_attention_heads=section.num_attention_heads,
        max_position_embeddings=SEQUENCE,
        layer_norm_eps=section.layernorm_epsilon,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{name}ForPreTraining")(config)
    randomise(model)
    return model.to(dtype).eval()


def by_our_names(family: Family, section: BertConfig, theirs: dict[str, Tensor]) -> Any:
    """Tensors of theirs, weights or gradients, through the table of the conversion."""
    return {
        entry.ours: entry.transform.to_ours(
            [theirs[family.key_of(name)] for name in entry.theirs], entry.spec.shape
        )
        for entry in resolve(family, section, VOCABULARY)
    }


def run_theirs(order: str, model: Any) -> Found:
    tokens, types, is_real = INPUTS
    found = model(
        input_ids=tokens,
        token_type_ids=types,
        attention_mask=is_real.long(),
        labels=LABELS.where(MASK, -100),
        next_sentence_label=IS_SWAPPED,
    )
    found.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = by_our_names(FAMILIES[order], section_of(order), gradients)
    return found.prediction_logits[is_real].detach(), found.seq_relationship_logits.detach(), whole


def run_ours(order: str, weights: dict[str, Tensor], tensor_size: int) -> Found:
    """The same on this rank."""
    mesh = mesh_of_ranks(tensor_size)
    dtype = weights["sop.bias"].dtype
    model, _ = build_model(section_of(order), mesh, VOCABULARY, seed=1, dtype=dtype)
    scatter_weights(model, weights)
    model.eval()
    with torch.no_grad():
        masked, in_order = model(*INPUTS)
    masked = gather_from(masked, -1, mesh.tensor)[INPUTS[2].flatten(), :VOCABULARY]
    picked = MASK.flatten().nonzero()[:, 0]
    losses, swapped = model(*INPUTS, picked, LABELS.flatten()[picked])
    (losses.mean() + F.cross_entropy(swapped, IS_SWAPPED)).backward()
    table = sharding_specs(model)
    gradients = {
        name: gather_whole(parameter.grad, table[name])
        for name, parameter in model.named_parameters()
    }
    return masked, in_order, gradients


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("order", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(
    gloo: Pool, order: str, dtype: torch.dtype, tolerance: float, tensor_size: int
) -> None:
    assert not INPUTS[2].all(), "some sequences should be padded"
    model = make_theirs(order, dtype)
    expected = run_theirs(order, model)
    weights = by_our_names(FAMILIES[order], section_of(order), model.state_dict())
    for found in gloo.run(tensor_size, run_ours, order, weights, tensor_size):
        for logits, wanted in zip(found[:2], expected[:2], strict=True):
            assert logits.shape == wanted.shape
            assert_relative(logits, wanted, tolerance)
        assert len(found[2]) == len(expected[2])
        assert_gradients(found[2], expected[2], 10 * tolerance)
