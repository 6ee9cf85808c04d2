"""Products with weights and look-ups in tables, whose gradients go right into their slots.

    y = x W' + b        dx = dy W        dW = dy' x        db = sum of the rows of dy

With an axis, x is replicated over it and dx is summed (f, section 3 of the paper), which goes on
while dW is computed. Where a weight has a slot of a gradient buffer, dW is added there, in fp32 or
wider, and autograd gets none: there is no copy of it, and of two uses no sum in a narrow dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import begin_all_reduce
from megatron.parallel.mesh import Axis
from megatron.parallel.product import product

if TYPE_CHECKING:
    from megatron.parallel.gradients import Slot


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis | None,
        slot: Slot | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.slot = axis, slot
        ctx.bias_shape = None if bias is None else bias.shape
        return product(x, *_flat(weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = wait = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight.flatten(0, -2).T)
            if ctx.axis is not None:
                wait = begin_all_reduce(dx, ctx.axis)
        if ctx.needs_input_grad[1]:
            if ctx.slot is not None:
                ctx.slot.add_product(dy, x)
            else:
                dw = product(dy.T, x.T).view(weight.shape)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0).view(ctx.bias_shape)
        if wait is not None:
            dx = wait()
        return dx, dw, db, None, None


def _flat(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.flatten(0, -2), None if bias is None else bias.flatten()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: Axis | None = None,
    slot: Slot | None = None,
) -> Tensor:
    """x [n, in], weight [..., out, in] and bias [..., out], their leading dims flattened, to
    [n, out].

    axis: over which x is replicated and its gradient summed. slot: of the weight.
    """
    if torch.compiler.is_compiling():  # which writes into no buffer
        slot = None
    if not torch.is_grad_enabled():
        return product(x, *_flat(weight, bias))
    return _Linear.apply(x, weight, bias, axis, slot)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, slot: Slot | None) -> Tensor:
        ctx.save_for_backward(index)
        ctx.slot, ctx.shape, ctx.dtype = slot, weight.shape, weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (index,) = ctx.saved_tensors
        if ctx.slot is not None:
            ctx.slot.add_rows(index, dy)
            return None, None, None
        wide = torch.promote_types(ctx.dtype, torch.float32)
        return None, add_rows_(dy.new_zeros(ctx.shape, dtype=wide), index, dy).to(ctx.dtype), None


def look_up(index: Tensor, weight: Tensor, slot: Slot | None = None) -> Tensor:
    """The rows of `weight` [v, h] at `index` [n], [n, h]; slot: of the weight.

    torch would add up the gradients of a row in the dtype of the table: of 4096 equal tokens in
    bf16 the CPU keeps a quarter.
    """
    rows: Tensor = _LookUp.apply(index, weight, slot)
    return rows


def add_rows_(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows [n, h] to those of `table` at `index` [n], in an order that is always the same."""
    rows = rows.to(table.dtype)
    # Of torch's two ways each adds in any order on one kind of device.
    if table.is_cuda:
        return table.index_put_((index,), rows, accumulate=True)
    return table.index_add_(0, index, rows)
