"""GPT-2, BERT and Llama equal transformers given the same weights: logits and every gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megatron.config.model import LlamaConfig, ModelConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.parallel.compare import KeepFP64
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import gather_whole, sharding_specs
from megatron.train.executor import on_device
from tests import plain
from tests.bert import bert_config, bert_samples
from tests.llama import llama_config
from tests.tiny import (
    SEQUENCE,
    VOCABULARY,
    assert_gradients,
    assert_relative,
    run_whole,
    samples,
    scatter_weights,
    summed_loss,
    tiny_config,
)
from tests.tools.convert.models import randomise
from tools.convert.bert import PRETRAINED
from tools.convert.gpt2 import GPT2
from tools.convert.table import Family
from tools.convert.weights import resolve

CPU = torch.device("cpu")
POST_LN, PRE_LN = PRETRAINED
BATCH = bert_samples(6)
MOVED = on_device(BATCH, CPU)


# Each returns logits, BERT's without those at padding, and leaves gradients in the model.


def their_text(model: Any, batch: GPT2Batch) -> list[Tensor]:
    logits = their_logits(model, batch)
    plain.summed_loss(logits, batch).backward()
    return [logits.detach()]


def their_logits(model: Any, batch: GPT2Batch) -> Tensor:
    starts = batch.document_starts
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    mask = mask if starts is None else plain.document_mask(torch.from_numpy(starts))
    with KeepFP64():
        found: Tensor = model(
            input_ids=torch.from_numpy(batch.tokens),
            position_ids=torch.from_numpy(batch.positions),
            attention_mask=torch.zeros(mask.shape, dtype=model.dtype).masked_fill(
                ~mask, -torch.inf
            ),
        ).logits
    return found


def our_text(model: Any, batch: GPT2Batch) -> list[Tensor]:
    with torch.no_grad():
        logits = model(on_device(batch, CPU))[:, :VOCABULARY]
    summed_loss(model, batch, CPU)[0].backward()
    return [logits.view(*batch.tokens.shape, -1)]


def their_bert(model: Any, batch: Any) -> list[Tensor]:
    found = model(
        input_ids=MOVED.tokens,
        token_type_ids=MOVED.token_types,
        attention_mask=MOVED.is_real.long(),
        labels=MOVED.labels.where(MOVED.loss_mask > 0, -100),
        next_sentence_label=MOVED.is_swapped,
    )
    found.loss.backward()
    return [found.prediction_logits[MOVED.is_real].detach(), found.seq_relationship_logits.detach()]


def our_bert(model: Any, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        masked, in_order = model(MOVED)
    masked = masked[MOVED.is_real.flatten(), :VOCABULARY]
    loss_scales = 1 / torch.tensor(model.denominators(BATCH), dtype=torch.float64)
    run_whole(model, model, BATCH, CPU, loss_scales).sum().backward()
    return [masked, in_order]


class Kind(NamedTuple):
    """family: the table of the conversion; None of Llama."""

    family: Family | None
    config: ModelConfig
    their_name: str
    theirs: Callable[[Any, Any], list[Tensor]] = their_text
    ours: Callable[[Any, Any], list[Tensor]] = our_text
    batch: Any = samples(3)


def llama(batch: GPT2Batch | None = None, **changes: Any) -> Kind:
    batch = samples(3) if batch is None else batch
    return Kind(None, llama_config(**changes), "LlamaForCausalLM", batch=batch)


def placed(
    start: int = 0, step: int = 1, *, has_documents: bool = False, is_masked: bool = False
) -> GPT2Batch:
    """start, step: of positions, which documents begin again; is_masked: these do not see each
    other."""
    places, cuts = np.arange(SEQUENCE), 3 + 4 * np.arange(3)[:, None]
    starts = np.where(places >= cuts, cuts, 0) * has_documents
    positions = start + step * (places - starts)
    return replace(samples(3), positions=positions, document_starts=starts if is_masked else None)


SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 48, "init_method_std": 0.05}
SCALING = (8.0, 1.0, 4.0, 100.0)  # of head size 8: one frequency stays, one is between, two shrink
LONG = {"hidden_size": 96, "max_position_embeddings": 128}
OF_GPT2 = Kind(GPT2, tiny_config(**SIZES), "GPT2LMHeadModel")
KINDS = {
    "gpt2": OF_GPT2,
    "gpt2, documents": OF_GPT2._replace(batch=placed(has_documents=True, is_masked=True)),
    "bert post-ln": Kind(
        POST_LN, bert_config("post-ln", **SIZES), "BertForPreTraining", their_bert, our_bert
    ),
    "bert pre-ln": Kind(
        PRE_LN, bert_config("pre-ln", **SIZES), "MegatronBertForPreTraining", their_bert, our_bert
    ),
    "12 query and 3 key/value heads": llama(),
    "tied": llama(untie_embeddings_and_output_weights=False),
    "1 key/value head": llama(num_query_groups=1),
    "as many key/value heads": llama(num_query_groups=None),
    "4 query and 2 key/value heads": llama(
        num_attention_heads=4, num_query_groups=2, rotary_base=500.0
    ),
    "scaled": llama(placed(90), rope_scaling=SCALING, **LONG),
    "longer than trained": llama(max_position_embeddings=SEQUENCE // 2),
    "later positions": llama(placed(5000, 7)),
    "reset positions": llama(placed(has_documents=True)),
    "documents": llama(placed(has_documents=True, is_masked=True)),
}


def their_model(kind: Kind, dtype: torch.dtype) -> Any:
    """Random in every parameter."""
    config: Any = kind.config
    make = getattr(transformers, kind.their_name)
    settings = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "attn_implementation": "eager",
        "intermediate_size": config.ffn_size,
        "layer_norm_eps": config.layernorm_epsilon,
    }
    if isinstance(config, LlamaConfig):
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
        if config.rope_scaling is not None:
            names = ("factor", "low_freq_factor", "high_freq_factor")
            rope |= dict(zip(names, config.rope_scaling, strict=False), rope_type="llama3")
            rope["original_max_position_embeddings"] = int(config.rope_scaling[3])
        settings |= {
            "num_key_value_heads": config.query_groups,
            "rms_norm_eps": config.layernorm_epsilon,
            "tie_word_embeddings": config.has_tied_head,
            "rope_parameters": rope,
        }
    model = make(make.config_class(**settings))
    randomise(model)
    model = model.to(dtype).eval()
    if isinstance(config, LlamaConfig):
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to(dtype)
    return model


def by_our_names(kind: Kind, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs, weights or gradients."""
    if kind.family is None:
        return plain.by_project_names(theirs)
    return {
        entry.ours: entry.transform.to_ours(
            [theirs[kind.family.key_of(name)] for name in entry.theirs], entry.spec.shape
        )
        for entry in resolve(kind.family, kind.config, VOCABULARY)
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """In one process, which the matrix compares layouts with."""
    assert not MOVED.is_real.all(), "some sequences should be padded"
    kind, tolerance = KINDS[name], 1e-12 if dtype == torch.float64 else 1e-5
    theirs = their_model(kind, dtype)
    wanted = kind.theirs(theirs, kind.batch)
    named = dict(theirs.named_parameters())
    model = build_model(kind.config, serial_mesh(), VOCABULARY, seed=1, dtype=dtype)
    scatter_weights(model, by_our_names(kind, {n: p.detach() for n, p in named.items()}))
    for each, other in zip(kind.ours(model.eval(), kind.batch), wanted, strict=True):
        assert each.shape == other.shape
        assert_relative(each, other, tolerance)
    table = sharding_specs(model)
    gradients = {n: gather_whole(p.grad, table[n]) for n, p in model.named_parameters()}
    expected = by_our_names(kind, {n: p.grad for n, p in named.items()})
    assert_gradients(gradients, expected, 10 * tolerance)
