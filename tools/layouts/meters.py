"""What one rank computes, keeps and sends, counted while it happens; on meta, while it would.

matmul FLOPs    of every matmul and attention kernel, 2 for a multiplication and an addition
moved bytes     that all other kernels read and write, each of them by itself
live bytes      of the tensors on meta that are there at a time
saved bytes     of what the forward keeps for the backward beside the parameters, each memory once
host reads      results of the device that the host waits for
calls, bytes    of collectives by axis; bytes are what a rank sends in a ring of r ranks, N being
                those of the whole tensor: all-reduce 2 (r - 1) / r N, gather and reduce-scatter
                half of that
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data.batch import Batch
from megatron.parallel.mesh import Mesh
from megatron.train.objectives import Objective
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, loss_sums


@dataclass
class Counts:
    """Of one rank; calls and bytes by the name of the axis."""

    matmul_flops: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


class Matmul(NamedTuple):
    """`batch` times [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int
    width: int  # bytes of a number
    fused: bool = False  # in a kernel of attention, which keeps the scores to itself
    share: float = 1.0  # of it that is computed: half where such a kernel skips what is masked
    again: bool = False  # the scores, which the backward of such a kernel computes once more

    @property
    def flops(self) -> int:
        """Of all of it, whatever the share."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Read and written, where each number is once."""
        numbers = self.m * self.k + self.k * self.n + self.m * self.n
        return self.width * self.batch * numbers


class Call(NamedTuple):
    """A collective. bytes: of the whole tensor. passes: over a ring, of all-reduce 2, else 1.
    beside: the matmuls between its start and the wait for it."""

    axis: str
    bytes: int
    passes: int
    beside: tuple[Matmul, ...] = ()

    def sent(self, ranks: int) -> int:
        """Bytes, by each of the ranks."""
        return self.passes * (ranks - 1) * self.bytes // ranks


@dataclass
class Work:
    matmuls: Counter[Matmul] = field(default_factory=Counter)
    calls: Counter[Call] = field(default_factory=Counter)
    moved: int = 0  # bytes


# Collectives: (passes over a ring, which argument is the whole tensor).
COLLECTIVES = {
    "allreduce_": (2, 0),
    "_allgather_base_": (1, 0),
    "_reduce_scatter_base_": (1, 1),
    "allgather_": (1, 0),
}
# Matmuls: which argument is the left factor; the right one follows it.
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
TRANSPOSED = "_linear_pointwise"  # oneDNN's, of x and a weight [out, in]
ATTENTION = "scaled_dot_product"  # is part of the name of every such kernel
UNWRITTEN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
UNREAD = {"copy_", "zero_", "fill_"}  # what they write into
# Kernels that touch some rows of a table.
OF_ROWS = {"embedding", "index", "index_select", "gather", "index_put_", "index_add_"}


class _Done(dist.Work):
    """Of a collective on meta. Waiting for it ends what goes on beside it."""

    def __init__(self, meter: Meter, call: Call) -> None:
        super().__init__()
        self.meter, self.call, self.phase = meter, call, meter.phase
        self.beside: list[Matmul] = []

    def wait(self, timeout: Any = None) -> bool:
        self.meter.finish(self)
        return True


class Meter(TorchDispatchMode):
    """Adds what happens inside to `work[phase]`; whoever uses it sets the phase. Collectives on
    meta do nothing, so that the ranks need not be there.

    live, peak: bytes on meta that were made inside, now and at most.
    """

    def __init__(self, mesh: Mesh, lasting: Sequence[Tensor] = ()) -> None:
        """lasting: tensors that were there before, and are written to."""
        super().__init__()
        axes = [getattr(mesh, name) for name in vars(mesh)]
        self.axes = {axis.group: axis for axis in axes if getattr(axis, "size", 1) > 1}
        self.phase, self.live, self.peak = "", 0, 0
        self.work: defaultdict[str, Work] = defaultdict(Work)
        self.running: list[_Done] = []
        self.memories: dict[int, Any] = {}
        self.lasting = {id(memory): memory for memory in (x.untyped_storage() for x in lasting)}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if function.namespace == "c10d":
            call, is_meta = self._call(name, args)
            if is_meta:
                self.running.append(_Done(self, call))
                return args[0], self.running[-1].boxed()
            self.work[self.phase].calls[call] += 1
            return function(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        makes = not (function.is_view or name.endswith("_") or "out" in kwargs)
        if makes and given and given[0].is_meta:
            result = _on_meta(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        made = list(_tensors([result]))
        if name in MATMULS:
            a, b = args[MATMULS[name]], args[MATMULS[name] + 1]
            self.matmul(*_factors(a.shape, b.shape), a.itemsize)
        elif name == TRANSPOSED:
            self.matmul(*_factors(args[0].shape, args[1].shape[::-1]), args[0].itemsize)
        elif ATTENTION in name:
            is_backward = "backward" in name
            self.attention(*args[is_backward : is_backward + 3], is_backward=is_backward)
        else:
            self.work[self.phase].moved += _moved(name, given, made, kwargs)
        for each in made:
            if each.is_meta:
                self._watch(each)
        return result

    def matmul(self, batch: int, m: int, k: int, n: int, width: int, **fields: Any) -> None:
        matmul = Matmul(batch, m, k, n, width, **fields)
        self.work[self.phase].matmuls[matmul] += 1
        for each in self.running:
            each.beside.append(matmul)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_backward: bool, share: float = 1.0
    ) -> None:
        """A kernel of q [b, a, s, d], k and v [b, a, m, d]."""
        (*batch, rows, size), columns, values = q.shape, k.shape[-2], v.shape[-1]
        scores, product = (rows, size, columns), (rows, columns, values)
        fields = {"width": q.itemsize, "fused": True, "share": share}
        found = [scores, product]
        if is_backward:
            self.matmul(prod(batch), *scores, **fields, again=True)
            found = [(rows, values, columns), (columns, rows, values)]
            found += [(rows, columns, size), (columns, rows, size)]
        for each in found:
            self.matmul(prod(batch), *each, **fields)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Call, bool]:
        """(the call, whether it is on meta)"""
        if name not in COLLECTIVES:
            raise ValueError(f"COLLECTIVES does not say what the collective {name} sends")
        passes, which = COLLECTIVES[name]
        for each in args:
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                axis = self.axes[dist.ProcessGroup.unbox(each)]
        tensors = args[which] if isinstance(args[which], list) else [args[which]]
        tensors = tensors[0] if isinstance(tensors[0], list) else tensors
        whole = sum(tensor.nbytes for tensor in tensors)
        return Call(axis.name, whole, passes), tensors[0].is_meta

    def finish(self, done: _Done) -> None:
        self.running.remove(done)
        call = done.call._replace(beside=tuple(done.beside))
        self.work[done.phase].calls[call] += 1

    def _watch(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key = id(memory)
        if key in self.memories or key in self.lasting:
            return
        size = memory.nbytes()

        def free(_: object) -> None:
            del self.memories[key]
            self.live -= size

        self.memories[key] = weakref.ref(memory, free)
        self.live += size
        self.peak = max(self.peak, self.live)


_KNOWN: dict[Any, Any] = {}  # results of operators on meta


def _on_meta(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that makes new tensors; if it was called alike before, tensors like
    those of before: for many operators torch finds the shapes by slow Python."""
    key = function, _described(args), _described(kwargs.items())
    if key not in _KNOWN:
        result = function(*args, **kwargs)
        _KNOWN[key] = _described(result)
        return result
    return _made(_KNOWN[key])


class _Shape(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    """Hashable, with shapes in place of tensors."""
    if isinstance(value, Tensor):
        return _Shape(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "dict_items":
        return tuple(map(_described, value))
    return value


def _made(known: Any) -> Any:
    if isinstance(known, _Shape):
        return torch.empty_strided(*known[:2], dtype=known.dtype, device="meta")
    return tuple(map(_made, known)) if isinstance(known, tuple) else known


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _factors(a: Sequence[int], b: Sequence[int]) -> tuple[int, int, int, int]:
    return prod(a[:-2]), a[-2], a[-1], b[-1]


def _moved(name: str, given: list[Tensor], made: list[Tensor], kwargs: Mapping[str, Any]) -> int:
    """Bytes that a kernel reads and writes; none for a view."""
    if name in UNWRITTEN or not made:
        return 0
    if name in OF_ROWS:
        return 2 * min(each.nbytes for each in (*given, *made) if each.is_floating_point())
    if name.endswith("_") or "out" in kwargs:
        read = given[1:] if name in UNREAD else given
        return sum(each.nbytes for each in (*read, made[0]))
    memories = {id(each.untyped_storage()) for each in given}
    if all(id(each.untyped_storage()) in memories for each in made):
        return 0
    return sum(each.nbytes for each in (*given, *made))


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
    counts, meter = Counts(), Meter(mesh)
    with meter:
        yield counts
    sizes, work = {axis.name: axis.size for axis in meter.axes.values()}, meter.work[""]
    counts.matmul_flops = sum(each.flops * times for each, times in work.matmuls.items())
    for call, times in work.calls.items():
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
