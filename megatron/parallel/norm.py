"""Layer norm: torch's, or that of NVIDIA apex."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardedModule, ShardingSpec


def widen(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _NarrowLayerNorm(torch.autograd.Function):
    """Of bf16 or fp16 on the CPU, with a backward in fp32.

    torch's own adds up the gradients of weight and bias in the dtype of x: over 2048 tokens in bf16
    half of a bias's gradient is lost.
    """

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


class LayerNorm(ShardedModule):
    """Layer norm of [n, h], duplicated on every rank, computed in fp32 or wider."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        shape = (hidden_size,)
        self.add_parameter(
            "weight", ShardingSpec(shape=shape, partial=(mesh.data,), fill=1, decay=False)
        )
        self.add_parameter("bias", ShardingSpec(shape=shape, partial=(mesh.data,), decay=False))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.is_cuda or x.dtype == widen(x).dtype or not torch.is_grad_enabled():
            return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        return _NarrowLayerNorm.apply(x, weight, bias, self.epsilon)


class ApexLayerNorm(LayerNorm):
    """The same by the kernel of NVIDIA apex's FusedLayerNorm, which computes in fp32 too."""

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float) -> None:
        super().__init__(mesh, hidden_size, epsilon=epsilon)
        self.kernel = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.kernel(x, self.weight, self.bias, self.weight.shape, self.epsilon)
        return normalised


LAYER_NORMS = {"torch": LayerNorm, "apex": ApexLayerNorm}
