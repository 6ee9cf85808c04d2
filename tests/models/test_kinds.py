"""Settings of a model are the same on two ranks, and kinds of one's own are found. Dropout draws in
each of its places, and the backward draws what a kernel drew."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.build import build_on_meta, keep_stages
from megatron.models.gpt import GPT2
from megatron.models.registry import KINDS, find_kind, register
from megatron.parallel.dropout import Dropout
from megatron.parallel.factory import layer_factory
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.schedules import PipelinePlan
from megatron.train.executor import on_device
from megatron.train.objectives import WholeLogitsLoss
from megatron.train.step import count, forward_backward, train_step
from tests.bert import bert_config, bert_samples
from tests.dist import Pool
from tests.llama import llama_config
from tests.models.own_kind import IMAGES, own_config
from tests.refusals import field_of, refusal
from tests.tiny import (
    GRANULARITIES,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    run_whole,
    samples,
    tiny_config,
    tiny_model,
    tiny_state,
    whole_gradients,
    whole_weights,
)
from tools.plan.absent import absent_mesh

CPU = torch.device("cpu")
CONFIGS: dict[str, ModelConfig] = {
    "plain": tiny_config(),
    "ffn": tiny_config(ffn_hidden_size=40),
    "gelu": tiny_config(activation="gelu"),
    "relu": tiny_config(activation="relu"),
    "silu": tiny_config(activation="silu"),
    "swiglu": tiny_config(activation="swiglu", ffn_hidden_size=24),
    "geglu": tiny_config(activation="geglu"),
}


def train(name: str, tensor_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """(losses and gradient norms of two steps, the weights after them)."""
    mesh, numbers = mesh_of_ranks(tensor_size), list[float]()
    state = tiny_state(mesh, CONFIGS[name])
    for step in range(2):
        result = train_step(state, micro_batches(samples(4, first=4 * step), mesh, 1), 1e-2)
        numbers += [result.loss, result.grad_norm]
    return numbers, whole_weights(state.model)


def train_all(tensor_size: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {name: train(name, tensor_size) for name in CONFIGS}


def test_two_ranks_give_the_same_model(gloo: Pool) -> None:
    expected = train_all(1)
    losses = {name: numbers[0] for name, (numbers, _) in expected.items()}
    assert len(set(losses.values())) == len(losses), "a setting changes nothing"
    for found in gloo.run(2, train_all, 2):
        for name, (numbers, weights) in found.items():
            assert numbers == pytest.approx(expected[name][0], rel=1e-10), name
            for parameter, weight in weights.items():
                wanted = expected[name][1][parameter]
                assert_relative(weight, wanted, 1e-9, f"{name}, {parameter}")


def test_a_loss_on_whole_logits_is_computed_in_fp32() -> None:
    """As the model's own; the matrix compares the two in fp64."""
    model = tiny_model(serial_mesh(), dtype=torch.bfloat16)

    def summed(logits: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        return losses @ batch.loss_mask.flatten().to(logits.dtype)

    own = WholeLogitsLoss(model, serial_mesh(), summed, lambda batch: 1.0)
    batch, scales = on_device(samples(2), CPU), torch.full((1,), 1 / 48, dtype=torch.float64)
    x = model.layers(model.embed(batch), batch)
    torch.testing.assert_close(own.loss(x, batch, scales), model.loss(x, batch, scales))


def test_a_model_alone_is_its_stages_in_order() -> None:
    model = tiny_model(serial_mesh())
    batch, scales = on_device(samples(2), CPU), torch.ones(1, dtype=torch.float64)
    x = model.layers(model.embed(batch), batch)
    assert torch.equal(model(batch, scales), model.loss(x, batch, scales))
    assert torch.equal(model(batch), model.logits(x))


def test_a_kind_without_a_list_of_stages_has_no_pipeline() -> None:
    mesh, plan = absent_mesh({"pipeline": 2}, CPU, stage=0), PipelinePlan(2, layers=(range(1),) * 2)
    refused = refusal(lambda: build_on_meta(own_config(), mesh, 101, pipeline=plan))
    assert "--pipeline-model-parallel-size 2" in str(refused)


class Forgetful(GPT2):
    """Without its positions in the list of stages."""

    def stages(self) -> list[list[str]]:
        first, *others = super().stages()
        return [[name for name in first if name != "position_embedding"], *others]


def test_a_parameter_in_no_stage_is_refused() -> None:
    plan = PipelinePlan(2, layers=(range(1), range(1, 2)))
    factory = layer_factory(serial_mesh(), 0)
    with torch.device("meta"):
        model = Forgetful(tiny_config(), factory, 101)
        more = GPT2(tiny_config(), factory, 101)
        more.heads = nn.Linear(1, 1)  # no part of `head`
    for each, name in ((model, "position_embedding.weight"), (more, "heads.weight")):
        with pytest.raises(ValueError, match=name):
            keep_stages(each, plan, 1)


@pytest.mark.parametrize(("embedding", "hidden"), [(0.5, 0.0), (0.0, 0.5), (None, 0.5)])
def test_dropout_of_the_embeddings_is_a_setting(embedding: float | None, hidden: float) -> None:
    config = tiny_config(embedding_dropout=embedding, hidden_dropout=hidden)
    model = tiny_model(serial_mesh(), config)
    outputs, batch = list[Tensor](), on_device(samples(4), CPU)
    model.embedding_dropout.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model.train().layers(model.embed(batch), batch)
    (x,) = outputs
    p = hidden if embedding is None else embedding
    assert (x == 0).double().mean().item() == pytest.approx(p, abs=0.05)


def test_a_kind_is_found_by_its_name_or_registered_under_one() -> None:
    assert find_kind("tests.models.own_kind:IMAGES") is IMAGES
    for name in ("nothing", "tests.models.own_kind:OwnConfig", "tests.models.nowhere:KIND"):
        assert field_of(refusal(lambda name=name: find_kind(name))) == "--model"
    register("pictures", IMAGES)
    try:
        assert find_kind("pictures") is IMAGES
        assert "pictures" in str(refusal(lambda: register("pictures", IMAGES)))
    finally:
        del KINDS["pictures"]


BATCH = 4


DROPPING: dict[str, tuple[Callable[..., ModelConfig], Callable[[int], Any]]] = {
    "gpt2": (tiny_config, samples),
    "llama": (llama_config, samples),
    "bert pre-ln": (partial(bert_config, "pre-ln"), bert_samples),
    "bert post-ln": (partial(bert_config, "post-ln"), bert_samples),
}


@pytest.mark.parametrize("name", DROPPING)
def test_each_dropout_alone_changes_the_loss(name: str) -> None:
    make, draw = DROPPING[name]
    config = make(hidden_dropout=0.5, attention_dropout=0.25)
    model = tiny_model(serial_mesh(), config)
    residual = [each for each in model.modules() if isinstance(each, Dropout)]
    cores = [each for each in model.modules() if isinstance(each, AttentionCore)]
    assert [each.p for each in residual] == [0.5] * (1 + 2 * config.num_layers)
    assert [each.dropout for each in cores] == [0.25] * config.num_layers
    assert len({each.name for each in (*residual, *cores)}) == 1 + 3 * config.num_layers

    def loss(active: object) -> float:
        for each in residual:
            each.p = 0.5 * (each is active)
        for each in cores:
            each.dropout = 0.25 * (each is active)
        ones = torch.ones(len(model.terms))
        return run_whole(model.train(), model, draw(3), CPU, ones).sum().item()

    plain = loss(None)
    for each in (*residual, *cores):
        assert abs(loss(each) - plain) > 1e-3, each.name


def drawn_in_the_kernel(tensor_size: int, granularity: str, step: int) -> list[Tensor]:
    """Loss and a gradient of attention's weight, twice from the same step."""
    config = tiny_config(
        attention_dropout=0.2, attention_dropout_rng="kernel", recompute_granularity=granularity
    )
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # must not matter
        state = tiny_state(mesh_of_ranks(tensor_size), config)
        state.step = step
        batches = [samples(BATCH)]
        loss = forward_backward(state, batches, count(state, batches))
        gradients = whole_gradients(state.gradients)
        found += [loss, gradients["transformer.layers.0.attention.qkv.weight"]]
    return found


def test_what_a_kernel_draws_is_drawn_again(gloo: Pool) -> None:
    """In the backward, and by a run that resumes; another step draws other numbers."""
    first = gloo.run(2, drawn_in_the_kernel, 2, "none", 3)
    for granularity in GRANULARITIES[1:]:
        again = gloo.run(2, drawn_in_the_kernel, 2, granularity, 3)
        for found, (loss, gradient, *more) in zip(again, first, strict=True):
            assert list(map(torch.equal, found + more, [loss, gradient] * 3)) == [True] * 6
    assert gloo.run(2, drawn_in_the_kernel, 2, "none", 4)[0][0] != first[0][0]
