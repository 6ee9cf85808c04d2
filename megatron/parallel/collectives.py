"""Collectives over an axis of the mesh; on an axis of size 1 each returns its argument unchanged.

Section 3 of the paper has a conjugate pair: each does backward what the other does forward.

           forward                   backward                  where
    f      x                         sum over ranks of dx      layers.multiply, beside its dW;
                                                               linear_cross_entropy
    g      sum over ranks of x       dx                        sum_terms

Under sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198) each rank holds its own rows
of the hidden states, and in the same places the pair is

    f      the rows of all ranks     own rows of the sum of dx
    g      own rows of the sum of x  the rows of all ranks of dx

`stream` is the axis that cuts the rows; if its size is 1, the first pair applies. Both pairs
satisfy <f(x), y> = <x, g(y)>, with inner products over all ranks. The second pair sends as many
bytes as the first in the forward and 3/2 of them in the backward, where f gathers its rows again.

A function start_X starts a collective and returns a function that waits and returns the result, so
that matmuls run meanwhile. The failure watch reads which call each rank waits in (mesh.Calls).
Strides may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.mesh import ALONE, Axis, Calls

OfTensor = Callable[[Tensor], Tensor]
Wait = Callable[[], Tensor]
# torch 2.13 renamed both.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
THROUGH_HOST = {("gloo", "cuda")}
"""Backends and devices whose messages are copied through the host; collectives need no copy."""


def _call(name: str, x: Tensor, axis: Axis, collective: Callable[[], object]) -> None:
    """Run a blocking collective, recorded for the failure watch unless a compiler traces it."""
    if torch.compiler.is_compiling():
        collective()
        return
    axis.calls.wait_for(axis.calls.start(name, x.shape), collective)


def _block(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy: backends read x.numel() consecutive elements from its address."""
    needs_copy = x.layout == torch.strided and not x.is_contiguous()
    return x.detach().contiguous() if needs_copy else x


def _stored(block: Tensor, x: Tensor) -> Tensor:
    """Copy the block to `x` and return `x`; if elements of `x` share memory, return the block."""
    if block is x:
        return x
    once = tuple(slice(0, None if stride else 1) for stride in x.stride())
    x.detach()[once].copy_(block[once])
    return block.to(x.device) if _overlaps(x) else x


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory (expand, unfold): smaller strides reach another stride."""
    dims = [*zip(x.stride(), x.shape, strict=True)]
    return any(n > 1 and n * s <= sum((m - 1) * t for t, m in dims if t <= s) for s, n in dims)


def all_reduce(x: Tensor, axis: Axis, op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over `axis` and return it; no gradient is recorded. If elements of `x`
    share memory (expand), the result is a new tensor; `x` has it only if theirs are equal."""
    if axis.size == 1:
        return x
    block = _block(x)
    _call("all_reduce", x, axis, lambda: dist.all_reduce(block, op=op, group=axis.group))
    return _stored(block, x)


def start_all_reduce(x: Tensor, axis: Axis) -> Wait:
    """Start to sum `x` over `axis`; the returned function waits and returns the sum. Except under
    torch.compile the sum is also in `x`, as after all_reduce."""
    if axis.size == 1:
        return lambda: x
    if torch.compiler.is_compiling():
        return _traced("all_reduce", x, "sum", axis=axis)
    return _started("all_reduce", x, axis, dist.all_reduce, x)


def start_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Wait:
    """Start to gather the rows [m, ..] of all ranks of `axis`, in rank order; see start_all_reduce.
    out: a tensor for the rows; `x` may be this rank's slice of it."""
    if axis.size == 1:
        return lambda: x
    if torch.compiler.is_compiling():
        return _traced("all_gather_into_tensor", x, axis.size, axis=axis)
    whole = x.new_empty(axis.size * len(x), *x.shape[1:]) if out is None else out
    return _started("all_gather", x, axis, _ALL_GATHER, whole, x.contiguous())


