"""Functions of sharded tensors, with gradients: f and g of collectives.py and other ways into and
out of the parallel region, for custom layers; norms of rows whose columns are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel import collectives
from megatron.parallel.collectives import Pair
from megatron.parallel.mesh import ALONE, Axis, Mesh


def reduce_from(x: Tensor, axis: Axis, stream: Axis = ALONE) -> Tensor:
    """g: leave the parallel region by summing the ranks' partial `x`. The sum is in the memory of
    `x`, or in a new tensor if `x` is not contiguous or `stream` has several ranks."""
    if axis.size == 1:
        return x
    # Not by sum_terms, as torch 2.11 traces no Cut that is made in a compiled layer.
    sum_by, gather = collectives.start_sum, collectives.start_gather
    return Pair.apply(
        x.contiguous(), lambda x: sum_by(x, axis, stream)(), lambda dy: gather(dy, stream)()
    )


def copy_to(x: Tensor, axis: Axis, stream: Axis = ALONE) -> Tensor:
    """f: enter the parallel region with an `x` that several matmuls share."""

    def forward_by(x: Tensor) -> Tensor:
        return x.view_as(x) if stream.size == 1 else collectives.start_gather(x, stream)()

    def backward_by(dy: Tensor) -> Tensor:
        own = dy.clone(memory_format=torch.contiguous_format)  # others may read dy
        return collectives.start_sum(own, axis, stream)()

    return x if axis.size == 1 else Pair.apply(x, forward_by, backward_by)


def _own_shard(x: Tensor, dim: int, axis: Axis) -> Tensor:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {list(x.shape)} is no multiple of {axis.size} ranks")
    return x.chunk(axis.size, dim)[axis.rank]


def gather_with_gradient(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Concatenate the ranks' shards `x` along `dim`, for computations that are the same on every
    rank; each rank keeps the gradient of its own shard."""
    if axis.size == 1:
        return x
    gather = collectives.gather_from
    return Pair.apply(x, lambda x: gather(x, dim, axis), lambda dy: _own_shard(dy, dim, axis))


def split_with_gradient(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's shard of an `x` that is the same on every rank. Each rank gets the whole gradient
    of `x`. Raises ValueError for a dim that the ranks cannot share evenly."""
    if axis.size == 1:
        return x
    gather = collectives.gather_from
    return Pair.apply(x, lambda x: _own_shard(x, dim, axis), lambda dy: gather(dy, dim, axis))


def split_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part, as it is between layers, of x [.., h], which is whole on every rank that
    reads these samples: its columns in 2D, 2.5D and 3D, its rows under sequence parallelism, else
    all. Raises ValueError if the ranks cannot share x evenly."""
    return split_with_gradient(split_with_gradient(x, 0, mesh.stream), -1, mesh.hidden)


def gather_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """The inverse of split_stream, for what all ranks compute in the same way."""
    return gather_with_gradient(gather_with_gradient(x, -1, mesh.hidden), 0, mesh.stream)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, axis: Axis
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.axis, ctx.has_mean = axis, bias is not None
        own_mean = wide.mean(1) if ctx.has_mean else wide.new_zeros(len(x))
        squares = (wide - own_mean[:, None]).square().sum(1)
        # Deviations are from each rank's local mean: E[x^2] - E[x]^2 would cancel.
        terms = [squares, *[own_mean] * ctx.has_mean]
        squares, *means = collectives.start_gather(torch.stack(terms)[None], axis)().unbind(1)
        mean, variance = own_mean, squares.mean(0) / x.shape[1]
        if means:
            mean = means[0].mean(0)
            variance += (means[0] - mean).square().mean(0)
        scale = (variance + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        # If the last operator of a forward is in place, or a .to() that does nothing, torch 2.11
        # traces the forward as one without gradient.
        y = (wide - mean[:, None]).mul_(scale[:, None]) * weight
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide = mean.dtype
        normal = (x.to(wide) - mean[:, None]).mul_(scale[:, None])
        g = dy * weight
        terms = [(g * normal).sum(1), *[g.sum(1)] * ctx.has_mean]
        summed = collectives.start_all_reduce(torch.stack(terms), ctx.axis)
        dw = (dy * normal).sum(0).to(weight.dtype)  # while the all-reduce runs
        db = dy.sum(0).to(weight.dtype) if ctx.has_mean else None
        means = summed() / (x.shape[1] * ctx.axis.size)
        dx = g.sub_(normal.mul_(means[0][:, None]))
        if ctx.has_mean:
            dx.sub_(means[1][:, None])
        return dx.mul_(scale[:, None]).to(x.dtype), dw, db, None, None


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, axis: Axis) -> Tensor:
    """Layer norm, (x - mean) / sqrt(variance + epsilon) weight + bias, of x [n, h/c], whose columns
    are sharded over `axis`; without a bias RMSNorm, x / sqrt(mean of x^2 + epsilon) weight.
    Computed in fp32 or wider."""
    return _Normalise.apply(x, weight, bias, epsilon, axis).to(x.dtype)
