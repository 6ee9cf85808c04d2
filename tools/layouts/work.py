"""Records the work of one rank's kernels and collectives while they run; on meta tensors, which
have shapes and no memory, the work that they would do.

    matmuls    of all matmul kernels, attention's included
    calls      of collectives and messages, by axis
    moved      bytes that all other kernels read and write, each kernel counted by itself
    live       bytes of the tensors that exist at a time: on meta, or real ones
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import flex_dropout
from megatron.parallel.kernels import meta_as
from megatron.parallel.mesh import Axis, Mesh


class Matmul(NamedTuple):
    """`batch` times [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int
    width: int  # bytes of a number
    fused: bool = False  # in a kernel of attention, which does not write the scores
    share: float = 1.0  # fraction that is computed: half where such a kernel skips what is masked
    again: bool = False  # the scores, which the backward of such a kernel computes once more

    @property
    def flops(self) -> int:
        """FLOPs of the whole matmul, whatever its share."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Bytes read and written if each number moves once."""
        numbers = self.m * self.k + self.k * self.n + self.m * self.n
        return self.width * self.batch * numbers


class Call(NamedTuple):
    """A collective, or a message to one rank. bytes: of the whole tensor. passes: over a ring, 2 of
    an all-reduce, 1 of other collectives, 0 of a message. beside: the matmuls between its start and
    the wait for it. is_rooted: a broadcast or reduce; all ranks of the ring but
    one pass the whole tensor on."""

    axis: str
    bytes: int
    passes: int
    beside: tuple[Matmul, ...] = ()
    is_rooted: bool = False

    def sent(self, ranks: int) -> int:
        """Bytes that each of the ranks sends; for a rooted collective the average."""
        if not self.passes:
            return self.bytes
        return self.passes * (ranks - 1) * self.bytes // ranks


@dataclass
class Work:
    matmuls: Counter[Matmul] = field(default_factory=Counter)
    calls: Counter[Call] = field(default_factory=Counter)
    moved: int = 0  # bytes

    def plus(self, other: Work, times: int = 1) -> Work:
        """This work and `times` the other."""

        def add(a: Counter[Any], b: Counter[Any]) -> Counter[Any]:
            return Counter({key: a[key] + times * b[key] for key in (*a, *b)})

        matmuls, calls = add(self.matmuls, other.matmuls), add(self.calls, other.calls)
        return Work(matmuls, calls, self.moved + times * other.moved)


# Collectives: (passes over a ring, number of the argument that is the whole tensor). A message is
# counted where it is sent.
COLLECTIVES = {
    "send": (0, 0),
    "recv_": (0, 0),
    "allreduce_": (2, 0),
    "_allgather_base_": (1, 0),
    "_reduce_scatter_base_": (1, 1),
    "allgather_": (1, 0),
    "broadcast_": (1, 0),
    "reduce_": (1, 0),
    "alltoall_base_": (1, 1),
}
ROOTED = {"broadcast_", "reduce_"}
RETURN_WORK = {"send", "recv_", "reduce_", "alltoall_base_"}  # only the work, without the tensors
# Matmuls: number of the argument that is the left factor; the right one follows it.
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
TRANSPOSED = "_linear_pointwise"  # oneDNN's matmul of x and a weight [out, in]
ATTENTION = "scaled_dot_product"  # part of the name of every attention kernel
UNWRITTEN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
UNREAD = {"copy_", "zero_", "fill_"}  # write their first argument without reading it
# Kernels that read or write some rows of a table.
OF_ROWS = {"embedding", "index", "index_select", "gather", "index_put_", "index_add_"}


class _Done(dist.Work):
    """Handle of a collective on meta, or of a message (`call` is None for a received one). The
    matmuls before wait() run beside it."""

    def __init__(self, meter: Meter, call: Call | None) -> None:
        super().__init__()
        self.meter, self.call, self.phase = meter, call, meter.phase
        self.beside: list[Matmul] = []

    def wait(self, timeout: Any = None) -> bool:
        self.meter.finish(self)
        return True


class Meter(TorchDispatchMode):
    """Adds the work of its `with` block to `work[phase]`; the caller sets the phase. Collectives on
    meta do nothing, so the other ranks need not exist.

    live, peak: bytes allocated in it, now and at most: of tensors on meta, or of real ones.
    """

    def __init__(
        self,
        mesh: Mesh,
        lasting: Sequence[Tensor] = (),
        *,
        ties: Iterable[Axis] = (),
        follows_real: bool = False,
    ) -> None:
        """lasting: tensors that exist before and are written to; live does not count them. ties:
        axes beside the mesh's. follows_real: live and peak are of real tensors."""
        super().__init__()
        axes = [*(getattr(mesh, name) for name in vars(mesh)), *ties]
        self.axes = {axis.group: axis for axis in axes if getattr(axis, "size", 1) > 1}
        self.phase, self.live, self.peak = "", 0, 0
        self.follows_meta = not follows_real
        self.work: defaultdict[str, Work] = defaultdict(Work)
        self.running: list[_Done] = []
        self.memories: dict[int, Any] = {}
        self.lasting = {id(memory): memory for memory in (x.untyped_storage() for x in lasting)}

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if self.running and failure[0] is None:  # it would not be counted
            raise RuntimeError(f"nobody waits for {self.running[0].call or 'a message'}")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if function.namespace == "c10d":
            call, is_meta = self._call(name, args)
            if is_meta:
                self.running.append(_Done(self, call))
                done = self.running[-1].boxed()
                return done if name in RETURN_WORK else (args[0], done)
            if call is not None:
                self.work[self.phase].calls[call] += 1
            return function(*args, **kwargs)
        if function.is_view:  # its memory may be another one's, from before
            result = function(*args, **kwargs)
            for each in _tensors([result]):
                # Real memory that was not allocated here belongs to the transport.
                if each.is_meta and self.follows_meta:
                    self.watch(each)
            return result
        given = [*_tensors(args), *_tensors(kwargs.values())]
        is_meta = given[0].is_meta if given else kwargs.get("device") == META
        if is_meta and "out" not in kwargs:
            result = _on_meta(function, args, kwargs, given)
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
            place = [each.name for each in function._schema.arguments].index("is_causal")
            share = 0.5 if len(args) > place and args[place] else 1.0
            factors = args[is_backward : is_backward + 3]
            self.attention(*factors, is_backward=is_backward, share=share)
            self.work[self.phase].moved += sum(each.nbytes for each in (*given, *made))
        else:
            self.work[self.phase].moved += _moved(name, given, made, kwargs)
        for each in made:
            if each.is_meta == self.follows_meta:
                self.watch(each)
        return result

    def matmul(self, batch: int, m: int, k: int, n: int, width: int, **fields: Any) -> None:
        matmul = Matmul(batch, m, k, n, width, **fields)
        self.work[self.phase].matmuls[matmul] += 1
        for each in self.running:
            each.beside.append(matmul)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_backward: bool, share: float = 1.0
    ) -> None:
        """Counts a kernel of q [b, a, s, d], k and v [b, a, m, d]."""
        (*batch, rows, size), columns, values = q.shape, k.shape[-2], v.shape[-1]
        scores, weighted = (rows, size, columns), (rows, columns, values)
        fields = {"width": q.itemsize, "fused": True, "share": share}
        found = [scores, weighted]
        if is_backward:
            self.matmul(prod(batch), *scores, **fields, again=True)
            found = [(rows, values, columns), (columns, rows, values)]
            found += [(rows, columns, size), (columns, rows, size)]
        for each in found:
            self.matmul(prod(batch), *each, **fields)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Call | None, bool]:
        """(the call, None for a received message; whether it is on meta)"""
        if name not in COLLECTIVES:
            raise ValueError(f"COLLECTIVES does not say what the collective {name} sends")
        passes, which = COLLECTIVES[name]
        for each in args:
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                axis = self.axes[dist.ProcessGroup.unbox(each)]
        tensors = args[which] if isinstance(args[which], list) else [args[which]]
        tensors = tensors[0] if isinstance(tensors[0], list) else tensors
        if name == "alltoall_base_" and len({*args[4]}) > 1:  # all rows are for one rank
            passes = 0
        whole = sum(tensor.nbytes for tensor in tensors)
        call = None if name == "recv_" else Call(axis.name, whole, passes, is_rooted=name in ROOTED)
        return call, tensors[0].is_meta

    def finish(self, done: _Done) -> None:
        self.running.remove(done)
        if (call := done.call) is not None:
            self.work[done.phase].calls[call._replace(beside=tuple(done.beside))] += 1

    def watch(self, tensor: Tensor) -> None:
        """Counts its memory in `live` until it is freed; each storage once."""
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


