"""Sharding specs and initialisation: what a parameter is does not depend on how it is cut."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from megatron.config.model import ModelConfig
from megatron.models.build import build_model, build_on_meta
from megatron.models.gpt import GPT2
from megatron.parallel.dtensors import from_dtensors, to_dtensors
from megatron.parallel.initialize import materialize, seed_kernels
from megatron.parallel.mesh import Axis, Mesh, serial_mesh
from megatron.parallel.sharding import ShardedModule, gather_whole, load_whole, sharding_specs
from megatron.train.executor import on_device
from tests.bert import bert_config
from tests.dist import on_ranks
from tests.llama import llama_config
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    VOCABULARY,
    mesh_of_ranks,
    rows,
    samples,
    tiny_config,
    tiny_model,
    whole_weights,
)

CPU = torch.device("cpu")


def on_meta(mesh: Mesh) -> GPT2:
    return build_on_meta(tiny_config(), mesh, VOCABULARY)


def initial(mesh: Mesh, seed: int = SEED, dtype: torch.dtype = torch.float32) -> GPT2:
    model = on_meta(mesh)
    materialize(model, device=CPU, dtype=dtype, seed=seed)
    return model


def loss(model: torch.nn.Module, number: int = 0) -> Tensor:
    batch = rows(samples(number + 1), slice(number, number + 1))
    return model(on_device(batch, CPU), torch.ones(1)).sum()


@pytest.mark.parametrize("std", [0.02, 0.5])
@pytest.mark.parametrize(
    "make",
    [tiny_config, bert_config, partial(bert_config, "post-ln"), llama_config],
    ids=["gpt2", "bert", "bert-post-ln", "llama"],
)
def test_matrices_have_the_std_that_is_set_and_alone_decay(
    make: Callable[..., ModelConfig], std: float
) -> None:
    """By default the paper's 0.02; before a residual it is divided by the root of twice the
    layers."""
    changes = {} if std == 0.02 else {"init_method_std": std}
    config = make(num_layers=3, **changes)
    model = build_model(config, serial_mesh(), 500, seed=SEED, dtype=torch.float32)
    table = sharding_specs(model)
    for name, weight in model.named_parameters():
        real = table[name].real(weight)
        is_vector = name.endswith("bias") or "norm" in name
        assert table[name].decay != is_vector, name
        if is_vector:
            assert torch.equal(real, torch.full_like(real, name.endswith("norm.weight"))), name
            continue
        before_a_residual = name.endswith(("attention.output.weight", "down.weight"))
        expected, count = std / sqrt(2 * 3) if before_a_residual else std, real.numel()
        # Five standard errors of the mean and of the standard deviation.
        assert abs(real.mean().item()) < 5 * expected / sqrt(count), name
        assert real.std().item() == pytest.approx(expected, rel=5 / sqrt(2 * count)), name


def test_every_parameter_and_seed_has_its_own_draw() -> None:
    first, other = dict(initial(serial_mesh()).named_parameters()), initial(serial_mesh(), seed=1)
    assert not torch.equal(
        first["transformer.layers.0.mlp.up.weight"], first["transformer.layers.1.mlp.up.weight"]
    )
    assert not torch.equal(first["position_embedding.weight"], other.position_embedding.weight)


def test_kernels_draw_by_seed_rank_step_micro_batch_and_stage() -> None:
    seeds = set[int]()
    with torch.random.fork_rng(devices=[]):
        for seed, rank, *where in product((1, 2), *[(0, 1)] * 4):
            mesh: Any = SimpleNamespace(axes=[SimpleNamespace(rank=rank)])
            seed_kernels(seed, mesh, *where)
            seeds.add(torch.initial_seed())
    assert len(seeds) == 2**5


@on_ranks(4)
def test_two_cuts_of_one_dim() -> None:
    """Row r of a dim cut over data, then tensor, is on the rank (r // 4, r // 2 % 2). DTensor
    orders the axes as the mesh does; another order is refused."""
    mesh = mesh_of_ranks(2)
    orders = ((mesh.data, mesh.tensor), (mesh.tensor, mesh.data))
    for axes, is_allowed in zip(orders, (True, False), strict=True):
        module = ShardedModule(mesh)
        module.add_parameter("weight", (8, 2), tuple((0, axis) for axis in axes))
        materialize(module, device=CPU, dtype=torch.float32, seed=None)
        whole, spec = torch.arange(16.0).view(8, 2), module.specs["weight"]
        with torch.no_grad():
            load_whole(module.weight, whole, spec)
        assert torch.equal(gather_whole(module.weight, spec), whole)
        if is_allowed:
            first = 4 * mesh.data.rank + 2 * mesh.tensor.rank
            assert torch.equal(module.weight, whole[first : first + 2])
            assert torch.equal(to_dtensors(module, mesh)["weight"].full_tensor(), whole)
        else:
            assert "weight" in str(refusal(partial(to_dtensors, module, mesh)))


@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 1)])
@on_ranks(2)
def test_torchs_distributed_checkpoint_keeps_the_weights(
    tmp_path: Path, writes: int, reads: int
) -> None:
    """Weights of one layout, through torch's distributed checkpoint to another one."""
    source, target = tiny_model(mesh_of_ranks(writes)), initial(mesh_of_ranks(reads), seed=2)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(to_dtensors(source, source.head.mesh), storage_writer=writer)
    tensors = to_dtensors(target.double(), target.head.mesh)
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    from_dtensors(target, tensors)
    found, expected = whole_weights(target), whole_weights(source)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
def test_specs_survive() -> None:
    """On meta, with memory, in bf16 and in a copy; so do ties."""
    mesh = mesh_of_ranks(2)
    on_meta_table = sharding_specs(meta := on_meta(mesh))
    assert all(parameter.is_meta for parameter in meta.parameters())
    # A copy on meta, then memory: both keep the table and the number of parameters.
    model = copy.deepcopy(meta)
    materialize(model, device=CPU, dtype=torch.float32, seed=SEED)
    copies = [model, copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)]
    copies.append(initial(mesh, dtype=torch.bfloat16))
    for each in copies:
        assert sharding_specs(each) == on_meta_table
        for name, parameter in each.named_parameters():
            assert tuple(parameter.shape) == on_meta_table[name].local_shape
    for each in copies[1:]:
        torch.testing.assert_close(loss(each), loss(model), rtol=2e-2, atol=0)
    assert_tied(copies[1])


def assert_tied(model: GPT2) -> None:
    """The head's gradient reaches the embedding: also rows of tokens that were not read."""
    batch = samples(1)
    unread = sorted(set(range(20)) - set(batch.tokens.flatten().tolist()))
    assert unread
    loss(model).backward()
    gradient = model.word_embedding.weight.grad
    assert gradient is not None
    whole = gather_whole(gradient, sharding_specs(model)["word_embedding.weight"])
    assert whole[unread].any(dim=1).all()


def test_rows_of_a_cut_stream_say_nothing_of_torchs_own_layers() -> None:
    mesh, layer = serial_mesh(), nn.Linear(2, 2)
    assert sharding_specs(layer, mesh=mesh).keys() == {"weight", "bias"}
    cut = replace(mesh, stream=Axis("stream", size=2))
    refusal(lambda: sharding_specs(layer, mesh=cut), "weight of Linear", "specs=", kind=ValueError)
