"""GPT-2 and BERT equal transformers given the same weights: logits and every gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.models.build import build_model
from megatron.parallel.collectives import gather_from
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import gather_whole, sharding_specs
from megatron.train.evaluate import whole_logits
from megatron.train.executor import on_device, run_whole
from tests.bert import bert_samples, bert_section
from tests.dist import Pool
from tests.tiny import (
    SEQUENCE,
    VOCABULARY,
    assert_gradients,
    assert_relative,
    mesh_of_ranks,
    samples,
    scatter_weights,
    summed_loss,
    tiny_section,
)
from tests.tools.convert.models import randomise
from tools.convert.bert import PRETRAINED
from tools.convert.gpt2 import GPT2
from tools.convert.table import Family
from tools.convert.weights import resolve

POST_LN, PRE_LN = PRETRAINED
TEXT, BATCH = samples(3), bert_samples(6)
MOVED = on_device(BATCH, torch.device("cpu"))
INPUTS = [MOVED.tokens, MOVED.token_types, MOVED.is_real]
LABELS, MASK, IS_SWAPPED = (
    torch.from_numpy(each)
    for each in (BATCH.labels, BATCH.loss_mask.astype(bool), BATCH.is_swapped)
)


# Each returns logits, BERT's without those at padding, and leaves gradients in the model.


def their_gpt2(model: Any) -> list[Tensor]:
    logits = model(torch.from_numpy(TEXT.tokens)).logits
    labels, mask = (torch.from_numpy(each).flatten() for each in (TEXT.labels, TEXT.loss_mask))
    losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    (losses * mask).sum().backward()
    return [logits.detach()]


def our_gpt2(model: Any, mesh: Mesh) -> list[Tensor]:
    logits = whole_logits(model, mesh, torch.from_numpy(TEXT.tokens))
    summed_loss(model, TEXT, torch.device("cpu"))[0].backward()
    return [logits]


def their_bert(model: Any) -> list[Tensor]:
    tokens, types, is_real = INPUTS
    found = model(
        input_ids=tokens,
        token_type_ids=types,
        attention_mask=is_real.long(),
        labels=LABELS.where(MASK, -100),
        next_sentence_label=IS_SWAPPED,
    )
    found.loss.backward()
    return [found.prediction_logits[is_real].detach(), found.seq_relationship_logits.detach()]


def our_bert(model: Any, mesh: Mesh) -> list[Tensor]:
    with torch.no_grad():
        masked, in_order = model(MOVED)
    masked = gather_from(masked, -1, mesh.tensor)[INPUTS[2].flatten(), :VOCABULARY]
    loss_scales = 1 / torch.tensor(model.denominators(BATCH), dtype=torch.float64)
    run_whole(model, model, BATCH, torch.device("cpu"), loss_scales).sum().backward()
    return [masked, in_order]


class Kind(NamedTuple):
    family: Family
    config: ModelConfig
    their_name: str
    theirs: Callable[[Any], list[Tensor]]
    ours: Callable[[Any, Mesh], list[Tensor]]


SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 48, "init_method_std": 0.05}
KINDS = {
    "gpt2": Kind(GPT2, tiny_section(**SIZES), "GPT2LMHeadModel", their_gpt2, our_gpt2),
    "bert post-ln": Kind(
        POST_LN, bert_section("post-ln", **SIZES), "BertForPreTraining", their_bert, our_bert
    ),
    "bert pre-ln": Kind(
        PRE_LN, bert_section("pre-ln", **SIZES), "MegatronBertForPreTraining", their_bert, our_bert
    ),
}


def their_model(kind: Kind, dtype: torch.dtype) -> Any:
    """Random in every parameter."""
    config = kind.config
    make = getattr(transformers, kind.their_name)
    settings = make.config_class(
        vocab_size=VOCABULARY,
        num_hidden_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=SEQUENCE,
        attn_implementation="eager",
        intermediate_size=4 * config.hidden_size,  # of a BERT, as the next
        layer_norm_eps=config.layernorm_epsilon,
    )
    model = make(settings)
    randomise(model)
    return model.to(dtype).eval()


def by_our_names(kind: Kind, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs, weights or gradients, through the table of the conversion."""
    return {
        entry.ours: entry.transform.to_ours(
            [theirs[kind.family.key_of(name)] for name in entry.theirs], entry.spec.shape
        )
        for entry in resolve(kind.family, kind.config, VOCABULARY)
    }


def run_ours(
    name: str, weights: dict[str, Tensor], tensor_size: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(logits, whole gradients) on this rank."""
    kind, mesh = KINDS[name], mesh_of_ranks(tensor_size)
    dtype = next(iter(weights.values())).dtype
    model = build_model(kind.config, mesh, VOCABULARY, seed=1, dtype=dtype)
    scatter_weights(model, weights)
    logits = kind.ours(model.eval(), mesh)
    table = sharding_specs(model)
    return logits, {n: gather_whole(p.grad, table[n]) for n, p in model.named_parameters()}


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_those_of_transformers(
    gloo: Pool, name: str, dtype: torch.dtype, tolerance: float, tensor_size: int
) -> None:
    assert not INPUTS[2].all(), "some sequences should be padded"
    kind = KINDS[name]
    model = their_model(kind, dtype)
    expected = kind.theirs(model)
    wanted = by_our_names(kind, {n: each.grad for n, each in model.named_parameters()})
    weights = by_our_names(kind, model.state_dict())
    for logits, gradients in gloo.run(tensor_size, run_ours, name, weights, tensor_size):
        for each, other in zip(logits, expected, strict=True):
            assert each.shape == other.shape
            assert_relative(each, other, tolerance)
        assert_gradients(gradients, wanted, 10 * tolerance)
