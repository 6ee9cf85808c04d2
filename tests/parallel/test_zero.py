"""ZeRO stages 1 to 3 against stage 0, bit by bit; a model of torch's modules against one process;
how a parameter is cut into parts."""

import random
import re
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import pairwise
from math import isfinite, prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.training import OptimizerConfig
from megatron.optim.adam import LossScaler, MasterWeights
from megatron.parallel.bucket import gathered
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import ALONE, Axis, Mesh, serial_mesh
from megatron.parallel.sharding import FlatRange, ShardingSpec
from megatron.parallel.zero3 import Units
from megatron.train.state import TrainState, build_state
from megatron.train.step import train_step
from tests import plain
from tests.dist import on_ranks
from tests.refusals import refusal
from tests.tiny import (
    VOCABULARY,
    assert_exact,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_config,
    tiny_model,
    whole_slices,
)

CPU = torch.device("cpu")
STAGES = (1, 2, 3)
STEPS, LR, SCALE = 3, 1e-3, 2.0**20
CONFIG = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)
Weights = dict[str, Tensor]


def trained(
    mesh: Mesh, stage: int, dtype: torch.dtype, count: int = 1
) -> tuple[Weights, Weights, list[float]]:
    """(masters, weights of the model, norms) after STEPS steps of `count` micro-batches a rank, all
    whole; buckets do not depend on the stage. In fp16 the first steps overflow."""
    model = tiny_model(mesh, dtype=dtype)
    layers = [*model.transformer.layers.children()]
    gradients = GradientBuckets.for_master_weights(model, zero_stage=stage, units=layers, mesh=mesh)
    scaler = LossScaler()
    if dtype == torch.float16:
        scaler = LossScaler(scale=SCALE, window=100, most_skips=STEPS)
    optimizer = MasterWeights(gradients, CONFIG)
    parts = {"gradients": gradients, "optimizer": optimizer, "scaler": scaler}
    state = TrainState(mesh=mesh, model=model, objective=model, **parts)
    norms, batch_size = [], 2 * count * mesh.data.size
    for step in range(STEPS):
        batch = samples(batch_size, first=step * batch_size)
        norms.append(train_step(state, micro_batches(batch, mesh, 2), LR).grad_norm)
    assert (0 < state.skipped < STEPS) == (dtype == torch.float16), state.skipped
    assert min(filter(isfinite, norms)) > 0.5, "the clip would not be seen"
    return whole_slices(state.optimizer.masters()), whole_slices(state.weights()), norms


@on_ranks(4)
def test_bits_of_weights_are_those_without_zero() -> None:
    """Stages 2 and 3 add the terms of several micro-batches in another order."""
    mesh = mesh_of_ranks(1)
    for dtype, count in ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 1)):
        wanted, wanted_weights, norms = trained(mesh, 0, dtype, count)
        assert {each.dtype for each in wanted.values()} == {torch.float32}
        assert {each.dtype for each in wanted_weights.values()} == {dtype}
        for stage in STAGES:
            masters, weights, own_norms = trained(mesh, stage, dtype, count)
            assert masters.keys() == wanted.keys()
            if stage > 1 and count > 1:
                assert own_norms == pytest.approx(norms, rel=1e-5)
                for name, each in wanted.items():
                    assert (masters[name] - each).norm() <= 1e-6 * each.norm(), (stage, name)
                continue
            for name, each in wanted.items():
                assert torch.equal(masters[name], each), (stage, name)
                key = f"model.{name}"
                assert torch.equal(weights[key], wanted_weights[key]), (stage, name)


WIDTH, TOKENS = 8, 6 * 2 * 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return x + F.gelu(self.up(y))


class Own(nn.Module):
    """As users write them, of torch's modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.between = nn.Linear(WIDTH, WIDTH)  # is called twice
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.ModuleList(layer() for _ in range(2))
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.words.weight
        first, _, last = self.blocks
        last.up.weight = first.up.weight  # of two layers
        self.blocks[1].norm.requires_grad_(False)

    def forward(self, tokens: Tensor, is_whole: bool = True) -> Tensor:
        """is_whole: else it leaves the last layer and another module out."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.between(torch.tanh(self.between(self.blocks[1](x))))  # a layer again
        if is_whole:
            x = x + self.sometimes(x)
        for layer in self.encoder if is_whole else [self.encoder[0]]:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def own_model() -> Own:
    torch.manual_seed(1)
    return Own().double().train()


def own_loss(model: nn.Module, tokens: Tensor, number: int) -> Tensor:
    """This share of the mean over a step's tokens. number: of the micro-batch, two a step."""
    logits = model(tokens[:, :-1], number not in (1, 2, 3)).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / TOKENS


