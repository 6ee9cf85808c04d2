"""Cross-entropy of logits that stay cut along the vocabulary (paper, section 3).

With z the logits of one token, m their maximum and y its label,

    loss = log(sum_v exp(z_v - m)) - (z_y - m)
    d loss / d z_v = softmax_v - [v = y]

Each rank holds v/t columns. What is communicated is [n] for m and [2, n] for the sum of
exponentials and the label's logit together: of size b x s, never b x s x v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis


def _find(labels: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of each label, or 0, and whether this rank holds it), both [n]."""
    index = labels - start
    is_here = (index >= 0) & (index < columns)
    return index.where(is_here, 0), is_here


def _own_columns(logits: Tensor, axis: Axis, vocab_size: int) -> tuple[int, int]:
    """(first token of this rank, its tokens); the columns of `logits` past these are padding."""
    start = axis.rank * logits.shape[1]
    return start, min(max(vocab_size - start, 0), logits.shape[1])


@dataclass(frozen=True)
class Softmax:
    """Of the logits of n tokens: this rank's exponentials, and what holds over all ranks."""

    exponentials: Tensor  # [n, v/t]
    total: Tensor  # [n], their sum
    picked: Tensor  # [n], the label's logit less the largest
    index: Tensor  # [n], the label's column, or 0
    is_here: Tensor  # [n], whether this rank holds it

    @property
    def losses(self) -> Tensor:
        return self.total.log() - self.picked

    def gradient(self, d_loss: Tensor) -> Tensor:
        """That of the logits, [n, v/t], in the memory of the exponentials. d_loss: [n]."""
        gradient = self.exponentials.mul_((d_loss / self.total)[:, None])
        rows = torch.arange(len(self.index), device=self.index.device)
        gradient[rows, self.index] -= d_loss * self.is_here
        return gradient


def softmax(logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Softmax:
    """Arguments as of `vocab_parallel_cross_entropy`; logits in fp32 or wider are overwritten."""
    start, columns = _own_columns(logits, axis, vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)

    maximum = logits.new_full((logits.shape[0],), -torch.inf, dtype=wide)
    if columns:
        maximum = logits[:, :columns].amax(dim=1).to(wide)
    all_reduce(maximum, axis, ReduceOp.MAX)

    exponentials = logits.to(wide)  # no copy where they are wide enough
    exponentials[:, columns:] = 0
    real = exponentials[:, :columns]
    real.sub_(maximum[:, None])
    index, is_here = _find(labels, start, columns)
    rows = torch.arange(len(labels), device=labels.device)
    picked = exponentials[rows, index] * is_here
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
    they are the largest tensor of a step: read them before, and run backward once only.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, axis, vocab_size)


def most_probable(logits: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """The token of the largest logit, the lowest of those that share it: int64 [n].

    vocab_size, which is no token, where a logit is NaN, on whichever rank.
    logits: [n, padded v / t], this rank's columns, of which the padded ones do not count.
    """
    start, columns = _own_columns(logits, axis, vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    best = logits.new_full((logits.shape[0],), -torch.inf, dtype=wide)
    place = torch.zeros_like(best, dtype=torch.int64)
    if columns:
        values, place = logits[:, :columns].max(dim=1)
        best = values.to(wide)
    own = best
    # Above all: which of a number and NaN is the larger depends on the backend.
    best = all_reduce(best.where(~best.isnan(), torch.inf), axis, ReduceOp.MAX)
    candidate = (place + start).where(own == best, vocab_size)
    return all_reduce(candidate, axis, ReduceOp.MIN)
