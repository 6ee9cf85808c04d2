"""A step of the real model, at its full depth, on one rank of a fake process group: what the plan
has to equal. It shares no code with the meter that plans are derived by."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Batch
from megatron.models.build import build_model
from megatron.models.registry import find_kind
from megatron.optim.adam import LossScaler, MasterWeights
from megatron.parallel import collectives
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.kernels import meta_as
from megatron.parallel.mesh import Axis, Mesh, build_mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.train.inputs import vocabulary_of
from megatron.train.state import DTYPES, TrainState
from megatron.train.step import count, forward_backward
from tools.layouts.job import program_of
from tools.plan.trace import Step

META = torch.device("meta")


def preset(name: str, *flags: str) -> PretrainConfig:
    """flags: words, or several of them in a string."""
    words = " ".join(["--preset", name, *flags]).split()
    kind = words[words.index("--kind") : words.index("--kind") + 2] if "--kind" in words else []
    return parse(program_of([*words[:2], *kind]), [word for word in words if word not in kind], {})


def mesh_of(config: PretrainConfig) -> Mesh:
    """The ranks of the process group that there is, on a CPU."""
    return build_mesh(
        config.parallel.sizes,
        torch.device("cpu"),
        tensor_parallel_mode=config.parallel.tensor_parallel_mode,
        sequence_parallel=config.parallel.cuts_stream,
        cp_comm_type=config.parallel.context_type,
    )


@contextmanager
def fake_ranks(
    config: PretrainConfig, world: int, device: torch.device, rank: int = 0
) -> Iterator[Mesh]:
    """One of `world` ranks. On a CPU their collectives leave undefined values behind."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield replace(mesh_of(config), device=device)
    finally:
        dist.destroy_process_group()


class Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def bytes_of(tensors: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))


class Traffic(TorchDispatchMode):
    """(calls, bytes of whole tensors) of the collectives and the messages that are sent, on meta,
    by axis and phase: agreement, forward, or backward with recomputation."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        axes = (*mesh.axes, mesh.embedding_group, mesh.loss, mesh.model_parallel, mesh.loss_sums)
        self.names = {axis.group.group_name: axis.name for axis in axes if axis.size > 1}
        self.works: list[Done] = []
        self.phase = "agreement"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace != "c10d":
            return function(*args, **(kwargs or {}))
        group = next(each for each in args if "ProcessGroup" in str(getattr(each, "_type", str)()))
        key = self.names[dist.ProcessGroup.unbox(group).group_name], self.phase
        name = function.overloadpacket.__name__
        if name != "recv_":
            self.calls[key] += 1
            self.bytes[key] += max(bytes_of(each) for each in args[:2])
        self.works.append(Done())
        done = self.works[-1].boxed()
        return done if name in ("send", "recv_") else (args[0], done)

    def follow(self, model: Any) -> None:
        """Set the phase when the stages of the model begin and end."""
        embed, loss = model.embed, model.loss

        def first(batch: Any) -> Any:
            self.phase = "forward"
            return embed(batch)

        def last(*arguments: Any) -> Any:
            result = loss(*arguments)
            self.phase = "backward"
            return result

        model.embed, model.loss = first, last


def state_on(
    mesh: Mesh, config: PretrainConfig, precision: str, pipeline: PipelinePlan = WHOLE_MODEL
) -> TrainState:
    """All that a forward and backward pass needs; an optimizer, which holds the weights, under ZeRO
    alone."""
    rows, dtype, stage = vocabulary_of(config), DTYPES[precision], config.parallel.stage_of_zero
    model = build_model(config.model, mesh, rows, seed=None, dtype=dtype, pipeline=pipeline).train()
    gradients = GradientBuckets.for_master_weights(model, zero_stage=stage)
    optimizer: Any = MasterWeights(gradients, config.optimizer) if stage else None
    return TrainState(
        mesh=mesh,
        model=model,
        objective=model,
        gradients=gradients,
        optimizer=optimizer,
        scaler=LossScaler(),
        pipeline=pipeline,
    )


def batches(config: PretrainConfig, number: int = 1) -> list[Batch]:
    samples = resolve_name(find_kind(config.model.kind).samples)(config)
    size = config.training.micro_batch_size
    return [samples.batch(range(size)).numbered(np.arange(size)) for _ in range(number)]


def run_rank(step: Step) -> tuple[Traffic, SavedBytes, int]:
    """(communication, bytes kept, number of parameters) of a step up to the end of its backwards on
    the first rank of a pipeline stage, on meta tensors."""
    with rank_of(step) as mesh, meta_as(step.device):
        state = state_on(mesh, step.config, step.precision, step.pipeline)
        traffic, kept = Traffic(mesh), SavedBytes(state.model)
        samples = batches(step.config, step.micro_batches)
        with traffic, kept.counting():
            counts = count(state, samples)
            traffic.follow(state.model)
            forward_backward(state, samples, counts)
    return traffic, kept, sum(each.numel() for each in state.model.parameters())


def rank_of(step: Step) -> AbstractContextManager[Mesh]:
    first = step.rank * step.ranks // step.pipeline.ranks
    return fake_ranks(step.config, step.ranks, META, first)


def planned_calls(step: Step) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """(calls, bytes) of a step by axis and phase, as in Traffic."""
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for phase, found in step.calls.items():
        for call, times in found.items():
            key = call.axis, "backward" if phase == "recomputation" else phase
            calls[key] += times
            sizes[key] += times * call.bytes
    return calls, sizes


class Sums:
    """In place of `start_sum` of bucket.py: as NCCL, holds what is summed until a wait. Gloo holds
    it until it is sent, and on meta nothing does."""

    def __init__(self) -> None:
        self.now = self.most = 0  # sums that nobody has waited for

    def start(self, x: Tensor, axis: Axis, owners: Axis, **named: Any) -> Callable[[], Tensor]:
        wait = collectives.start_sum(x, axis, owners, **named)
        self.now += 1
        self.most = max(self.most, self.now)

        def done(_: Tensor) -> Tensor:
            self.now -= 1
            return wait()

        return partial(done, x)


class SavedBytes:
    """Bytes, beside those of parameters, that forwards inside have saved for their backwards: now,
    and the most of them at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = self.most = 0
        self.parameters = {id(each.untyped_storage()) for each in model.parameters()}
        self.memories: dict[int, Any] = {}

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        key, size = id(memory), memory.nbytes()
        if key in self.memories or key in self.parameters:
            return tensor

        def free(_: object) -> None:
            del self.memories[key]
            self.now -= size

        self.memories[key] = weakref.ref(memory, free)
        self.now += size
        self.most = max(self.most, self.now)
        return tensor

    def counting(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor)
