"""Softmax of logits by two compiled functions for GPUs, one kernel each. No tensor of their size is
kept in fp32. cross_entropy.py has the formulas and an in-place softmax for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import all_reduce, own_columns
from megatron.parallel.mesh import Axis


@dataclass(frozen=True)
class FusedSoftmax:
    """See cross_entropy.Softmax. logits: [n, v/t]; after the first `columns` comes padding."""

    logits: Tensor
    columns: int
    maximum: Tensor  # [n], over all ranks
    total: Tensor  # [n]
    picked: Tensor  # [n]
    index: Tensor  # [n], the label's column, or -1 where another rank has it

    @property
    def losses(self) -> Tensor:
        return self.total.log() - self.picked

    def gradient(self, d_loss: Tensor) -> Tensor:
        """Gradient of the logits, in their dtype. d_loss: [n]."""
        factor, rest = d_loss / self.total, (self.index, d_loss, self.columns)
        return _compiled(_gradient)(self.logits, self.maximum, factor, *rest)


def fused_softmax(logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> FusedSoftmax:
    """Arguments: see cross_entropy.vocab_parallel_cross_entropy; logits are not overwritten."""
    start, columns = own_columns(logits, axis, vocab_size)
    own, total, picked, index = _compiled(_statistics)(logits, labels, start, columns)
    if axis.size == 1:
        return FusedSoftmax(logits, columns, own, total, picked, index)
    maximum = all_reduce(own.clone(), axis, ReduceOp.MAX)
    shift = (own - maximum).where(total > 0, 0)  # 0 on a rank without a finite logit
    picked = (picked + shift).where(index >= 0, 0)
    total, picked = all_reduce(torch.stack([total * shift.exp(), picked]), axis)
    return FusedSoftmax(logits, columns, maximum, total, picked, index)


def few_sizes(length: int) -> int:
    """`length` rounded up, from 64 on by at most an eighth: functions are compiled per length."""
    step = max(8, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _statistics(
    logits: Tensor, labels: Tensor, start: int, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(this rank's maximum of each row; relative to it, the sum of exponentials and the label's
    logit, 0 on other ranks; the label's column, -1 on other ranks)."""
    real = logits[:, :columns].to(torch.promote_types(logits.dtype, torch.float32))
    index = labels - start
    index = index.where((index >= 0) & (index < columns), -1)
    if not columns:
        nothing = real.sum(dim=1)
        return nothing - torch.inf, nothing, nothing, index
    maximum = real.amax(dim=1)
    finite = maximum.where(maximum > -torch.inf, 0)
    total = (real - finite[:, None]).exp().sum(dim=1)
    picked = real.gather(1, index.clamp(min=0)[:, None])[:, 0] - finite
    return maximum, total, picked.where(index >= 0, 0), index


def _gradient(
    logits: Tensor, maximum: Tensor, factor: Tensor, index: Tensor, d_loss: Tensor, columns: int
) -> Tensor:
    """factor x exp(logits - maximum), minus d_loss at index; 0 for padding."""
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits.to(maximum.dtype) - maximum[:, None]).exp() * factor[:, None]
    gradient = gradient - d_loss[:, None].where(column == index[:, None], 0)
    return gradient.where(column < columns, 0).to(logits.dtype)
