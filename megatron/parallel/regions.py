"""Functions that enter and leave the parallel region, for custom layers: f, g and others of
collectives.py, with gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron.parallel.collectives import (
    Cut,
    Pair,
    gather_from,
    start_gather,
    start_sum,
    sum_terms,
)
from megatron.parallel.mesh import ALONE, Axis


def reduce_from(x: Tensor, axis: Axis, stream: Axis = ALONE) -> Tensor:
    """g: leave the parallel region by summing the ranks' partial `x`. The sum is in the memory of
    `x`, or in a new tensor if `x` is not contiguous or `stream` has several ranks."""
    return sum_terms(x, Cut(0, stream, axis))


def copy_to(x: Tensor, axis: Axis, stream: Axis = ALONE) -> Tensor:
    """f: enter the parallel region with an `x` that several matmuls share."""

    def there(x: Tensor) -> Tensor:
        return x.view_as(x) if stream.size == 1 else start_gather(x, stream)()

    def back(dy: Tensor) -> Tensor:
        return start_sum(dy.clone(memory_format=torch.contiguous_format), axis, stream)()

    return x if axis.size == 1 else Pair.apply(x, there, back)


def _own_shard(x: Tensor, dim: int, axis: Axis) -> Tensor:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {list(x.shape)} is no multiple of {axis.size} ranks")
    return x.chunk(axis.size, dim)[axis.rank]


def gather_with_gradient(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Concatenate the ranks' shards `x` along `dim`, for computations that are the same on every
    rank; each rank keeps the gradient of its own shard."""
    there, back = (partial(each, dim=dim, axis=axis) for each in (gather_from, _own_shard))
    return x if axis.size == 1 else Pair.apply(x, there, back)


def split_with_gradient(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's shard of an `x` that is the same on every rank. Each rank gets the whole gradient
    of `x`. Raises ValueError for a dim that the ranks cannot share evenly."""
    there, back = (partial(each, dim=dim, axis=axis) for each in (_own_shard, gather_from))
    return x if axis.size == 1 else Pair.apply(x, there, back)
