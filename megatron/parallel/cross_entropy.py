"""Cross-entropy of logits that stay cut along the vocabulary (paper, section 3).

With z the logits of one token, m their maximum and y its label,

    loss = log(sum_v exp(z_v - m)) - (z_y - m)
    d loss / d z_v = softmax_v - [v = y]

Each rank holds v/t columns. Ranks exchange [n] for m, and [2, n] for the sum of exponentials and
the label's logit together: the size is b x s, never b x s x v.

`linear_cross_entropy` computes the output layer and its loss together. Logits z = x W' + b and
their gradient exist for one chunk of tokens at a time, so memory does not grow with b s v. The
gradient is computed with the loss, so each token's scale has to be known in advance:

    dz = scale (softmax(z) - [v = y])        dx = sum over ranks of dz W
    dW = dz' x                               db = sum of dz
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from megatron.parallel.bucket import GradientView
from megatron.parallel.collectives import UNCUT, Cut, all_reduce, own_columns
from megatron.parallel.fused_softmax import few_sizes, fused_softmax
from megatron.parallel.kernels import add_matmul_, is_on_cpu, matmul, padded_rows
from megatron.parallel.mesh import Axis


@dataclass(frozen=True)
class Softmax:
    """This rank's exponentials of the logits of n tokens, and sums over all ranks."""

    exponentials: Tensor  # [n, v/t]
    total: Tensor  # [n], their sum over all ranks
    picked: Tensor  # [n], the label's logit minus the largest logit
    index: Tensor  # [n], the label's column, or 0
    is_here: Tensor  # [n], whether this rank holds the label's column

    @property
    def losses(self) -> Tensor:
        return self.total.log() - self.picked

    def gradient(self, d_loss: Tensor) -> Tensor:
        """Gradient of the logits, [n, v/t], in the memory of the exponentials. d_loss: [n]."""
        gradient = self.exponentials.mul_((d_loss / self.total)[:, None])
        rows = torch.arange(len(self.index), device=self.index.device)
        gradient[rows, self.index] -= d_loss * self.is_here
        return gradient


def softmax(logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Softmax:
    """Arguments: see `vocab_parallel_cross_entropy`; logits in fp32 or wider are overwritten."""
    start, columns = own_columns(logits, axis, vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)

    maximum = logits.new_full((logits.shape[0],), -torch.inf, dtype=wide)
    if columns:
        maximum = logits[:, :columns].amax(dim=1).to(wide)
    all_reduce(maximum, axis, ReduceOp.MAX)

    exponentials = logits.to(wide)  # no copy if they are in fp32 or wider
    exponentials[:, columns:] = 0
    real = exponentials[:, :columns]
    real.sub_(maximum[:, None])
    index = labels - start
    is_here = (index >= 0) & (index < columns)
    index = index.where(is_here, 0)
    rows = torch.arange(len(labels), device=labels.device)
    picked = exponentials[rows, index].where(is_here, 0)  # on other ranks it may be infinite
    real.exp_()
    total, picked = all_reduce(torch.stack([real.sum(dim=1), picked]), axis)
    return Softmax(exponentials, total, picked, index, is_here)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Tensor:
        parts = softmax(logits, labels, axis, vocab_size)
        ctx.save_for_backward(*vars(parts).values())
        ctx.dtype = logits.dtype
        return parts.losses

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None, None]:
        return Softmax(*ctx.saved_tensors).gradient(d_loss).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int
) -> Tensor:
    """Loss of each token, [n], in fp32 or the logits' wider dtype.

    logits: [n, padded v / t], this rank's columns; padded columns are left out of the sum.
    labels: [n] int64 in [0, vocab_size), the same on every rank of `axis`.
    Logits in fp32 or wider are overwritten, and the gradient is computed in the same memory, since
    they are the largest tensor of a step: read them before that, and run backward only once.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, axis, vocab_size)


# Bytes of a chunk's logits in fp32. 4,096 tokens of h = 768 and v = 50,304 take 555 MiB, not 1,766,
# and 1.05 to 1.13 x the time; to compute each chunk again in the backward takes 1.6 to 1.7 x.
CHUNK_BYTES = 2**27
GPU_CHUNKS = 8  # times CHUNK_BYTES: on an H200, 128 MiB take 1.5 x the time of all logits at once


def chunks(tokens: int, most: int, rounded: Callable[[int], int]) -> Iterator[slice]:
    """Slices of equal length, about `most` tokens or fewer; the last may end after the last token.
    rounded: maps a length to the one that is used."""
    count = max(1, -(-tokens // max(1, most)))
    length = rounded(max(1, -(-tokens // count)))
    for start in range(0, tokens, length):
        yield slice(start, start + length)


def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scales: Tensor,
    *,
    vocab_size: int,
    view: GradientView | None,
    x_cut: Cut,
    weight_cut: Cut,
    is_fused: bool,
    has_gradients: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(total, dx, dw or None if it is added to `view`, db); dw and db are in the scales' dtype.
    Arguments: see linear_cross_entropy. has_gradients: if False, only the total is computed."""
    weight, is_gathered = weight_cut.start_whole(weight)(), weight_cut.over.size > 1
    total, dx, dw, db = scales.new_zeros(()), None, None, None
    if has_gradients:  # dw is None if chunks add to the view; of a gathered weight it is summed
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=scales.dtype) if view is None or is_gathered else None
        db = None if bias is None else torch.zeros_like(bias, dtype=scales.dtype)
    finish_previous: Callable[[], object] | None = None  # writes dx of the previous chunk

    # If the stream is cut, a chunk has these rows of each rank.
    ranks = x_cut.over.size if x_cut.dim == 0 else 1
    labels, scales = labels.view(ranks, -1), scales.view(ranks, -1)
    chunk_bytes = CHUNK_BYTES * (1 if is_on_cpu(x) else GPU_CHUNKS)
    most = chunk_bytes // (ranks * len(weight) * scales.itemsize)
    for rows in chunks(len(x), most, few_sizes if is_fused else padded_rows):
        part, part_labels, part_scales = x[rows], labels[:, rows], scales[:, rows]
        missing = rows.stop - rows.start - len(part)
        if is_fused and missing:  # zeros, as functions are compiled for each length
            part, part_labels = F.pad(part, (0, 0, 0, missing)), F.pad(part_labels, (0, missing))
            part_scales = F.pad(part_scales, (0, missing))
        part = x_cut.start_whole(part)()
        part_labels, part_scales = part_labels.flatten(), part_scales.flatten()
        of_logits = fused_softmax if is_fused else softmax
        parts = of_logits(matmul(part, weight, bias), part_labels, x_cut.terms, vocab_size)
        total += (parts.losses * part_scales).sum()
        if dx is None:
            continue
        dz = parts.gradient(part_scales).to(x.dtype)
        del parts  # else dz in fp32 would stay in memory during the matmuls of dz in x's dtype
        # The previous chunk's sum of dx has run beside this softmax; this chunk's starts below.
        if finish_previous is not None:
            finish_previous()
        finish_previous = partial(_finish, dx[rows], x_cut.start_part(matmul(dz, weight.T)))
        if dw is not None:
            add_matmul_(dw, dz, part, accumulate=True)
        elif view is not None:
            view.add_matmul(dz, part)  # already here, in the forward
        if db is not None:
            db += dz.sum(0, dtype=scales.dtype)
        del dz  # else the logits of two chunks would be in memory at once
    if finish_previous is not None:
        finish_previous()
    if dw is not None and is_gathered:
        dw = weight_cut.start_part(dw)()
        if view is not None:
            view.add(dw)
            dw = None
    return total, dx, dw, db


