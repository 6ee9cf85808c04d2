"""The output layer and its loss in one: sum over tokens of factor x loss, and its gradient.

Logits z = x W' + b and their gradient exist for a chunk of the tokens at a time, so that memory
does not grow with b s v. For that the gradient is computed with the loss, for which each token's
factor has to be known ahead (paper, section 3, for what is communicated; cross_entropy.py for the
softmax):

    dz = factor (softmax(z) - [v = y])        dx = f(dz W)        dW = dz' x        db = sum of dz
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import begin_all_reduce
from megatron.parallel.cross_entropy import softmax
from megatron.parallel.mesh import Axis
from megatron.parallel.product import STEP, product

if TYPE_CHECKING:
    from megatron.parallel.gradients import Slot

CHUNK_BYTES = 2**27  # of a chunk's logits in fp32


def chunks(tokens: int, columns: int, wide: torch.dtype) -> Iterator[slice]:
    """Of nearly equal length: large ones are whole STEPs, but for the last. Each has at most
    CHUNK_BYTES of logits and those of a STEP."""
    at_once = max(1, CHUNK_BYTES // (columns * wide.itemsize))
    pieces = max(1, -(-tokens // at_once))
    step = STEP if tokens >= STEP * STEP * pieces else 1
    bounds = [tokens * number // pieces // step * step for number in range(pieces)]
    yield from map(slice, bounds, [*bounds[1:], tokens])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factors: Tensor,
        axis: Axis,
        vocab_size: int,
        slot: Slot | None,
    ) -> Tensor:
        wide = factors.dtype
        total, dx, waits = factors.new_zeros(()), torch.empty_like(x), []
        dw = None if slot is not None else torch.zeros_like(weight, dtype=wide)
        db = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for rows in chunks(len(x), len(weight), wide):
            parts = softmax(product(x[rows], weight, bias), labels[rows], axis, vocab_size)
            total += (parts.losses * factors[rows]).sum()
            dz = parts.gradient(factors[rows]).to(x.dtype)
            del parts  # or beside a narrow dz the wide one would be there during its products
            dx[rows] = product(dz, weight.T)
            waits.append(begin_all_reduce(dx[rows], axis))
            if slot is not None:
                slot.add_product(dz, x[rows])
            if dw is not None:
                dw += product(dz.T, x[rows].T)
            if db is not None:
                db += dz.sum(0, dtype=wide)
            del dz  # or the logits of two chunks would be there at once
        for wait in waits:
            wait()
        ctx.save_for_backward(dx, dw, db)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = ctx.saved_tensors
        if dw is None:  # its gradient is in the slot, and cannot be multiplied any more
            torch._assert_async(d_total == 1)
        dw, db = (each if each is None else (each * d_total).to(ctx.dtype) for each in (dw, db))
        return (dx * d_total).to(dx.dtype), dw, db, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor,
    axis: Axis,
    vocab_size: int,
    slot: Slot | None = None,
) -> Tensor:
    """The sum over tokens of factor x loss: a scalar in fp32, or x's wider dtype.

    x [n, h], replicated over `axis`; weight [padded v / t, h] and bias [padded v / t], this rank's;
    labels [n] int64 and factors [n], the same on every rank. slot: of the weight; the gradient is
    added there at once, so the result has to be differentiated as it is, not times something.
    """
    factors = factors.to(torch.promote_types(x.dtype, torch.float32))
    if torch.is_grad_enabled():
        arguments = (x, weight, bias, labels, factors, axis, vocab_size, slot)
        return _LinearCrossEntropy.apply(*arguments)
    total = factors.new_zeros(())
    for rows in chunks(len(x), len(weight), factors.dtype):
        losses = softmax(product(x[rows], weight, bias), labels[rows], axis, vocab_size).losses
        total += (losses * factors[rows]).sum()
    return total
