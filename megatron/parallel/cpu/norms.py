"""Norms for CPUs: layer norm with exact sums in bf16 and fp16, RMSNorm as fast as layer norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.dropout import widen

NARROW = (torch.bfloat16, torch.float16)


class NarrowLayerNorm(torch.autograd.Function):
    """Layer norm of bf16 and fp16, with a backward in fp32: torch's adds up the gradients of weight
    and bias in the dtype of x, and in bf16 half of a bias's gradient is lost over 2048 tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide = widen(weight), widen(bias)  # mean and deviation are then wide, too
        y, mean, deviation = torch.native_layer_norm(x, weight.shape, *wide, epsilon)
        ctx.save_for_backward(x, mean, deviation, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, deviation, weight, bias = ctx.saved_tensors
        gradients = torch.ops.aten.native_layer_norm_backward(
            widen(dy),
            widen(x),
            weight.shape,
            mean,
            deviation,
            widen(weight),
            widen(bias),
            ctx.needs_input_grad[:3],
        )
        return *(each if each is None else each.to(x.dtype) for each in gradients), None


class RMSNorm(torch.autograd.Function):
    """kernels.rms_norm of x [n, h]. torch builds RMSNorm of ten operations, whose backward takes 6
    times as long as layer norm's.

    With r = 1 / sqrt(mean of x^2 + epsilon), g = dy weight and means over the last dim

        dx = r (g - x r mean(g x r))

    is layer norm's gradient for a mean of 0, but layer norm subtracts r mean(g), too: add it back.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, rounds_before_weight: bool
    ) -> Tensor:
        wide = widen(x)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        r = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        if rounds_before_weight:
            return (wide * r).to(x.dtype).mul_(weight)
        return (wide * r).mul_(widen(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        wide_dy, wide_weight = widen(dy), widen(weight)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            wide_dy,
            widen(x),
            weight.shape,
            torch.zeros_like(r),
            r,
            wide_weight,
            None,
            [True, True, False],
        )
        dx.addcmul_(r, (wide_dy @ wide_weight)[:, None], value=1 / len(weight))
        return dx.to(x.dtype), dw.to(weight.dtype), None, None
