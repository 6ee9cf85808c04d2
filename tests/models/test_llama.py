"""Llama equals transformers' LlamaForCausalLM in fp64 given the same weights: logits, loss, every
gradient, and the weights after three steps of AdamW."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from megatron.config.model import LlamaConfig
from megatron.config.training import OptimizerConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.hf_layers import Wide
from megatron.parallel.collectives import gather_from
from megatron.train.executor import on_device
from megatron.train.step import count, forward_backward, train_step
from tests import plain
from tests.dist import Pool
from tests.llama import llama_section
from tests.tiny import (
    SEQUENCE,
    VOCABULARY,
    mesh_of_ranks,
    samples,
    scatter_weights,
    tiny_state,
    whole_gradients,
    whole_weights,
)
from tests.tools.convert.models import randomise

CPU = torch.device("cpu")
# Of norms, relative; Adam divides small gradients by small ones.
TOLERANCES = {"logits": 1e-12, "losses": 1e-12, "gradients": 1e-12, "weights": 1e-11}
STEPS, LR = 3, 1e-2
OPTIMIZER = OptimizerConfig(weight_decay=0.3, clip_grad=0.5, adam_beta2=0.95)


class Case(NamedTuple):
    section: LlamaConfig = llama_section()
    start: int = 0  # the position of the first token
    step: int = 1  # from one position to the next
    has_documents: bool = False  # where positions start again
    is_masked: bool = False  # whether documents do not see each other


SCALING = (8.0, 1.0, 4.0, 100.0)  # of head size 8: one frequency stays, one is between, two shrink
CASES = {
    "12 query and 3 key/value heads": Case(),
    "tied": Case(llama_section(untie_embeddings_and_output_weights=False)),
    "1 key/value head": Case(llama_section(num_query_groups=1)),
    "as many key/value heads": Case(llama_section(num_query_groups=None)),
    "4 query and 2 key/value heads": Case(
        llama_section(num_attention_heads=4, num_query_groups=2, rotary_base=500.0)
    ),
    "scaled": Case(
        llama_section(hidden_size=96, max_position_embeddings=128, rope_scaling=SCALING), start=90
    ),
    "longer than trained": Case(llama_section(max_position_embeddings=SEQUENCE // 2)),
    "later positions": Case(start=5000, step=7),
    "reset positions": Case(has_documents=True),
    "documents": Case(has_documents=True, is_masked=True),
}


def batch_of(case: Case, step: int) -> GPT2Batch:
    """Three samples, each with as many counted tokens as its own mask says."""
    batch = samples(3, first=3 * step)
    places = np.arange(SEQUENCE)
    cuts = 3 + 4 * np.arange(3)[:, None]
    starts = np.where(places >= cuts, cuts, 0) * case.has_documents
    positions = case.start + case.step * (places - starts)
    return replace(batch, positions=positions, document_starts=starts if case.is_masked else None)


class Outcome(NamedTuple):
    logits: Tensor  # [b, s, vocabulary], of the first batch
    losses: Tensor  # [STEPS]
    gradients: dict[str, Tensor]  # whole, of the first step
    weights: dict[str, Tensor]  # whole, after the last


def their_model(section: LlamaConfig) -> Any:
    """Random in every parameter."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rotary_base}
    if section.rope_scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor")
        rope |= dict(zip(names, section.rope_scaling, strict=False), rope_type="llama3")
        rope["original_max_position_embeddings"] = int(section.rope_scaling[3])
    settings = TheirConfig(
        vocab_size=VOCABULARY,
        hidden_size=section.hidden_size,
        intermediate_size=section.ffn_size,
        num_hidden_layers=section.num_layers,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.query_groups,
        max_position_embeddings=section.max_position_embeddings,
        rms_norm_eps=section.layernorm_epsilon,
        tie_word_embeddings=section.has_tied_head,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(settings)
    randomise(model)
    model = model.double().eval()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.double()
    return model


def their_logits(model: Any, batch: GPT2Batch) -> Tensor:
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()[None]
    if batch.document_starts is not None:
        starts = torch.from_numpy(batch.document_starts)
        mask = mask & (starts[:, :, None] == starts[:, None, :])
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    with Wide():
        found: Tensor = model(
            input_ids=torch.from_numpy(batch.tokens),
            position_ids=torch.from_numpy(batch.positions),
            attention_mask=added[:, None],
        ).logits
    return found


@cache
def theirs(name: str) -> tuple[dict[str, Tensor], Outcome]:
    """(the first weights, what is found), by our names."""
    case = CASES[name]
    model = their_model(case.section)
    first = plain.by_project_names({n: p.detach().clone() for n, p in model.named_parameters()})
    optimizer = plain.adamw(model, OPTIMIZER, LR)
    logits, losses = [], []
    for step in range(STEPS):
        batch = batch_of(case, step)
        logits.append(their_logits(model, batch))
        losses.append(plain.summed_loss(logits[-1], batch) / float(batch.loss_mask.sum()))
        if step == 0:
            of_step = torch.autograd.grad(losses[-1], [*model.parameters()], retain_graph=True)
            gradients = dict(zip(dict(model.named_parameters()), of_step, strict=True))
        norm = plain.update(optimizer, losses[-1], OPTIMIZER.clip_grad)
        assert norm > OPTIMIZER.clip_grad, "the clip would not be seen"
    found = Outcome(
        logits[0].detach(),
        torch.stack(losses).detach(),
        plain.by_project_names(gradients),
        plain.by_project_names({n: p.detach() for n, p in model.named_parameters()}),
    )
    return first, found


def ours(weights: dict[str, dict[str, Tensor]], tensor_size: int) -> dict[str, Outcome]:
    """Of each case, by its first weights, on this rank."""
    mesh, found = mesh_of_ranks(tensor_size), {}
    for name, first in weights.items():
        case = CASES[name]
        state = tiny_state(mesh, case.section, OPTIMIZER)
        scatter_weights(state.model, first)  # parameters in fp64 are the masters
        batches = [batch_of(case, step) for step in range(STEPS)]
        with torch.no_grad():
            logits = gather_from(state.model(on_device(batches[0], CPU)), -1, mesh.tensor)
        logits = logits[:, :VOCABULARY].view(len(batches[0].tokens), SEQUENCE, -1)
        forward_backward(state, batches[:1], count(state, batches[:1]))
        gradients = whole_gradients(state.gradients)
        losses = [train_step(state, [batch], LR).loss for batch in batches]
        losses = torch.tensor(losses, dtype=torch.float64)
        found[name] = Outcome(logits, losses, gradients, whole_weights(state.model))
    return found


def tensors_of(found: Outcome, kind: str) -> dict[str, Tensor]:
    value = getattr(found, kind)
    return value if isinstance(value, dict) else {kind: value}


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_it_is_that_of_transformers(gloo: Pool, tensor_size: int) -> None:
    wanted = {name: theirs(name) for name in CASES}
    first = {name: weights for name, (weights, _) in wanted.items()}
    for of_rank in gloo.run(tensor_size, ours, first, tensor_size):
        for name, (_, expected) in wanted.items():
            for kind, tolerance in TOLERANCES.items():
                found, others = tensors_of(of_rank[name], kind), tensors_of(expected, kind)
                assert found.keys() == others.keys()
                for key, other in others.items():
                    assert found[key].shape == other.shape
                    difference = float((found[key] - other).norm() / other.norm())
                    assert difference <= tolerance, f"{name}, {key}: off by {difference:.2g}"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("scaled", CASES["scaled"]._replace(section=llama_section(hidden_size=96))),
        ("later positions", Case()),
        ("reset positions", Case()),
        ("documents", CASES["reset positions"]),
    ],
)
def test_scaling_positions_and_masks_change_the_logits(name: str, other: Case) -> None:
    """So that a model that leaves them out is seen."""
    logits = theirs(name)[1].logits
    plain = their_logits(their_model(other.section), batch_of(other, 0)).detach()
    assert (plain - logits).norm() > 1e-3 * logits.norm()
