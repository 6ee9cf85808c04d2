"""Norms of rows whose columns are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import start_all_reduce, start_gather
from megatron.parallel.mesh import Axis


class _Normalise(torch.autograd.Function):
    """Layer norm, (x - mean) / sqrt(variance + epsilon) weight + bias, of sharded columns; without
    a bias RMSNorm, x / sqrt(mean of x^2 + epsilon) weight. Computed in fp32 or wider."""

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
        squares, *means = start_gather(torch.stack(terms)[None], axis)().unbind(1)
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
        summed = start_all_reduce(torch.stack(terms), ctx.axis)
        dw = (dy * normal).sum(0).to(weight.dtype)  # while the all-reduce runs
        db = dy.sum(0).to(weight.dtype) if ctx.has_mean else None
        means = summed() / (x.shape[1] * ctx.axis.size)
        dx = g.sub_(normal.mul_(means[0][:, None]))
        if ctx.has_mean:
            dx.sub_(means[1][:, None])
        return dx.mul_(scale[:, None]).to(x.dtype), dw, db, None, None


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, axis: Axis) -> Tensor:
    """Layer norm of x [n, h/c] whose columns are sharded over `axis`; RMSNorm without a bias."""
    y: Tensor = _Normalise.apply(x, weight, bias, epsilon, axis)
    return y.to(x.dtype)
