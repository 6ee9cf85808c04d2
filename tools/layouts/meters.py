"""Counts what one rank computes, keeps and sends, while it runs (work.py).

matmul FLOPs    of every matmul and attention kernel, 2 for a multiplication and an addition
saved bytes     kept by the forward for the backward, without the parameters, each storage once
host reads      results of the device that the host waits for
calls, bytes    of collectives by axis. Bytes are those that a rank sends in a ring of r ranks, for
                N bytes of the whole tensor: 2 (r - 1) / r N in an all-reduce, half of that in a
                gather or reduce-scatter. A message is a call of its sender, of N bytes
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
from megatron.parallel.context import local_tokens
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.schedules import Action
from megatron.parallel.stages import as_tuple
from megatron.train.executor import Executor
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward
from tools.layouts.work import Meter


@dataclass
class Counts:
    """Counts of one rank; calls and bytes by the name of the axis."""

    matmul_flops: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


def measure(state: TrainState, micro_batches: Sequence[Batch]) -> Counts:
    """Counts of the forward and backward of a step, which leave its gradients in the buckets."""
    micro_batches = [local_tokens(each, state.mesh) for each in micro_batches]
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
    """Counts FLOPs and communication in the `with` block. ties: see Meter."""
    counts, meter = Counts(), Meter(mesh, ties=ties)
    with meter:
        yield counts
    sizes, work = {axis.name: axis.size for axis in meter.axes.values()}, meter.work[""]
    counts.matmul_flops = sum(each.flops * times for each, times in work.matmuls.items())
    for call, times in work.calls.items():
        if call.axis == mesh.control.name:  # small Python values, which are no part of training
            continue
        counts.calls[call.axis] += times
        counts.sent_bytes[call.axis] += times * call.sent(sizes[call.axis])


# Operators whose result is a number on the host, or has a size that depends on values.
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
    """Counts tolist() on a CPU, where it is no operator."""

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
    """Counts what makes the host wait for the device in the `with` block, by operator: numbers and
    lists of a tensor, copies to the host, boolean indices and other results whose size depends on
    values. On a CPU, where nothing waits, it counts the same without the copies."""
    found = Counter[str]()
    with _Lists(found), _HostReads(found):
        yield found


def saved_bytes(state: TrainState, batch: Batch) -> int:
    """Bytes that the forward of a micro-batch, through all stages of this rank, keeps for its
    backward, without the parameters. The inputs are zeros. Every rank calls this."""
    model, mesh, pipeline = state.model.train(), state.mesh, state.pipeline
    executor = Executor(
        model=model,
        objective=state.objective,
        mesh=mesh,
        pipeline=pipeline,
        batches=[batch],
        loss_scales=torch.ones(len(state.objective.terms), dtype=torch.float64, device=mesh.device),
        gradients=state.gradients,
        on_action=lambda action: enter(action.stage),
    )

    def enter(stage: int) -> None:
        if stage:
            like = as_tuple(executor.model.stream(batch, pipeline.layers[stage].start))
            zeros = [torch.empty_like(each, device=mesh.device).zero_() for each in like]
            executor.messages.put("forward", stage, 0, zeros)

    kept, parameters = dict[int, int](), [*model.parameters()]

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in {each.untyped_storage().data_ptr() for each in parameters}:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    own = range(mesh.pipeline.rank, pipeline.stages, pipeline.ranks)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The executor holds what is in flight, so no memory is freed and used for other tensors.
        executor.run(tuple(Action("forward", stage, 0) for stage in own))
    return sum(kept.values())
