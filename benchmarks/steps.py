"""Training steps of this project as contenders, by the flags of pretrain_gpt2.py.

Every feature of the program can be a contender: another layout, recomputation, dropout or precision
is another list of flags. A step is one micro-batch per data-parallel rank, but where `samples` says
how many it has. Samples are random tokens, a function of their number, so that peers read the same.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch._dynamo  # recomputation imports it; imported here, it does not count as its memory
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Rank
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainConfig, PretrainGPT2Config
from megatron.data.batch import Batch
from megatron.parallel.mesh import ControlGroup, Mesh, build_mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.parallel.sharding import ShardingSpec
from megatron.train.inputs import prefetch
from megatron.train.machine import choose_compile
from megatron.train.pipelining import plan_of_run
from megatron.train.state import DTYPES, TrainState, build_state
from megatron.train.step import train_step
from tools.layouts.job import open_samples

AnyPretrainConfig = TypeVar("AnyPretrainConfig", bound=PretrainConfig)
SEED = 1234
LEARNING_RATE = 1e-3
DTYPE_FLAGS = {"fp32": "--no-fp16 --no-bf16", "bf16": "--no-fp16 --bf16"}
SMALL = (  # flags of a model that any machine trains in a moment
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 8 --vocab-size 512"
)
SMALL_LLAMA = f"{SMALL} --num-query-groups 2 --ffn-hidden-size 128"
# Dense bf16 FLOP/s in NVIDIA's datasheets of H100 SXM and H200.
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def peak_of(device: str) -> float | None:
    """Peak FLOP/s of the GPU; None if unknown."""
    return PEAKS.get(torch.cuda.get_device_name()) if device == "cuda" else None


def read(
    flags: Sequence[str],
    ranks: int = 1,
    settings: type[AnyPretrainConfig] = PretrainGPT2Config,  # type: ignore[assignment]
    samples: int | None = None,
) -> AnyPretrainConfig:
    """The settings of pretrain_gpt2.py, or of another kind of model. samples: of a step on all
    ranks; by default one micro-batch per data-parallel rank. Raises UsageError if they do not fit
    this number of ranks."""
    given = parse(settings, list(flags), {})
    config = replace(given, training=replace(given.training, global_batch_size=samples))
    config.check(ranks)
    return config


def step_batches(
    config: PretrainConfig, rank: int = 0, ranks: int = 1, count: int = 1
) -> Iterator[list[Batch]]:
    """The micro-batches of each step, see batch_of; count: those of a step on each rank. As in a
    training, they are made while the step before runs."""
    size = config.training.micro_batch_size
    return prefetch(
        open_samples(config)[0],
        range(0, sys.maxsize, size * ranks * count),
        micro_batch_size=size,
        data_rank=rank,
        data_size=ranks,
    )


def precision_of(config: PretrainConfig) -> str:
    return config.precision.name or "fp32"


def dtype_of(config: PretrainConfig) -> torch.dtype:
    return DTYPES[precision_of(config)]


def batch_of(config: PretrainConfig, number: int, rank: int = 0, ranks: int = 1) -> Batch:
    """A micro-batch for data-parallel rank `rank` of `ranks`, by its number on this rank."""
    size = config.training.micro_batch_size
    numbers = np.arange(size) + (number * ranks + rank) * size
    return open_samples(config)[0].batch(numbers.tolist()).numbered(numbers)


def build(
    config: PretrainConfig,
    mesh: Mesh,
    *,
    compiled: bool = False,
    fast: bool = False,
    pipeline: PipelinePlan = WHOLE_MODEL,
) -> TrainState:
    """A run at step 0. fast: draw initial weights with the device's generator (see draw), so that
    no rank draws a whole large model on the host."""
    state = build_state(
        config.model,
        mesh,
        open_samples(config)[1],
        seed=None if fast else SEED,
        dtype=dtype_of(config),
        optimizer=config.optimizer,
        precision=config.precision,
        compiled=compiled,
        pipeline=pipeline,
        zero_stage=config.parallel.stage_of_zero,
        cuda_graph=config.training.cuda_graph,
    )
    if fast:
        draw_weights(state)
    return state


@torch.no_grad()
def draw_weights(state: TrainState) -> None:
    for each in state.optimizer.masters():
        each.local.zero_()  # padding
        for own, _ in each.spec.boxes(each.local):
            values = torch.empty_like(own, device=state.mesh.device)  # masters may be on the host
            draw(each.key, each.spec, values)
            own.copy_(values)
    state.optimizer.publish()


def draw(name: str, spec: ShardingSpec, values: Tensor) -> None:
    """Fill a parameter, or a rank's slice, with the device's generator: the same values for one
    rank and a peer, but not for every layout."""
    if spec.std is None:
        values.fill_(spec.fill)
    else:
        torch.manual_seed(SEED + zlib.crc32(name.encode()))
        values.normal_(0.0, spec.std)


def mesh_of(rank: Rank, config: PretrainConfig, of_ranks: int = 1) -> Mesh:
    """The mesh of the contender's ranks for these settings. of_ranks: see make_mesh."""
    own = config.parallel
    return make_mesh(
        rank,
        own.sizes,
        of_ranks,
        tensor_parallel_mode=own.tensor_parallel_mode,
        sequence_parallel=own.cuts_stream,
        cp_comm_type=own.context_type,
    )


def make_mesh(rank: Rank, sizes: Mapping[str, int], of_ranks: int = 1, **options: Any) -> Mesh:
    """of_ranks: if above 1, the mesh has so many ranks, of which only the first runs; collectives
    do not change their tensors, and take no time. Other arguments: see build_mesh."""
    if of_ranks == 1:
        made: Mesh = rank.mesh(sizes, **options)
        return made
    from torch.testing._internal.distributed.fake_pg import FakeStore  # there is no public one

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=of_ranks)
    return replace(build_mesh(sizes, rank.device, **options), control=ControlGroup())


@dataclass
class Run:
    """A run of this project; a turn is one training step, on the next samples. count: number of
    micro-batches of a step on each rank."""

    config: PretrainConfig
    state: TrainState
    count: int = 1

    def __post_init__(self) -> None:
        data = self.state.mesh.batch
        self.batches = step_batches(self.config, data.rank, data.size, self.count)

    def __call__(self) -> dict[str, Any]:
        result = train_step(self.state, next(self.batches), LEARNING_RATE)
        return {"loss": result.loss, "tokens": result.tokens}


def ours(
    rank: Rank,
    flags: Sequence[str],
    *,
    settings: type[PretrainConfig] = PretrainGPT2Config,
    samples: int | None = None,
    of_ranks: int = 1,
    fast: bool = False,
) -> Run:
    """settings, samples: see read. of_ranks: see mesh_of. fast: see build."""
    ranks = max(rank.size, of_ranks)
    config = read(flags, ranks, settings, samples)
    mesh = mesh_of(rank, config, of_ranks)
    compiled, warnings = choose_compile(config.training.compile, mesh)
    rank.notes += warnings
    pipeline = plan_of_run(config, open_samples(config)[1], ranks)
    state = build(config, mesh, compiled=compiled, fast=fast, pipeline=pipeline)
    return Run(config, state, config.micro_batches(ranks))
