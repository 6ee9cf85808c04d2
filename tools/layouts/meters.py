"""What one rank computes, keeps and sends, counted while it happens (work.py).

matmul FLOPs    of every matmul and attention kernel, 2 for a multiplication and an addition
saved bytes     of what the forward keeps for the backward beside the parameters, each memory once
host reads      results of the device that the host waits for
calls, bytes    of collectives by axis; bytes are what a rank sends in a ring of r ranks, N being
                those of the whole tensor: all-reduce 2 (r - 1) / r N, gather and reduce-scatter
                half of that. A message is a call of the rank that sends it, of N bytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data.batch import Batch
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.schedules import Action
from megatron.parallel.stages import as_tuple
from megatron.train.executor import Executor
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward
from tools.layouts.work import Meter


@dataclass
class Counts:
    """Of one rank; calls and bytes by the name of the axis."""

    matmul_flops: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


def measure(state: TrainState, micro_batches: Sequence[Batch]) -> Counts:
    """Of forward and backward of a step, whose gradients are in the buckets then."""
    kept, counts = saved_bytes(state, micro_batches[0]), count(state, micro_batches)
    ties = [axis for bucket in state.gradients.tied for axis in bucket.axes]
    with counting(state.mesh, ties) as found:
        forward_backward(state, micro_batches, counts)
    found.saved_bytes = kept
    found.parameter_bytes = sum(
        each.nbytes
        for each in state.model.parameters()
        if each.untyped_storage().nbytes() >= each.nbytes  # else they are absent
    )
    return found


@contextmanager
def counting(mesh: Mesh, ties: Iterable[Axis] = ()) -> Iterator[Counts]:
    """FLOPs and communication of what runs inside; ties: see Meter."""
    counts, meter = Counts(), Meter(mesh, ties=ties)
    with meter:
        yield counts
    sizes, work = {axis.name: axis.size for axis in meter.axes.values()}, meter.work[""]
    counts.matmul_flops = sum(each.flops * times for each, times in work.matmuls.items())
    for call, times in work.calls.items():
        if call.axis == mesh.control.name:  # small values of Python, beside training
            continue
        counts.calls[call.axis] += times
        counts.sent_bytes[call.axis] += times * call.sent(sizes[call.axis])


# The number itself, or how many there are of a result.
_READING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount"}


class _HostReads(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, result = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        is_copy = name in ("_to_copy", "copy_") and result.device.type == "cpu"
        if is_copy:
            is_copy = any(isinstance(each, Tensor) and each.is_cuda for each in args)
        is_mask = name in ("index", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if is_copy or is_mask or name in _READING:
            self.found[name] += 1
        return result


class _Lists(TorchFunctionMode):
    """On a CPU tolist() is no operator."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.tolist and not args[0].is_cuda:
            self.found["tolist"] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """What inside makes the host wait for the device, by operator: numbers and lists of a tensor,
    copies to the host, boolean indices and other results whose size depends on values. On a CPU,
    where nothing waits, numbers, lists and such results."""
    found = Counter[str]()
    with _Lists(found), _HostReads(found):
        yield found


def saved_bytes(state: TrainState, batch: Batch) -> int:
    """Of what the forward of a micro-batch keeps for its backward, beside the parameters: through
    all stages of this rank. What enters them is zero (every rank calls this)."""
    model, mesh, pipeline = state.model.train(), state.mesh, state.pipeline
    executor = Executor(
        model=model,
        objective=state.objective,
        mesh=mesh,
        pipeline=pipeline,
        batches=[batch],
        loss_scales=torch.ones(len(state.objective.terms), dtype=torch.float64, device=mesh.device),
        gradients=state.gradients,
        before=lambda action: enter(action.stage),
    )

    def enter(stage: int) -> None:
        if stage:
            like = as_tuple(executor.model.stream(batch, pipeline.layers[stage].start))
            zeros = [torch.empty_like(each, device=mesh.device).zero_() for each in like]
            executor.messages.put("forward", stage, 0, zeros)

    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in {
            each.untyped_storage().data_ptr() for each in model.parameters()
        }:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    own = range(mesh.pipeline.rank, pipeline.stages, pipeline.ranks)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The executor holds what is in flight, so that nothing that is kept makes room.
        executor.run(tuple(Action("forward", stage, 0) for stage in own))
    return sum(kept.values())
