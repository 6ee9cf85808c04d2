"""Offload against the same run without, in bits; and what leaves the device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.checkpoint.format import read_checkpoint
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.optim.adam import MasterWeights
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.offload import SMALLEST, LayerOffload, on_host
from megatron.parallel.partition import partition
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.parallel.zero3 import offload_activations
from megatron.train.replicas import check_replicas
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.bert import bert_config, bert_samples
from tests.dist import on_ranks
from tests.huggingface import hf_config
from tests.llama import llama_config
from tests.parallel.test_parallelize import Layers
from tests.refusals import refusal
from tests.tiny import (
    assert_exact,
    live_memories,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    summed_loss,
    tensors,
    tiny_config,
    tiny_state,
)

CPU = torch.device("cpu")
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp64": (torch.float64, {}),
    "bf16": (torch.bfloat16, {}),
    "pure": (torch.bfloat16, {"pure_bf16": True}),
    "fp16": (torch.float16, {"fp16": True, "initial_loss_scale": "2**20"}),  # overflows at first
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "gpt2": tiny_config,
    "bert": bert_config,
    "llama": llama_config,
    "hf-gpt2": partial(hf_config, "gpt2"),
}


def state_of(
    mesh: Mesh,
    offloads: bool,
    stage: int = 0,
    precision: str = "fp64",
    model: str = "gpt2",
    granularity: str = "none",
    schedule: str = "",
) -> TrainState:
    """schedule: of a pipeline, over the mesh's axis, with a layer more than stages."""
    dtype, settings = PRECISIONS[precision]
    ranks, virtual = mesh.pipeline.size, 2 if schedule == "interleaved" else 1
    layers = ranks * virtual + 1
    config = CONFIGS[model](cpu_offload_activations=offloads, recompute_granularity=granularity)
    pipeline = WHOLE_MODEL
    if schedule:
        config = replace(config, num_layers=layers)
        parts = partition(layers, ranks * virtual, head=0.0)
        pipeline = PipelinePlan(ranks, virtual, schedule, parts)
    optimizer = OptimizerConfig(weight_decay=0.1, clip_grad=0.5, optimizer_cpu_offload=offloads)
    scaling = PrecisionConfig(**settings)
    how = {"dtype": dtype, "zero_stage": stage, "pipeline": pipeline}
    return tiny_state(mesh, config, optimizer, scaling, **how)


def steps(state: TrainState, numbers: Sequence[int], model: str = "gpt2") -> list[float]:
    """The norms of these steps, of two micro-batches a rank."""
    norms, size, draw = [], 4 * state.mesh.data.size, bert_samples if model == "bert" else samples
    for number in numbers:
        batches: list[Any] = micro_batches(draw(size, first=size * number), state.mesh, 2)
        norms.append(train_step(state, batches, 1e-3).grad_norm)
        check_replicas(state, batches)
    return norms


CASES: dict[str, list[dict[str, Any]]] = {
    "data=2": [
        {"precision": "pure"},
        {"precision": "bf16", "stage": 2},
        {"precision": "fp16", "granularity": "full", "stage": 3},
        {"model": "llama", "precision": "bf16", "stage": 1},
        {"model": "hf-gpt2", "granularity": "full"},
    ],
    "tensor=2": [{"precision": "bf16"}, {"model": "bert"}],
    "pipeline=2": [{"schedule": "interleaved"}, {"schedule": "zb-h1", "precision": "bf16"}],
    "tensor=2,data=2,sequence": [{"granularity": "full", "stage": 3}],
    "data=2,pipeline=2": [{"schedule": "1f1b", "granularity": "full", "stage": 1}],
}


@pytest.mark.parametrize("layout", CASES)
@on_ranks("layout")
def test_runs_are_equal_bit_by_bit(layout: str) -> None:
    mesh = mesh_of_ranks(layout)
    for case in CASES[layout]:
        one, other = (state_of(mesh, offloads, **case) for offloads in (False, True))
        fp16 = case.get("precision") == "fp16"
        number = range(3 if fp16 else 2)
        norms, its = (steps(each, number, case.get("model", "gpt2")) for each in (one, other))
        assert str(norms) == str(its), case
        assert one.skipped == other.skipped
        assert one.skipped in ((1, 2) if fp16 else (0,)), case
        wanted, found = tensors(one), tensors(other)
        assert wanted.keys() == found.keys(), case
        own, its = ([*each.optimizer.masters()] for each in (one, other))
        pairs = [(each.key, each.local, that.local) for each, that in zip(own, its, strict=True)]
        # Masters on the host are saved in parts where weights are whole on the device.
        same = [key for key, each in found.items() if each.shape == wanted[key].shape]
        pairs += [(key, wanted[key], found[key]) for key in same]
        weights = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
        pairs += [(name, each, that) for (name, each), that in weights if case.get("stage") != 3]
        for key, each, that in pairs:
            assert torch.equal(each, that), (case, key)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpoints_resume_with_and_without(precision: str, tmp_path: Path) -> None:
    mesh = serial_mesh(CPU)
    first = state_of(mesh, True, precision=precision)
    steps(first, range(2))
    found = read_checkpoint(save_state(first, tmp_path).path)
    steps(first, [2])
    for offloads in (False, True):
        again = state_of(mesh, offloads, precision=precision)
        again.load(found)
        steps(again, [2])
        assert_exact(tensors(again), tensors(first))


