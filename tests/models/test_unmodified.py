"""Unmodified models of transformers, as this project trains them, are what transformers computes;
and what a training does with a model is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import eager_mask

from megatron.huggingface.layers import ColumnLinear
from megatron.huggingface.replacements import DropoutKeys, KernelDropout, parameters_on_meta
from megatron.huggingface.weights import initial_values
from megatron.parallel.collectives import gather_from
from megatron.parallel.compare import KeepFP64, unseen
from megatron.parallel.dropout import (
    STEPS,
    Dropout,
    fold,
    head_keys,
    kept_mask,
    layer_key,
    row_keys,
)
from megatron.parallel.sharding import gather_whole, sharding_specs
from megatron.train.compiled import compile_layers
from megatron.train.diagnose import NonFiniteError
from megatron.train.executor import on_device
from megatron.train.replicas import ReplicaDrift, check_replicas
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, train_step
from tests import plain
from tests.bert import bert_samples
from tests.dist import Pool, on_ranks
from tests.huggingface import (
    DROPOUT,
    LITERAL,
    MASKED,
    by_their_names,
    hf_config,
    load_plain,
    plain_model,
)
from tests.layouts.matrix import of_documents
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    VOCABULARY,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_state,
    whole_gradients,
    whole_weights,
)

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # of norms, relative


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    model: str
    of_hf: Mapping[str, Any] = NOTHING  # changes of config.json
    has_documents: bool = False
    unused: str = ""  # of names of parameters that no loss reaches
    plan: str = ""  # in place of its own

    @property
    def config(self) -> Any:
        # Dropout of attention is by coordinates, on GPUs, too.
        plan = {"plan": self.plan} if self.plan else {}
        return hf_config(self.model, dict(self.of_hf), attention_dropout_rng="coordinates", **plan)

    @property
    def batch(self) -> Any:
        """Three samples, each with as many counted tokens as its own mask says."""
        if self.model in MASKED:
            return bert_samples(3)
        return of_documents(samples(3)) if self.has_documents else samples(3)


CASES = {
    "gpt2": Case("gpt2"),
    "gpt2, scores by layer": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, untied, documents": Case("gpt2", {"tie_word_embeddings": False}, has_documents=True),
    "llama, documents": Case("llama", has_documents=True),
    "llama, tied, biases": Case(
        "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "llama, 1 key/value head": Case("llama", {"num_key_value_heads": 1}),
    "qwen3, larger heads": Case("qwen3", {"head_dim": 16}),
    "mistral, a window": Case("mistral"),
    "neox": Case("gpt_neox"),
    "neox, one after the other": Case("gpt_neox", {"use_parallel_residual": False}),
    "opt, documents": Case("opt", has_documents=True),
    "gptj, attention of its own code, documents": Case("gptj", has_documents=True),
    "marian, frozen positions": Case("marian", unused="encoder_attn"),
    "gemma2, capped logits": Case("gemma2"),
    "bert": Case("bert"),
    "roberta": Case("roberta"),
    "bert, untied": Case("bert", {"tie_word_embeddings": False}, unused="predictions.bias"),
    # With attention's dropout; each rank has its heads, or all of them.
    "gpt2, dropout": Case("gpt2", DROPOUT["gpt2"]),
    "gpt2, dropout, all heads": Case("gpt2", DROPOUT["gpt2"], plan=LITERAL),
    "phi3, dropout, all heads": Case("phi3", DROPOUT["phi3"]),
    "olmo2, dropout, all heads": Case("olmo2", DROPOUT["olmo2"]),
}
FOUR = ("llama, documents", "mistral, a window", "roberta", "gpt2, dropout, all heads")
WITHOUT_PLAN = {"bloom": Case("bloom"), "experts": Case("mixtral")}  # trained whole


def cases_at(tensor_size: int) -> dict[str, Case]:
    """Four ranks take FOUR, more than there are groups of heads, and two the rest; the matrix
    compares gpt2, llama, qwen3, mistral, gpt_neox and bert with one process."""
    if tensor_size == 1:
        alone = ("roberta", "gpt2, dropout, all heads")
        return WITHOUT_PLAN | {name: CASES[name] for name in alone}
    return {name: case for name, case in CASES.items() if (name in FOUR) == (tensor_size == 4)}


def their_loss(case: Case, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Plain transformers' (logits [n, vocabulary], mean loss over counted tokens)."""
    arguments = {"input_ids": torch.from_numpy(batch.tokens)}
    if case.model in MASKED:
        arguments["attention_mask"] = torch.from_numpy(batch.is_real).long()
        if case.config.has_token_types:
            arguments["token_type_ids"] = torch.from_numpy(batch.token_types)
    elif case.has_documents:
        arguments["position_ids"] = torch.from_numpy(batch.positions)
        seen = plain.document_mask(torch.from_numpy(batch.document_starts))
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        arguments["attention_mask"] = mask
    with KeepFP64():
        logits = model(**arguments, use_cache=False).logits.flatten(0, 1)
    labels, counted = (torch.from_numpy(each).flatten() for each in (batch.labels, batch.loss_mask))
    losses = F.cross_entropy(logits, labels, reduction="none")
    return logits.detach(), (losses * counted).sum() / counted.sum()