META = torch.device("meta")
_KNOWN: dict[Any, Any] = {}  # results of operators on meta
_WRITES = "writes to its first argument, whose shape stays"


def _on_meta(function: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
    """The result of an operator. If an equal call before made only new tensors on meta, this makes
    tensors like those, and if it only wrote to its first argument, this does nothing: for many
    operators torch finds the shapes in slow Python."""
    key = function, _key(args), _key(tuple(kwargs.items()))
    if (known := _KNOWN.get(key)) is not None:
        return args[0] if known is _WRITES else _like(known)
    result = function(*args, **kwargs)
    made = list(_tensors([result]))
    if not _shares_memory(made, given) and all(each.is_meta for each in made):
        _KNOWN[key] = _like(result)
    elif args and result is args[0] and _key(result) == key[1][0]:
        _KNOWN[key] = _WRITES
    return result


def _shares_memory(made: list[Tensor], given: list[Tensor]) -> bool:
    memories = {id(each.untyped_storage()) for each in given}
    return all(id(each.untyped_storage()) in memories for each in made)


def _key(value: Any) -> Any:
    """Hashable, with shapes in place of tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value  # 2, 2.0 and True are equal, but make tensors of different dtypes


def _like(value: Any) -> Any:
    """The same with new tensors on meta."""
    if isinstance(value, Tensor):
        size, strides = value.shape, value.stride()
        return torch.empty_strided(size, strides, dtype=value.dtype, device="meta")
    return tuple(map(_like, value)) if isinstance(value, (list, tuple)) else value


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
        rows = (each.nbytes for each in (*given, *made) if each.is_floating_point())
        return 2 * min(rows, default=made[0].nbytes)
    if name.endswith("_") or "out" in kwargs:
        read = given[1:] if name in UNREAD else given
        return sum(each.nbytes for each in (*read, made[0]))
    if _shares_memory(made, given):
        return 0
    return sum(each.nbytes for each in (*given, *made))


@contextmanager
def on_meta(meter: Meter, device: str) -> Iterator[None]:
    """Meters a step on meta in the `with` block as one on this device, "cpu" or "cuda".

    The caller sets the phases "forward" and "backward"; modules in the latter are "recomputation".
    """
    with meta_as(device), _kernel_of_attention(meter), _recomputation(meter), meter:
        yield


class _Attention(torch.autograd.Function):
    """One kernel, which saves the logarithms of the sums (logsumexp) and no scores."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: float, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        sums = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        # In memory [b, s, a, d], as those of torch's kernels: heads are joined without a copy.
        heads = q.new_empty(*q.transpose(-3, -2).shape[:-1], v.shape[-1]).transpose(-3, -2)
        ctx.save_for_backward(q, k, v, heads, sums)
        ctx.share, ctx.meter, ctx.bytes = share, meter, sum(x.nbytes for x in (q, k, v, heads))
        meter.attention(q, k, v, is_backward=False, share=share)
        meter.work[meter.phase].moved += ctx.bytes
        return heads, sums

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.meter.attention(q, k, v, is_backward=True, share=ctx.share)
        ctx.meter.work[ctx.meter.phase].moved += 2 * ctx.bytes
        return *map(torch.empty_like, (q, k, v)), None, None


@contextmanager
def _kernel_of_attention(meter: Meter) -> Iterator[None]:
    """Replaces torch's attention, which chooses a kernel by the device, and on meta by torch's
    build; and flex_attention, which does not support meta."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
                  dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> Tensor:  # fmt: skip
        heads: Tensor = _Attention.apply(q, k, v, 0.5 if is_causal else 1.0, meter)[0]
        return heads

    def flex(q: Tensor, k: Tensor, v: Tensor, _: Any, blocks: BlockMask | None,
             **__: Any) -> tuple[Tensor, AuxOutput]:  # fmt: skip
        is_causal = blocks is not None and blocks.mask_mod is flex_dropout.causal
        heads, sums = _Attention.apply(q, k, v, 0.5 if is_causal else 1.0, meter)
        return heads, AuxOutput(lse=sums)

    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(flex_dropout, "flex_attention", flex),
    ):
        yield


@contextmanager
def _recomputation(meter: Meter) -> Iterator[None]:
    """Counts modules that are called during the backward as recomputed."""
    depth = 0

    def change(by: int) -> None:
        nonlocal depth
        if meter.phase != "forward":
            depth += by
            meter.phase = "recomputation" if depth else "backward"

    before = register_module_forward_pre_hook(lambda *_: change(1))
    after = register_module_forward_hook(lambda *_: change(-1), always_call=True)
    with before, after:
        yield
