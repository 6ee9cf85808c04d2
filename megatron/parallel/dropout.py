"""Dropout; on the CPU from 16 random bits each, drawn four times as fast as torch draws it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 2**16  # a probability is one of so many


def _dropped_steps(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def draw_kept(shape: Sequence[int], p: float) -> Tensor:
    """What dropout of probability p keeps, bool of this shape; from the CPU's default generator."""
    count = prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    halves = words.view(torch.int16)[:count]  # from -STEPS / 2
    return (halves >= _dropped_steps(p) - STEPS // 2).view(shape)


def drop(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """x where it is kept, made larger so that its expectation stays, and 0 elsewhere."""
    return (x * kept).mul_(STEPS / (STEPS - _dropped_steps(p)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = draw_kept(x.shape, p)
        ctx.save_for_backward(kept)
        ctx.p = p
        return drop(x, kept, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return drop(dy, kept, ctx.p), None


def dropout(x: Tensor, p: float) -> Tensor:
    """F.dropout, but on the CPU with p rounded to one of 65,536."""
    if x.is_cuda:
        return F.dropout(x, p)
    dropped: Tensor = _Dropout.apply(x, p)
    return dropped
