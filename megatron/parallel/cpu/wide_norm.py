"""Layer norm of bf16 and fp16, with a backward in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def _widen(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _NarrowLayerNorm(torch.autograd.Function):
    """torch's own adds up the gradients of weight and bias in the dtype of x: over 2048 tokens in
    bf16 half of a bias's gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide = _widen(weight), _widen(bias)  # with these its mean and deviation are wide too
        y, mean, deviation = torch.native_layer_norm(x, weight.shape, *wide, epsilon)
        ctx.save_for_backward(x, mean, deviation, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, deviation, weight, bias = ctx.saved_tensors
        gradients = torch.ops.aten.native_layer_norm_backward(
            _widen(dy),
            _widen(x),
            weight.shape,
            mean,
            deviation,
            _widen(weight),
            _widen(bias),
            ctx.needs_input_grad[:3],
        )
        return *(each if each is None else each.to(x.dtype) for each in gradients), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """As kernels.layer_norm."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not torch.is_grad_enabled():
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    return _NarrowLayerNorm.apply(x, weight, bias, epsilon)