def drop_by_coordinates(model: Any, batch: Any) -> None:
    """Let plain transformers drop what the hash says of whole tensors."""
    rows = row_keys(torch.from_numpy(batch.numbers), torch.arange(batch.tokens.shape[1]))

    def factors(keys: Tensor, columns: int, p: float) -> Tensor:
        kept = kept_mask(keys.flatten(), 0, columns, p, torch.float64)
        return (kept / (1 - round(p * STEPS) / STEPS)).view(*keys.shape, columns)

    def attention(
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = scores if mask is None else scores + mask
        keys = head_keys(rows, module.key_of_layer, range(q.shape[1]), len(q))
        probabilities = scores.softmax(-1) * factors(keys, k.shape[2], dropout)
        return (probabilities @ v).transpose(1, 2), None

    AttentionInterface.register("by_coordinates", attention)
    AttentionMaskInterface.register("by_coordinates", eager_mask)
    model.set_attn_implementation("by_coordinates")
    for name, module in model.named_modules():
        module.key_of_layer = layer_key(SEED, f"{name}.core")
        if type(module) is nn.Dropout:
            keys = fold(layer_key(SEED, name), rows)
            module.forward = lambda x, keys=keys, p=module.p: (
                x * factors(keys, x.shape[-1], p).view_as(x)
            )


def distance(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """Relative to the norm of the other, or to `least`: the bias of keys has no gradient in
    theory."""
    assert one.shape == other.shape
    norm = float(other.norm())
    return float((one - other).norm()) / (norm if norm > 1e-9 * least else least)


def differences(tensor_size: int) -> dict[str, dict[str, float]]:
    """Differences of each case from transformers on this rank: logits, loss, each gradient."""
    mesh, found = mesh_of_ranks(tensor_size), {}
    for name, case in cases_at(tensor_size).items():
        state, batch = tiny_state(mesh, case.config), case.batch
        theirs_model = plain_model(case.config)
        load_plain(theirs_model, by_their_names(state.model, whole_weights(state.model)))
        if "dropout" in name:
            drop_by_coordinates(theirs_model, batch)
        with torch.no_grad():
            moved = on_device(batch, CPU)
            logits = gather_from(state.model(moved), -1, mesh.tensor)[:, :VOCABULARY]
            total = state.model(moved, torch.ones(1, dtype=torch.float64))
            loss = float(total) / state.model.denominators(batch)[0]
        forward_backward(state, [batch], count(state, [batch]))
        gradients = by_their_names(state.model, whole_gradients(state.gradients))
        wanted, their = their_loss(case, theirs_model, batch)
        their.backward()
        theirs = {
            each: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for each, parameter in theirs_model.named_parameters()
            if parameter.requires_grad
        }
        assert theirs.keys() == gradients.keys()
        norm = float(nn.utils.get_total_norm(theirs.values()))
        specs = sharding_specs(state.model)
        largest = {
            each: float(gradient.abs().max())
            for each, gradient in theirs.items()
            if not specs[f"model.{each}"].zero_gradient
            and not (case.unused and case.unused in each)
        }
        found[name] = dict.fromkeys(unseen(largest, norm, [their.item()]), 1.0)
        found[name] |= {
            "logits": distance(logits, wanted),
            "loss": abs(loss / their.item() - 1),
            **{each: distance(gradients[each], theirs[each], norm) for each in theirs},
        }
    return found


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_unmodified_models_compute_what_transformers_does(gloo: Pool, tensor_size: int) -> None:
    for of_rank in gloo.run(tensor_size, differences, tensor_size):
        assert of_rank.keys() == cases_at(tensor_size).keys()
        for name, found in of_rank.items():
            wrong = {each: value for each, value in found.items() if not value <= TOLERANCE}
            assert not wrong, f"{name}: {wrong}"


def loss_of(model: str, **of_hf: Any) -> float:
    """The loss of the first step of one process."""
    state = tiny_state(mesh_of_ranks(1), hf_config(model, of_hf))
    assert bool(state.model.warnings) == (model == "opt" and "dropout" in of_hf)
    batch = bert_samples(3) if model == "bert" else samples(3)
    return train_step(state, [batch], 0.0).loss


@pytest.mark.parametrize("model", DROPOUT)
def test_each_dropout_of_a_config_changes_the_loss(model: str) -> None:
    """Otherwise layouts could agree on a dropout that drops nothing."""
    found = [loss_of(model), *(loss_of(model, **{n: p}) for n, p in DROPOUT[model].items())]
    assert len({*found}) == len(found)


@pytest.mark.parametrize(
    ("model", "of_hf", "drawn"),
    [
        ("opt", DROPOUT["opt"], ["decoder.dropout = 0.1", "decoder.layers.0.dropout = 0.1"]),
        ("opt", {"layerdrop": 0.2}, ["decoder.layerdrop = 0.2"]),
        ("opt", {"attention_dropout": 0.1}, []),
        ("gptj", {"attn_pdrop": 0.1}, ["h.0.attn.attn_dropout.p = 0.1"]),
    ],
)
def test_dropout_that_torch_draws_is_told_of(
    model: str, of_hf: dict[str, float], drawn: list[str]
) -> None:
    warnings = tiny_state(mesh_of_ranks(1), hf_config(model, of_hf)).model.warnings
    assert len(warnings) == bool(drawn)
    assert all(each in warnings[0] for each in drawn)


def losses_of(tensor_size: int, recompute: str, zero_stage: int = 0) -> list[float]:
    """The losses of two steps, of micro-batches of one sample."""
    config = hf_config("opt", DROPOUT["opt"], recompute_granularity=recompute)
    state = tiny_state(mesh_of_ranks(tensor_size), config, zero_stage=zero_stage)
    found = []
    for step in range(2):
        batches = micro_batches(samples(4, first=4 * step), state.mesh, 1)
        found.append(train_step(state, batches, 1e-2).loss)
    check_replicas(state, [])
    return found


def test_dropout_that_torch_draws_is_of_samples_alone(gloo: Pool) -> None:
    """It depends on the samples of a micro-batch: another step draws others, each rank the same."""
    (wanted,) = gloo.run(1, losses_of, 1, "none")
    for layout in ((2, "full"), (1, "none", 3)):
        for found in gloo.run(2, losses_of, *layout):
            assert found == pytest.approx(wanted, rel=1e-11)


def test_a_mask_of_documents_in_place_of_a_window_is_refused() -> None:
    model = tiny_state(mesh_of_ranks(1), hf_config("mistral")).model
    with pytest.raises(NotImplementedError):
        model.embed(on_device(of_documents(samples(2)), CPU))


# Modules whose dropout acts on neither the whole nor a rank's share of it, by the plan: the output
# of a layer is cut, or the heads are others than config.json has.
CUT_DROPOUT = {
    "transformer.h.0.mlp.dropout": """
"*.mlp.c_fc" = { style = "column", gather = true }
"*.mlp.c_proj" = "column"
""",
    "transformer.h.0.attn.core": f"""
{LITERAL}
"*.attn" = {{ style = "local", num_heads = 8, head_dim = 4 }}
""",
}


@on_ranks(2)
def test_dropout_of_an_unknown_part_is_refused() -> None:
    for name, plan in CUT_DROPOUT.items():
        config = hf_config("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1}, plan=plan)
        state = tiny_state(mesh_of_ranks(2), config)
        assert name in str(refusal(partial(train_step, state, [samples(2)], 0.0), lines=9))
    keys = DropoutKeys(torch.arange(6))
    dropout = KernelDropout(Dropout(SEED, 0.1, "of heads"), keys, {4}, 1)
    dropout(torch.ones(2, 3, 4))
    with pytest.raises(RuntimeError, match="of heads drops"):
        dropout(torch.ones(2, 5, 3, 4))


@pytest.mark.parametrize(("tensor_size", "zero_stage"), [(2, 0), (1, 3)])
@on_ranks(2)
def test_frozen_weights_stay(tensor_size: int, zero_stage: int) -> None:
    """In two steps, in which half of the others move at least."""
    mesh, config = mesh_of_ranks(tensor_size), hf_config("marian")
    state = tiny_state(mesh, config, zero_stage=zero_stage)
    before = weights_of(state)
    for number in range(2):
        train_step(state, [samples(3, first=3 * number)], 1e-2)
    names = {n for n, each in state.model.named_parameters() if not each.requires_grad}
    assert names == {"model.model.decoder.embed_positions.weight"}
    after = weights_of(state)
    moved = {name: float((after[name] - before[name]).norm()) for name in before}
    others = sorted(moved[name] for name in moved.keys() - names)
    assert max(moved[name] for name in names) == 0 < others[len(others) // 2]


def weights_of(state: TrainState) -> dict[str, Tensor]:
    shards = state.shards().items()
    return {name: gather_whole(local, spec).clone() for name, (spec, local) in shards}


@on_ranks(2)
def test_cut_models_generate_what_the_whole_does() -> None:
    """Greedily, with and without a cache."""
    for name in ("llama, 1 key/value head", "mistral, a window"):
        config = CASES[name].config
        state = tiny_state(mesh_of_ranks(2), config)
        weights = by_their_names(state.model, whole_weights(state.model))
        model = plain_model(config).eval()
        load_plain(model, weights)
        ids = torch.from_numpy(samples(3).tokens[:, :6])
        state.model.eval()
        for cache in (True, False):
            words = {"max_new_tokens": 5, "do_sample": False, "use_cache": cache}
            own = state.model.model.generate(ids, **words)
            assert len({*own[:, 6:].flatten().tolist()}) > 1, "any model would say so"
            assert torch.equal(own, model.generate(ids, **words)), name


# Modules of the second layer that begin an MLP.
UP = {
    "llama": "model.model.layers.1.mlp.up_proj",
    "bert": "model.bert.encoder.layer.1.intermediate.dense",
}


@on_ranks(2)
def test_faults_are_told_by_the_models_own_names() -> None:
    """One rank's weight is another, and its output is infinite."""
    mesh = mesh_of_ranks(2)
    is_last = mesh.control.rank == mesh.control.size - 1
    for model, name in UP.items():
        batches = [bert_samples(2) if model == "bert" else samples(2)]
        state = tiny_state(mesh, hf_config(model))
        norm = next(
            n for n, each in state.model.named_parameters() if "norm" in n.lower() or "ln" in n
        )
        with torch.no_grad():
            state.model.get_parameter(norm).view(-1)[0] += float(is_last)
        with pytest.raises(ReplicaDrift) as drift:
            check_replicas(state, batches)
        assert f"model.{norm}" in drift.value.names  # as a checkpoint calls it
        for recompute in ("none", "full")[: 2 if model == "llama" else 1]:
            state = tiny_state(mesh, hf_config(model, recompute_granularity=recompute))
            if is_last:
                module = state.model.get_submodule(name)
                module.register_forward_hook(lambda module, inputs, output: output * torch.inf)
            with pytest.raises(NonFiniteError) as raised:
                train_step(state, batches, 0.1)
            assert raised.value.found.what == f"the output of {name}"


def test_values_that_a_constructor_sets_are_initial_values() -> None:
    """Though the model's own initialisation does not say it."""
    config = hf_config("data2vec-text")
    expected = dict(plain_model(config).named_parameters())["lm_head.bias"]
    torch.use_deterministic_algorithms(True)  # memory that nobody has written to holds NaN
    try:
        values = dict(tiny_state(mesh_of_ranks(1), config).model.initial_values(SEED))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(values["model.lm_head.bias"].double(), expected)
    assert all(each.isfinite().all() for each in values.values())


class WithTimes(GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.times = nn.Parameter(torch.arange(1.0, 5.0))


def test_initial_value_of_a_parameter() -> None:
    with parameters_on_meta():
        model = WithTimes(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=4))
    assert dict(initial_values(model, SEED))["times"].tolist() == [1, 2, 3, 4]


def steps(recompute: str, is_compiled: bool) -> list[float]:
    """Losses of steps with dropout. Compiled layers are one graph, which nothing breaks."""
    mesh, config = mesh_of_ranks(2), Case("llama", DROPOUT["llama"]).config
    config = replace(config, recompute_granularity=recompute)
    state, counters = tiny_state(mesh, config, dtype=torch.float32), torch._dynamo.utils.counters
    if is_compiled:
        torch._dynamo.reset()
        counters.clear()
        compile_layers(state.model, "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = [train_step(state, [samples(2)], 1e-2).loss for _ in range(2)]
    if is_compiled:
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    # A tensor that is still held would keep what the layer has recomputed for its backward.
    columns = [each for each in state.model.modules() if isinstance(each, ColumnLinear)]
    assert columns
    assert not any(each.shared_input.x is not None for each in columns)
    return losses


def test_compiled_layers_are_one_graph_that_computes_the_same(gloo: Pool) -> None:
    [losses, *_] = gloo.run(2, steps, "full", False)
    [compiled, *_] = gloo.run(2, steps, "none", True)
    assert compiled == pytest.approx(losses, rel=1e-6)
