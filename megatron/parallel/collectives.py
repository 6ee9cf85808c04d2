"""Collectives over an axis of the mesh; on an axis of size 1 each leaves its argument as it is.

Section 3 of the paper has a conjugate pair: one does backward what the other does forward.

           forward                   backward                  where
    f      x                         sum over ranks of dx      layers.linear, beside its dW;
                                                               linear_cross_entropy; copy_to
    g      sum over ranks of x       dx                        reduce_from

The law of the pair: <f(x), y> = <x, g(y)>, inner products taken over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.mesh import Axis


def _call(name: str, x: Tensor, axis: Axis, collective: Callable[[], object]) -> None:
    """Run a collective that blocks, noted for the failure watch where no compiler traces it."""
    if torch.compiler.is_compiling():
        collective()
        return
    axis.calls.wait_for(axis.calls.start(name, x.shape), collective)


def all_reduce(x: Tensor, axis: Axis, op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over `axis` and return it; no gradient is recorded."""
    if axis.size > 1:
        _call("all_reduce", x, axis, lambda: dist.all_reduce(x, op=op, group=axis.group))
    return x


def start_all_reduce(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Sum `x` over `axis` while other work goes on; what is returned waits, and returns the sum.
    Except under torch.compile the sum is also in `x`."""
    if axis.size == 1:
        return lambda: x
    if torch.compiler.is_compiling():
        # torch has no public function that a compiler keeps asynchronous (2.11 to 2.13).
        functional = torch.ops._c10d_functional
        summed = functional.all_reduce(x, "sum", axis.group.group_name)
        return lambda: functional.wait_tensor(summed)
    call = axis.calls.start("all_reduce", x.shape)
    work = dist.all_reduce(x, group=axis.group, async_op=True)

    def wait() -> Tensor:
        axis.calls.wait_for(call, work.wait)
        return x

    return wait


def gather_from(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """The ranks' shards `x` side by side along `dim`; no gradient is recorded."""
    if axis.size == 1:
        return x
    shards = [torch.empty_like(x) for _ in range(axis.size)]
    own = x.detach().contiguous()
    _call("all_gather", x, axis, lambda: dist.all_gather(shards, own, group=axis.group))
    return torch.cat(shards, dim)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g: leave the parallel region by summing the ranks' partial `x`, in place."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dx.contiguous().clone(), ctx.axis), None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """f: enter the parallel region where several matmuls share `x`."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_from(x, -1, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.chunk(ctx.axis.size, -1)[ctx.axis.rank], None


def gather_with_gradient(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' columns `x` side by side, for what every rank computes alike: each keeps the
    gradient of its own columns."""
    return x if axis.size == 1 else _GatherWithGradient.apply(x, axis)