def _finish(dx: Tensor, wait: Callable[[], Tensor]) -> None:
    dx.copy_(wait()[: len(dx)])


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def one_like(d_loss: Tensor) -> Tensor:
    """A hook for the scalar loss, whose gradient is 1. linear_cross_entropy recognises this one by
    its address: to compare values, the host would wait for a GPU's forward."""
    return _one(d_loss.dtype, d_loss.device)


def _is_one(d_total: Tensor) -> bool:
    if d_total.is_meta:
        return True
    one = one_like(d_total).untyped_storage()
    return d_total.untyped_storage().data_ptr() == one.data_ptr() or bool(d_total == 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: Any) -> Tensor:
        total, dx, dw, db = compute(*inputs)
        ctx.compute, ctx.dtype, ctx.is_in_view = compute, inputs[1].dtype, dw is None
        ctx.save_for_backward(dx, dw, db, *(inputs if ctx.is_in_view else ()))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, *inputs = ctx.saved_tensors
        # The view already holds dW for a d_total of 1; for another d_total the difference is
        # computed in a second pass over the logits.
        if ctx.is_in_view and not _is_one(d_total):
            *inputs, scales = inputs
            ctx.compute(*inputs, scales * (d_total - 1))
        dw, db = (each if each is None else (each * d_total).to(ctx.dtype) for each in (dw, db))
        return None, (dx * d_total).to(dx.dtype), dw, db, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scales: Tensor,
    vocab_size: int,
    view: GradientView | None = None,
    x_cut: Cut = UNCUT,
    weight_cut: Cut = UNCUT,
    *,
    is_fused: bool = False,
) -> Tensor:
    """The sum over tokens of scale x loss: a scalar in fp32, or x's wider dtype.

    x: [n, h], gathered one chunk at a time; x_cut.terms cuts the vocabulary. weight, bias: [padded
    v / t, h] and [padded v / t] of this rank; a weight that is cut further is gathered whole.
    labels, scales: [n] int64 and [n], the same on every rank of x_cut.terms, and of all tokens also
    where x is cut by rows. view: view of the weight's gradient; the forward adds the gradient to it
    if it is wide enough to add up chunks, so run backward once for each forward. Multiplying the
    result before its backward costs a second pass; put constants into the scales. is_fused: use the
    softmax of fused_softmax.py, for GPUs.
    """
    inputs = x, weight, bias, labels, scales.to(torch.promote_types(x.dtype, torch.float32))
    compute = partial(
        _loss_and_gradients,
        vocab_size=vocab_size,
        view=view if view is None or view.is_fp32 else None,
        x_cut=x_cut,
        weight_cut=weight_cut,
        is_fused=is_fused,
    )
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(compute, *inputs)
    return compute(*inputs, has_gradients=False)[0]