def start_sum(x: Tensor, axis: Axis, owners: Axis, out: Tensor | None = None) -> Wait:
    """Start to sum `x` over `axis`; see start_all_reduce. owners: `axis` if each of its ranks
    gets its own rows of the sum, an axis of size 1 if each gets all. out: a tensor for own rows;
    if it is part of `x`, the rest of `x` is undefined."""
    if owners.size == 1:
        return start_all_reduce(x, axis)
    assert owners is axis
    if torch.compiler.is_compiling():
        return _traced("reduce_scatter_tensor", x, "sum", axis.size, axis=axis)
    rows = x.new_empty(own_rows(x, axis).shape) if out is None else out
    return _started("reduce_scatter", x, axis, _REDUCE_SCATTER, rows, x.contiguous())


def start_all_to_all(x: Tensor, axis: Axis) -> Wait:
    """Start to send row i of `x` [c, ..] to rank i of `axis`, which has c ranks; the returned
    function waits and returns [c, ..], whose row j is from rank j."""
    if axis.size == 1:
        return lambda: x
    return _start_exchange(x, axis, [1] * axis.size, [1] * axis.size)


def start_shift(x: Tensor, axis: Axis, step: int = 1) -> Wait:
    """Start to send `x` to the rank `step` places on in the ring of `axis`; the returned function
    waits and returns the tensor of the same shape that arrives from the other side."""
    if axis.size == 1:
        return lambda: x
    sent, received = [0] * axis.size, [0] * axis.size
    sent[(axis.rank + step) % axis.size] = received[(axis.rank - step) % axis.size] = 1
    wait = _start_exchange(x[None], axis, received, sent)
    return lambda: wait()[0]


def _start_exchange(x: Tensor, axis: Axis, received: list[int], sent: list[int]) -> Wait:
    """received, sent: number of rows from and to each rank. Not isend and irecv, which a compiler
    cannot trace."""
    if torch.compiler.is_compiling():
        return _traced("all_to_all_single", x, received, sent, axis=axis)
    rows = x.new_empty(sum(received), *x.shape[1:])
    return _started(
        "all_to_all", x, axis, dist.all_to_all_single, rows, x.contiguous(), received, sent
    )


