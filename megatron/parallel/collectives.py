"""Conjugate pairs of collectives (paper, section 3): one does backward what the other does forward.

                   forward                    backward
    copy_to        f   x                      sum over ranks of dx
    reduce_from    g   sum over ranks of x    dx
    scatter_to         this rank's part       parts side by side
    gather_from        parts side by side     this rank's part

The law of a pair: <copy_to(x), y> = <x, reduce_from(y)>, inner products taken over all ranks; the
same for scatter_to and gather_from. On an axis of size 1 all four return their argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.mesh import Axis


def all_reduce(x: Tensor, axis: Axis, op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over `axis` and return it; no gradient is recorded."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():
        dist.all_reduce(x, op=op, group=axis.group)
        return x
    axis.calls.waits = axis.calls.begin("all_reduce", x.shape)
    dist.all_reduce(x, op=op, group=axis.group)
    axis.calls.waits = None
    return x


def begin_all_reduce(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Sum `x` over `axis` while other work goes on; what is returned waits, and returns the sum. It
    is in `x`, but for a compiler, which knows nothing of work in progress."""
    if axis.size == 1:
        return lambda: x
    if torch.compiler.is_compiling():
        # torch has no public function that a compiler keeps asynchronous (2.11 to 2.13).
        functional = torch.ops._c10d_functional
        summed = functional.all_reduce(x, "sum", axis.group.group_name)
        return lambda: functional.wait_tensor(summed)
    call = axis.calls.begin("all_reduce", x.shape)
    work = dist.all_reduce(x, group=axis.group, async_op=True)

    def wait() -> Tensor:
        axis.calls.waits = call
        work.wait()
        axis.calls.waits = None
        return x

    return wait


def _part(x: Tensor, dim: int, axis: Axis) -> Tensor:
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def _side_by_side(x: Tensor, dim: int, axis: Axis) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    if torch.compiler.is_compiling():
        dist.all_gather(parts, x.contiguous(), group=axis.group)
    else:
        axis.calls.waits = axis.calls.begin("all_gather", x.shape)
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        axis.calls.waits = None
    return torch.cat(parts, dim)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        # A clone, because autograd may hand the same gradient to another consumer (the residual).
        return all_reduce(dx.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _part(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _side_by_side(dx, ctx.dim, ctx.axis), None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _side_by_side(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _part(dx, ctx.dim, ctx.axis), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """f: enter the parallel region with a replicated `x`; the backward sums its gradients."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g: leave the parallel region by summing the ranks' partial `x`, in place."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def scatter_to(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Keep this rank's equal part of `x` along `dim`."""
    return x if axis.size == 1 else _ScatterTo.apply(x, dim, axis)


def gather_from(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Put the ranks' parts of `x` side by side along `dim`."""
    return x if axis.size == 1 else _GatherFrom.apply(x, dim, axis)
