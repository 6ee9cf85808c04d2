"""Matrix products with weights and look-ups in tables, with gradients added to their views.

    y = x W' + b        dx = dy W        dW = dy' x        db = sum of the rows of dy

With an axis, x is replicated over it and dx is summed over it (f, section 3 of the paper) while dW
is computed. Where a weight has a view of a gradient buffer, dW is added there, in fp32 or wider,
and autograd gets none: it is not copied, and of a tied weight's two uses there is no sum in a
narrow dtype. Without a view, dW goes through autograd as usual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import begin_all_reduce
from megatron.parallel.kernels import add_rows_, matmul
from megatron.parallel.mesh import Axis
from megatron.parallel.sharding import GradientView


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis | None,
        view: GradientView | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.view = axis, view
        ctx.bias_shape = None if bias is None else bias.shape
        return matmul(x, *_flat(weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = wait = None
        if ctx.needs_input_grad[0]:
            dx = matmul(dy, weight.flatten(0, -2).T)
            if ctx.axis is not None:
                wait = begin_all_reduce(dx, ctx.axis)
        if ctx.needs_input_grad[1]:
            if ctx.view is not None:
                ctx.view.add_matmul(dy, x)
            else:
                dw = matmul(dy.T, x.T).view(weight.shape)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0).view(ctx.bias_shape)
        if wait is not None:
            dx = wait()
        return dx, dw, db, None, None


def _flat(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.flatten(0, -2), None if bias is None else bias.flatten()


def require_dims(x: Tensor, dims: int) -> None:
    """Raises ValueError for a stream [b, s, h] where [n, h] is taken, or ids [b, s] for [n]."""
    if x.dim() != dims:
        wanted = ("", "[n]", "[n, h]")[dims]
        raise ValueError(
            f"parallel layers take {wanted} of n = b x s tokens, not {list(x.shape)}: "
            "x.flatten(0, 1) works"
        )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: Axis | None = None,
    view: GradientView | None = None,
) -> Tensor:
    """x [n, in], weight [..., out, in] and bias [..., out], their leading dims flattened, to
    [n, out].

    axis: over which x is replicated and its gradient summed. view: of the weight's gradient.
    """
    require_dims(x, 2)
    if torch.compiler.is_compiling():  # a compiled backward cannot write into buffers
        view = None
    if not torch.is_grad_enabled():
        return matmul(x, *_flat(weight, bias))
    return _Linear.apply(x, weight, bias, axis, view)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, view: GradientView | None) -> Tensor:
        ctx.save_for_backward(index)
        ctx.view, ctx.shape, ctx.dtype = view, weight.shape, weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (index,) = ctx.saved_tensors
        if ctx.view is not None:
            ctx.view.add_rows(index, dy)
            return None, None, None
        wide = torch.promote_types(ctx.dtype, torch.float32)
        return None, add_rows_(dy.new_zeros(ctx.shape, dtype=wide), index, dy).to(ctx.dtype), None


def look_up(index: Tensor, weight: Tensor, view: GradientView | None = None) -> Tensor:
    """The rows of `weight` [v, h] at `index` [n], [n, h]; view: of the weight's gradient.

    Gradients of a row are added up in fp32 or wider: in bf16, torch's embedding on a CPU keeps a
    quarter of the sum of 4096 equal ones.
    """
    require_dims(index, 1)
    rows: Tensor = _LookUp.apply(index, weight, view)
    return rows