def batch_of(step: int) -> Tensor:
    """[6, 2, 9]: of two micro-batches."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (6, 2, 9), generator=generator)


def own_alone() -> tuple[Weights, list[float], Tensor]:
    """(weights, norms, logits of an evaluation) of one process with torch's optimizer."""
    model = own_model()
    optimizer, norms = plain.adamw(model, CONFIG, LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            own_loss(model, batch_of(step)[:, number], 2 * step + number).backward()
        for each in model.parameters():
            if each.requires_grad and each.grad is None:  # which decays all the same
                each.grad = torch.zeros_like(each)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_grad).item())
        optimizer.step()
    with torch.no_grad():
        logits = model.eval()(batch_of(STEPS)[0])
    return {name: each.detach() for name, each in model.named_parameters()}, norms, logits


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (3, 2), (3, 3)])
@on_ranks("size")
def test_a_model_of_ones_own_equals_one_process(size: int, stage: int) -> None:
    wanted, norms, wanted_logits = own_alone()
    mesh, model, twin, printed = mesh_of_ranks(1), own_model(), own_model(), StringIO()
    own_loss(twin, batch_of(0)[:, 0], 0).backward()
    trained = [(name, each) for name, each in twin.named_parameters() if each.requires_grad]
    unreached = [name for name, each in trained if each.grad is None]
    gradients = GradientBuckets.for_master_weights(model, 2048, mesh=mesh, zero_stage=stage)
    optimizer = MasterWeights(gradients, CONFIG)
    for step in range(STEPS):
        own = batch_of(step).chunk(mesh.data.size)[mesh.data.rank]
        for number in range(2):
            with gradients.accumulate(is_last=number == 1):
                own_loss(model, own[:, number], 2 * step + number).backward()
        norm = all_reduce(gradients.squares(), mesh.model_parallel).sqrt().item()
        assert norm == pytest.approx(norms[step], rel=1e-12)
        with redirect_stderr(printed):
            optimizer.step(LR, norm=norm)
    named = [word for word in re.findall(r"[\w.]+", printed.getvalue()) if word in wanted]
    assert sorted(named) == sorted(unreached) * mesh.is_first
    found = whole_slices(optimizer.masters())
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert len(frozen) == 2
    assert found.keys() | frozen == wanted.keys()
    for name, each in found.items():
        own, its = each, wanted[name]
        if name.endswith("in_proj_bias"):  # the gradient of the keys' is noise
            own, its = (every.view(3, WIDTH)[[0, 2]] for every in (own, its))
        assert (own - its).norm() <= 1e-11 * its.norm(), name
    model.eval()
    with torch.no_grad(), gathered(model):
        for _ in range(2):
            logits = model(batch_of(STEPS)[0])
            assert (logits - wanted_logits).norm() <= 1e-11 * wanted_logits.norm()
    with torch.no_grad():
        assert torch.equal(model(batch_of(STEPS)[0]), logits)


def test_boxes_tile_a_flat_range() -> None:
    """Parts of random shards, cut at random places: of n dims at most 2 n - 1 boxes each, which
    together are every element of the parameter once."""
    draw = random.Random(0)
    reached = set[int]()
    for _ in range(1000):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 3)))
        ranks = draw.randint(1, 2) if shape else 1
        padded = -(-shape[0] // ranks) * ranks if shape else None
        whole = torch.arange(float(prod(shape))).view(shape)
        times = torch.zeros(shape, dtype=torch.int64)
        for rank in range(ranks):
            axis = Axis("tensor", ranks, rank)
            shards = ((0, axis),) if ranks > 1 else ()
            spec = ShardingSpec(shape=shape, shards=shards, padded_rows=padded)
            shard = torch.full(spec.local_shape, -1.0)
            spec.real(shard).copy_(whole[spec.local_slices])
            size = shard.numel()
            cuts = [0, *sorted(draw.randint(0, size) for _ in range(draw.randint(0, 3))), size]
            for start, stop in pairwise(cuts):
                part = replace(spec, flat=FlatRange(ALONE, start, stop))
                boxes = list(part.boxes(shard.flatten()[start:stop]))
                most = max(1, 2 * len(shape) - 1)
                assert len(boxes) <= most
                reached |= {len(shape)} if len(boxes) == most else set()
                for own, where in boxes:
                    assert torch.equal(own, whole[where])
                    times[where] += 1
        assert (times == 1).all()
    assert reached == {0, 1, 2, 3}


@pytest.mark.parametrize("other", [[0, 2, 1], [0, 1], [0, 1, 2, 0]])
def test_layers_that_ranks_call_in_another_order_are_an_error(other: list[int]) -> None:
    units = Units(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), None)
    units.order, calls = [0, 1, 2], [[0, 1, 2], other]
    mesh: Any = SimpleNamespace(control=SimpleNamespace(group=0, gather=lambda order: calls))
    differing = "call 2" if other[1] == 2 else "call 3" if len(other) == 2 else "call 4"
    refusal(lambda: units.end_step(mesh), differing, "rank 1", kind=RuntimeError)
    units.end_step(mesh)  # they are compared once


@on_ranks(2)
def test_a_gradient_that_ranks_have_in_common_counts_once() -> None:
    """ZeRO does not divide the bucket of one that is no partial sum."""
    model, specs = nn.Linear(4, 4, bias=False), {"weight": ShardingSpec(shape=(4, 4))}
    given: Any = {"specs": specs, "mesh": mesh_of_ranks(1), "compares_weights": False}
    gradients = GradientBuckets.for_master_weights(model, zero_stage=1, **given)
    with gradients.accumulate(is_last=True):
        model(torch.ones(4)).sum().backward()
    assert gradients.squares() == 16


def test_masters_begin_as_rounded_weights() -> None:
    """As without ZeRO, where they are copies of the weights."""
    given: dict[str, Any] = {"seed": 1, "dtype": torch.bfloat16}
    runs = [
        build_state(tiny_config(), serial_mesh(CPU), VOCABULARY, zero_stage=stage, **given)
        for stage in (0, 3)
    ]
    wanted, found = (whole_slices(each.optimizer.masters()) for each in runs)
    assert_exact(found, wanted)
    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16(), serial_mesh(CPU)
    expected = model(torch.ones(4).bfloat16())
    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, zero_stage=3)
    MasterWeights(gradients, OptimizerConfig(optimizer_cpu_offload=True))
    assert torch.equal(model(torch.ones(4).bfloat16()), expected)