def device_bytes() -> int:
    """Bytes of the storages that tensors of this process have, without copies on the host."""
    host = {each.untyped_storage().data_ptr() for each in on_host}
    return sum(size for address, size in live_memories().items() if address not in host)


@pytest.mark.parametrize(("stage", "lasting"), [(0, 6), (2, 6), (3, 4)])
@on_ranks(1)
def test_the_device_holds_weights_and_gradients_alone(stage: int, lasting: int) -> None:
    """For each weight, in a process of the pool, which has few other objects to look through."""
    for offloads, wanted in ((True, lasting), (False, lasting + 12)):
        state = state_of(serial_mesh(CPU), offloads, stage, "bf16")
        size, held = sum(bucket.size for bucket in state.gradients.buckets), device_bytes()
        del state
        # Dropout's keys and the counts of updates are some bytes.
        assert (held - device_bytes()) / size == pytest.approx(wanted, rel=0.01)


def kept_on_device(granularity: str, offloads: bool, stage: int) -> int:
    """Storages of what parts of layers returned that the graph keeps on the device, after a
    forward."""
    state = state_of(serial_mesh(CPU), offloads, stage, granularity=granularity)
    seen: list[StorageWeakRef] = []

    def look(_: nn.Module, __: object, output: Any) -> None:
        if output.untyped_storage().nbytes() >= SMALLEST:
            seen.append(StorageWeakRef(output.untyped_storage()))

    layers: list[Any] = [*state.model.transformer.layers.values()]
    for layer in layers[:-1]:  # the norm before the head keeps what the last one returns
        for part in (layer.attention.qkv, layer.mlp_norm, layer.mlp.up, layer):
            part.register_forward_hook(look)
    total, _ = summed_loss(state.model, samples(4), CPU)
    assert total.requires_grad
    assert seen
    return sum(not each.expired() for each in seen)


def test_activations_leave_the_device() -> None:
    for stage in (0, 3):
        assert kept_on_device("none", False, stage) > 1
        assert kept_on_device("full", False, stage) == 1  # the input of the next layer
        for granularity in ("none", "full"):
            assert kept_on_device(granularity, True, stage) == 0


def own_steps(stage: int, order: str, left_out: int = 0) -> tuple[list[Tensor], list[int]]:
    """(masters after two steps of two micro-batches, bytes on the host after each forward).

    order: offload before ("first") or after GradientBuckets; empty: none. left_out: so many layers
    are not units."""
    torch.manual_seed(1)
    layer = partial(nn.TransformerEncoderLayer, 32, 2, 64, dropout=0.1, batch_first=True)
    parts = {"into": nn.Linear(8, 32), "layers": nn.Sequential(*(layer() for _ in range(3)))}
    model = Layers(
        lambda m, x: m.head(m.layers(m.into(x))), **parts, head=nn.Linear(32, 8)
    ).double()
    mesh, held = mesh_of_ranks(1), list[int]()
    model.into.requires_grad_(False)  # then no gradient leaves the first layer
    units = list(model.layers[left_out:]) if left_out else None
    if order == "first":
        offload_activations(model)
    given: dict[str, Any] = {"zero_stage": stage, "units": units}
    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, **given)
    optimizer = MasterWeights(gradients, OptimizerConfig())
    if order == "after":
        offload_activations(model, units)
    torch.manual_seed(mesh.data.rank)  # of samples and dropout
    for number in range(4):
        before = sum(each.nbytes for each in on_host)
        with gradients.accumulate(is_last=number % 2 == 1):
            loss = model(torch.rand(4, 8, 8, dtype=torch.float64)).square().sum()
            held.append(sum(each.nbytes for each in on_host) - before)
            loss.backward()
        if number % 2 == 1:
            optimizer.step(1e-2)
    return [each.local.clone() for each in optimizer.masters()], held


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_model_of_ones_own(stage: int) -> None:
    of_units = {}
    for left_out, orders in ((0, ("after", "first")), (1, ("after",))):
        wanted, nothing = own_steps(stage, "", left_out)
        assert not any(nothing)
        for order in orders:
            found, held = own_steps(stage, order, left_out)
            assert_exact(found, wanted)
            of_units[3 - left_out, order] = held
    one = of_units[2, "after"][0] // 2
    assert one
    assert all(held == [units * one] * 4 for (units, _), held in of_units.items())


def test_a_model_without_layers_is_refused() -> None:
    assert isinstance(refusal(lambda: offload_activations(nn.Linear(2, 2))), ValueError)


def test_an_activation_is_copied_to_the_host_once() -> None:
    layer = nn.Linear(64, 64)
    layer.register_buffer("table", torch.ones(64, 64))
    offload, x = LayerOffload(layer, None), torch.randn(64, 64)
    fetch_one, fetch_two = offload.pack(x), offload.pack(x.t()[3:])
    assert len(offload.alive) == 1
    assert fetch_one is not None
    assert fetch_two is not None
    assert torch.equal(fetch_one(), x)
    assert torch.equal(fetch_two(), x.t()[3:])
    assert fetch_two().stride() == x.t()[3:].stride()
    x.add_(1)
    again = offload.pack(x)
    assert again is not None
    assert len(offload.alive) == 2
    stays = [layer.weight, layer.weight.t(), layer.table, x[0].clone()]
    stays.append(torch.ones(64, 64, dtype=torch.int64))
    assert all(offload.pack(each) is None for each in stays)
