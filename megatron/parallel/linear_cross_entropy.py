"""The output layer and its loss in one: sum over tokens of scale x loss, and its gradient.

Logits z = x W' + b and their gradient exist for a chunk of the tokens at a time, so that memory
does not grow with b s v. For that the gradient is computed with the loss, for which each token's
scale has to be known ahead (paper, section 3, for what is communicated; cross_entropy.py for the
softmax):

    dz = scale (softmax(z) - [v = y])        dx = f(dz W)        dW = dz' x        db = sum of dz
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import begin_all_reduce
from megatron.parallel.cross_entropy import softmax
from megatron.parallel.kernels import matmul, padded_rows
from megatron.parallel.linear import require_dims
from megatron.parallel.mesh import Axis
from megatron.parallel.sharding import GradientView

CHUNK_BYTES = 2**27  # of a chunk's logits in fp32


def chunks(tokens: int, columns: int, wide: torch.dtype) -> Iterator[slice]:
    """Of one length but for the last, each with at most about CHUNK_BYTES of logits."""
    at_once = max(1, CHUNK_BYTES // (columns * wide.itemsize))
    count = max(1, -(-tokens // at_once))
    length = padded_rows(max(1, -(-tokens // count)))
    for start in range(0, tokens, length):
        yield slice(start, min(start + length, tokens))


def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scales: Tensor,
    axis: Axis,
    vocab_size: int,
    view: GradientView | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(total, dx, dw or None where it is added to `view`, db), the last two in the scales' dtype;
    arguments as of linear_cross_entropy."""
    wide = scales.dtype
    total, dx, waits = scales.new_zeros(()), torch.empty_like(x), []
    dw = None if view is not None else torch.zeros_like(weight, dtype=wide)
    db = None if bias is None else torch.zeros_like(bias, dtype=wide)
    for rows in chunks(len(x), len(weight), wide):
        parts = softmax(matmul(x[rows], weight, bias), labels[rows], axis, vocab_size)
        total += (parts.losses * scales[rows]).sum()
        dz = parts.gradient(scales[rows]).to(x.dtype)
        del parts  # or beside a narrow dz the wide one would be there during its products
        dx[rows] = matmul(dz, weight.T)
        waits.append(begin_all_reduce(dx[rows], axis))
        if view is not None:
            view.add_matmul(dz, x[rows])
        if dw is not None:
            dw += matmul(dz.T, x[rows].T)
        if db is not None:
            db += dz.sum(0, dtype=wide)
        del dz  # or the logits of two chunks would be there at once
    for wait in waits:
        wait()
    return total, dx, dw, db


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, weight, bias, labels, scales, axis, vocab_size, view = arguments
        total, dx, dw, db = _loss_and_gradients(*arguments)
        ctx.dtype, ctx.others, ctx.is_in_view = weight.dtype, (axis, vocab_size, view), dw is None
        inputs = (x, weight, bias, labels, scales) if ctx.is_in_view else ()
        ctx.save_for_backward(dx, dw, db, *inputs)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, *inputs = ctx.saved_tensors
        # The view already holds dW for a d_total of 1, which is what training has; for another one
        # the difference is computed in a second pass over the logits. On a GPU the comparison waits
        # for the forward.
        if ctx.is_in_view and not d_total.is_meta and d_total != 1:
            x, weight, bias, labels, scales = inputs
            scales = scales * (d_total - 1)
            _loss_and_gradients(x, weight, bias, labels, scales, *ctx.others)
        dw, db = (each if each is None else (each * d_total).to(ctx.dtype) for each in (dw, db))
        return (dx * d_total).to(dx.dtype), dw, db, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scales: Tensor,
    axis: Axis,
    vocab_size: int,
    view: GradientView | None = None,
) -> Tensor:
    """The sum over tokens of scale x loss: a scalar in fp32, or x's wider dtype.

    x [n, h], replicated over `axis`; weight [padded v / t, h] and bias [padded v / t], this rank's;
    labels [n] int64 and scales [n], the same on every rank. view: of the weight's gradient, which
    is added there in the forward: run backward once for each forward. A result that is multiplied
    before its backward costs a second pass; put constants into the scales.
    """
    require_dims(x, 2)
    scales = scales.to(torch.promote_types(x.dtype, torch.float32))
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(x, weight, bias, labels, scales, axis, vocab_size, view)
    total = scales.new_zeros(())
    for rows in chunks(len(x), len(weight), scales.dtype):
        losses = softmax(matmul(x[rows], weight, bias), labels[rows], axis, vocab_size).losses
        total += (losses * scales[rows]).sum()
    return total
