"""GeLU by tanh, for the CPU: torch's own spends most of its time on the tanh.

GeLU(x) = x / 2 (1 + tanh(z)) = x sigmoid(2 z)        z = sqrt(2 / pi) (x + 0.044715 x^3)
GeLU'(x) = S + x S (1 - S) 2 z'                        S = sigmoid(2 z)
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR = 2 * sqrt(2 / pi)
CUBIC = 0.044715 * LINEAR


class _Gelu(torch.autograd.Function):
    """S is computed twice, since it would take as much memory as x; narrow x in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = _widen(x)
        return _sigmoid(wide).mul_(wide).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = _widen(x)
        s = _sigmoid(wide)
        slope = (wide * wide).mul_(3 * CUBIC).add_(LINEAR).mul_(wide)
        return torch.ops.aten.sigmoid_backward(slope, s).add_(s).mul_(dy).to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sigmoid(x: Tensor) -> Tensor:
    return (x * x).mul_(CUBIC).add_(LINEAR).mul_(x).sigmoid_()


def gelu(x: Tensor, approximate: str) -> Tensor:
    """F.gelu; approximate: "tanh" or "none"."""
    if approximate == "tanh" and not x.is_cuda:
        return _Gelu.apply(x)
    return F.gelu(x, approximate=approximate)
