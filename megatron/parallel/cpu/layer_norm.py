"""Layer norm for CPUs: exact sums in bf16 and fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.block_attention import widen

NARROW = (torch.bfloat16, torch.float16)


class _NarrowLayerNorm(torch.autograd.Function):
    """torch's own adds up the gradients of weight and bias in the dtype of x: over 2048 tokens in
    bf16 half of a bias's gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide = widen(weight), widen(bias)  # with these its mean and deviation are wide too
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


def narrow_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Layer norm of bf16 and fp16, with a backward in fp32."""
    return _NarrowLayerNorm.apply(x, weight, bias, epsilon)
