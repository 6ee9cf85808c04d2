"""What one rank computes, keeps and sends, counted while it happens.

matmul FLOPs    of every matrix product and attention kernel, 2 for a multiplication and an addition
saved bytes     of what the forward keeps for the backward beside the parameters, each memory once
host reads      results of the device that the host waits for
calls, bytes    of collectives by axis; bytes are what a rank sends in a ring of r ranks, N being
                those of the whole tensor: all-reduce 2 (r - 1) / r N, gather and reduce-scatter
                half of that
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from megatron.data.batch import Batch
from megatron.parallel.mesh import Mesh
from megatron.train.objectives import Objective
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, loss_sums

Shape = tuple[int, ...]


@dataclass
class Counts:
    """Of one rank; calls and bytes by the name of the axis."""

    matmul_flops: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


def _products(*operators: Any) -> Callable[[Any], Any]:
    """Registers a formula for those of the operators that torch has none for."""
    known = FlopCounterMode(display=False).flop_registry
    return register_flop_formula([each for each in operators if each not in known])


@_products(torch.ops.aten.addmm_)
def _addmm_(_: Shape, a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(a) * b[-1]


@_products(torch.ops.aten.baddbmm_)
def _baddbmm_(_: Shape, a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(a) * b[-1]


@_products(torch.ops.mkldnn._linear_pointwise)
def _linear(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(x) * weight[0]


@_products(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(q) * k[-2] + 2 * prod(q[:-1]) * prod(v[-2:])


@_products(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(dy: Shape, q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    """The scores again, and two products for each of the forward's."""
    scores, values = 2 * prod(q) * k[-2], 2 * prod(q[:-1]) * prod(v[-2:])
    return scores + 2 * scores + 2 * values


class Traffic(TorchDispatchMode):
    """Adds the collectives inside to `counts`."""

    SHARES: Mapping[str, tuple[int, int]] = {
        # (passes of a ring, which argument is the whole tensor)
        "allreduce_": (2, 0),
        "_allgather_base_": (1, 0),
        "_reduce_scatter_base_": (1, 1),
        "allgather_": (1, 0),
    }

    def __init__(self, counts: Counts, mesh: Mesh) -> None:
        super().__init__()
        self.counts = counts
        axes = [getattr(mesh, name) for name in vars(mesh)]
        self.axes = {axis.group.group_name: axis for axis in axes if getattr(axis, "size", 1) > 1}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self._add(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _add(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in self.SHARES:
            raise ValueError(f"SHARES does not say what the collective {name} sends")
        passes, which = self.SHARES[name]
        for each in args:
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                axis = self.axes[dist.ProcessGroup.unbox(each).group_name]
        tensors = args[which] if isinstance(args[which], list) else [args[which]]
        tensors = tensors[0] if isinstance(tensors[0], list) else tensors
        whole = sum(tensor.nbytes for tensor in tensors)
        self.counts.calls[axis.name] += 1
        self.counts.sent_bytes[axis.name] += passes * (axis.size - 1) * whole // axis.size


def measure(state: TrainState, micro_batches: Sequence[Batch]) -> Counts:
    """Of forward and backward of a step, whose gradients are in the buckets then."""
    model, mesh = state.model.train(), state.mesh
    kept = saved_bytes(model, state.objective, micro_batches[0], mesh.device)
    counts = count(state, micro_batches)
    with counting(mesh) as found:
        forward_backward(state, micro_batches, counts)
    found.saved_bytes = kept
    found.parameter_bytes = sum(each.nbytes for each in model.parameters())
    return found


@contextmanager
def counting(mesh: Mesh) -> Iterator[Counts]:
    """FLOPs and collectives of what runs inside."""
    counts, flops = Counts(), FlopCounterMode(display=False)
    with Traffic(counts, mesh), flops:
        yield counts
    counts.matmul_flops = flops.get_total_flops()


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


def saved_bytes(model: Any, objective: Objective, batch: Batch, device: torch.device) -> int:
    """Of what the forward of a micro-batch keeps for its backward, beside the parameters."""
    ones = torch.ones(len(objective.terms), dtype=torch.float64, device=device)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_sums(model, objective, batch, device, ones)
    del loss  # until here nothing that was kept could make room
    return sum(size for place, size in kept.items() if place not in parameters)