@dataclass(frozen=True)
class Cut:
    """How a matrix of a matmul is divided: along `dim` over the ranks of `over`, which gather it
    before use. Each rank of `terms` computes a term of it if it is y, of its gradient if it is x or
    W: the sum is an all-reduce if `over` has 1 rank, a reduce-scatter if `over` is `terms`. So
    Cut(0, stream, tensor) is f or g, without and with sequence parallelism."""

    dim: int = 0
    over: Axis = ALONE
    terms: Axis = ALONE

    def start_whole(self, x: Tensor) -> Wait:
        """Start to gather the matrix from each rank's part `x`; see `start_gather`."""
        wait, ranks = start_gather(x, self.over), self.over.size
        if ranks == 1 or self.dim == 0:
            return wait
        return lambda: wait().view(ranks, *x.shape).transpose(0, 1).flatten(1)

    def start_part(self, x: Tensor) -> Wait:
        """Start to sum the terms `x` of a matrix; each rank gets its part. See `start_sum`."""
        if (ranks := self.over.size) > 1 and self.dim == 1:
            x = x.view(len(x), ranks, x.shape[1] // ranks).transpose(0, 1).flatten(0, 1)
        return start_sum(x, self.terms, self.over)


UNCUT = Cut()


def cut(dim: int, axis: Axis) -> Cut:
    """Cut over an axis whose ranks also have one term each."""
    return Cut(dim, axis, axis)


def start_broadcast(x: Tensor, axis: Axis, source: int) -> Wait:
    """Start to broadcast the source's x, of the same shape and dtype; see start_all_reduce."""
    if axis.size == 1:
        return lambda: x
    if torch.compiler.is_compiling():
        return _traced("broadcast", x, source, axis=axis)
    # .data: gloo also writes a GPU's x back at the source, which autograd would take for a change.
    block = x.contiguous().data if axis.rank == source else x.new_empty(x.shape)
    return _started("broadcast", x, axis, partial(dist.broadcast, group_src=source), block)


def start_reduce(x: Tensor, axis: Axis, receiver: int) -> Wait:
    """Start to sum `x` over `axis`, in place and only for the rank `receiver`; `x` of the other
    ranks becomes undefined. See start_all_reduce."""
    if axis.size == 1:
        return lambda: x
    return _started("reduce", x, axis, partial(dist.reduce, group_dst=receiver), x)


def _started(
    name: str, x: Tensor, axis: Axis, collective: Callable[..., Any], out: Tensor, *inputs: Any
) -> Wait:
    block, call = _block(out), axis.calls.start(name, x.shape)
    work = collective(block, *inputs, group=axis.group, async_op=True)
    return partial(_wait, axis.calls, call, work, block, out)


def _wait(calls: Calls, call: Any, work: Any, block: Tensor, x: Tensor) -> Tensor:
    calls.wait_for(call, work.wait)
    return _stored(block, x)


def _traced(name: str, x: Tensor, *arguments: Any, axis: Axis) -> Wait:
    """For torch.compile, which has no public function that stays asynchronous (2.11 to 2.13)."""
    functional = torch.ops._c10d_functional
    result = getattr(functional, name)(x.contiguous(), *arguments, axis.group.group_name)
    return lambda: functional.wait_tensor(result)


def _goes_through_host(x: Tensor, axis: Axis) -> bool:
    # gloo sends no tensor of a GPU: the process dies ("pair.cc writev: Bad address").
    return (dist.get_backend(axis.group), x.device.type) in THROUGH_HOST


def start_send(x: Tensor, axis: Axis, receiver: int, what: str) -> Wait:
    """Start to send `x` to a rank of `axis`. The returned function has to be called: it waits until
    `x` may change. what: name of the message, for the failure watch."""
    block, calls = x.contiguous(), axis.channels[axis.rank, receiver]
    if _goes_through_host(x, axis):
        block = block.to("cpu", copy=True)
    call = calls.start(f"send of {what}", x.shape)
    # isend returns before it has read the block: _wait keeps it, and waits once, as twice hangs.
    work = dist.isend(block, group=axis.group, group_dst=receiver)
    return partial(_wait, calls, call, work, block, block)


def start_receive(x: Tensor, axis: Axis, sender: int, what: str) -> Wait:
    """Start to receive a message with the shape and dtype of `x` into it, from a rank of `axis`.
    The returned function waits and returns `x`."""
    block, calls = _block(x), axis.channels[sender, axis.rank]
    if _goes_through_host(x, axis):
        block = torch.empty_like(block, device="cpu")
    call = calls.start(f"receive of {what}", x.shape)
    # In gloo a longer message than the block aborts the process, so shapes come from meta.
    work = dist.irecv(block, group=axis.group, group_src=sender)
    return partial(_wait, calls, call, work, block, x)


def own_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of x [n, ..], which is whole on every rank of `axis`. Raises ValueError if
    the ranks cannot have equally many rows."""
    if len(x) % axis.size:
        raise ValueError(f"{len(x)} rows of the stream are no multiple of {axis.size} ranks")
    return x.chunk(axis.size)[axis.rank]


def own_columns(logits: Tensor, axis: Axis, vocab_size: int) -> tuple[int, int]:
    """(first token of this rank, number of its tokens); later columns of `logits` are padding."""
    start = axis.rank * logits.shape[1]
    return start, min(max(vocab_size - start, 0), logits.shape[1])


def gather_from(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Concatenate the ranks' shards `x` along `dim`; no gradient is recorded."""
    if axis.size == 1:
        return x
    shards = [x.new_empty(x.shape) for _ in range(axis.size)]
    shard = x.detach().contiguous()
    _call("all_gather", x, axis, lambda: dist.all_gather(shards, shard, group=axis.group))
    return torch.cat(shards, dim)


class Pair(torch.autograd.Function):
    """forward_by(x), which may change x in place and return it; backward_by(dy) is its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_by: OfTensor, backward_by: OfTensor) -> Tensor:
        ctx.backward_by, y = backward_by, forward_by(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_by(dy), None, None


def sum_terms(x: Tensor, by: Cut) -> Tensor:
    """Sum the terms `x` of a matrix over ranks; returns this rank's part of the sum."""
    if by.terms.size == 1:
        return x
    return Pair.apply(x.contiguous(), lambda x: by.start_part(x)(), lambda dy: by.start_whole(dy)())
