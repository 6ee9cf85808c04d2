"""Attention in blocks of queries, for the CPU: softmax(q k' / sqrt(d)) v.

A block of queries sees the keys up to its own last one, so that up to half of a causal product is
not computed. The probabilities are kept for the backward: at 256 tokens a sixth of what a layer
keeps in all, at 1024 a third. With P the probabilities, D the keep-mask of dropout over (1 - p),
and dO the gradient of the result:

    dV = (P D)' dO     dP = (dO V') D     dS = P (dP - rowsum(dP P))     dQ = dS K     dK = dS' Q
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.cpu.fast_dropout import draw_kept, drop

BLOCK = 128  # queries
SHORT = 512  # tokens up to which blocks are faster without dropout too


class _BlockAttention(torch.autograd.Function):
    """On q, k, v [n, s, d] of n sequences and heads; bias [b or 1, 1, s, s] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        is_causal: bool,
        dropout: float,
    ) -> Tensor:
        scale = q.shape[2] ** -0.5
        out, probabilities, kept = [], [], []
        # Scores stay wide until they are probabilities: in bf16 one of 100 would be wrong by 0.25.
        wide = torch.promote_types(q.dtype, torch.float32)
        wide_q, wide_k = q.to(wide) * scale, k.to(wide)
        for rows, columns in _blocks(q.shape[1], is_causal):
            scores = wide_q[:, rows] @ wide_k[:, columns].mT
            if bias is not None:
                scores.view(len(bias), -1, *scores.shape[1:]).add_(bias[:, :, rows, columns])
            if is_causal:
                scores[:, :, rows].add_(_later(scores.shape[1], scores))
            p = F.softmax(scores, dim=-1).to(q.dtype)
            probabilities.append(p)
            if dropout:
                kept.append(draw_kept(p.shape, dropout))
                p = drop(p, kept[-1], dropout)
            # Into a slice of a tensor torch would multiply one sequence and head after another.
            out.append(p @ v[:, columns])
        ctx.save_for_backward(q, k, v, *probabilities, *kept)
        ctx.is_causal, ctx.dropout, ctx.scale = is_causal, dropout, scale
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        # Sums over blocks are kept wide too.
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        dq = []
        blocks = list(_blocks(q.shape[1], ctx.is_causal))
        for number, (rows, columns) in enumerate(blocks):
            p = used = saved[number]
            own = d_out[:, rows]
            dp = own @ v[:, columns].mT
            if ctx.dropout:
                kept = saved[len(blocks) + number]
                used, dp = (drop(each, kept, ctx.dropout) for each in (p, dp))
            dv[:, columns] += used.mT @ own
            # Autograd's own backward of softmax; torch (2.13) has no public name for it.
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(ctx.scale)
            dq.append(ds @ k[:, columns])
            dk[:, columns] += ds.mT @ q[:, rows]
        return torch.cat(dq, dim=1), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _blocks(length: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """(queries of a block, keys that some of them see)."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(0, stop if is_causal else length)


def _later(size: int, like: Tensor) -> Tensor:
    """Minus infinity above the diagonal, [size, size]."""
    return like.new_full((size, size), -torch.inf).triu_(1)


def pays_in_blocks(q: Tensor, is_causal: bool, dropout: float) -> bool:
    """Whether training takes less time than in torch's kernel and keeps not much more memory.

    With dropout torch has no kernel of its own for the CPU and keeps as much.
    """
    if not (torch.is_grad_enabled() and q.requires_grad):
        return False
    is_narrow = q.dtype in (torch.bfloat16, torch.float16)
    return dropout > 0 or (q.shape[2] <= SHORT and (is_causal or is_narrow))


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """As kernels.attention; the result of a query that may look nowhere is meaningless, but finite.

    dropout: of the probabilities, drawn from the default generator.
    """
    bias = None
    if mask is not None:
        # Finite, so that the rows of a sequence of padding alone are no NaN.
        bias = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
        bias = bias.expand(-1, -1, q.shape[2], -1)
    flat = (each.flatten(0, 1) for each in (q, k, v))
    return _BlockAttention.apply(*flat, bias, is_causal, dropout).view(v.shape)
