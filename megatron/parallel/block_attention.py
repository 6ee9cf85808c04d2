"""Attention in blocks of queries: with dropout by coordinates, and where it is faster on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.dropout import multiply

BLOCK = 128  # queries
SHORT = 512  # tokens up to which blocks are faster on a CPU


def widen(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _BlockAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(d)) v of q [n, s, d], k and v [n/r, m, d], n = b x a, and bias None or
    [b or 1, 1, s, m]. r neighbours of q share one of k and v: to these they are one of r s queries.

    A block of queries sees the keys up to its own last one, so that up to half of a causal matmul
    is not computed. The probabilities are kept for the backward: at 256 tokens a sixth of what a
    layer keeps in all, at 1024 a third. With P the probabilities, D the factors of dropout, which
    are computed again from the keys [n, s] of the queries, and dO the gradient of the result:

        dV = (P D)' dO     dP = (dO V') D     dS = P (dP - rowsum(dP P))     dQ = dS K    dK = dS' Q
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        is_causal: bool,
        dropout: float,
        keys: Tensor | None,
    ) -> Tensor:
        scale = q.shape[2] ** -0.5
        out, probabilities = [], []
        # Scores stay wide until they are probabilities: in bf16 one of 100 would be wrong by 0.25.
        wide_q, wide_k = widen(q) * scale, widen(k)
        for rows, columns in _blocks(q.shape[1], k.shape[1], is_causal):
            scores = _folded(wide_q[:, rows], k) @ wide_k[:, columns].mT
            scores = scores.view(len(q), -1, scores.shape[2])
            if bias is not None:
                scores.view(len(bias), -1, *scores.shape[1:]).add_(bias[:, :, rows, columns])
            if is_causal:
                size = scores.shape[1]
                scores[:, :, rows].add_(scores.new_full((size, size), -torch.inf).triu_(1))
            p = F.softmax(scores, dim=-1).to(q.dtype)
            probabilities.append(p)
            if keys is not None:
                (p,) = _drop(keys[:, rows], dropout, p)
            # Into a slice of a tensor torch would multiply one sequence and head after another.
            out.append((_folded(p, k) @ v[:, columns]).view(len(q), -1, v.shape[2]))
        ctx.save_for_backward(q, k, v, keys, *probabilities)
        ctx.is_causal, ctx.dropout, ctx.scale = is_causal, dropout, scale
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, *probabilities = ctx.saved_tensors
        # Sums over blocks are kept wide too.
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        dq = []
        blocks = _blocks(q.shape[1], k.shape[1], ctx.is_causal)
        for p, (rows, columns) in zip(probabilities, blocks, strict=True):
            used, own = p, _folded(d_out[:, rows], k)
            dp = (own @ v[:, columns].mT).view(p.shape)
            if keys is not None:
                used, dp = _drop(keys[:, rows], ctx.dropout, p, dp)
            dv[:, columns] += _folded(used, k).mT @ own
            # Autograd's own backward of softmax; torch (2.13) has no public name for it.
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(ctx.scale)
            ds = _folded(ds, k)
            dq.append((ds @ k[:, columns]).view(len(q), -1, q.shape[2]))
            dk[:, columns] += ds.mT @ _folded(q[:, rows], k)
        return torch.cat(dq, dim=1), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """x [n, rows, any] as [n/r, r x rows, any], n/r that of k: those that share a head, one after
    another. Copies nothing for r = 1."""
    return x.reshape(len(k), -1, x.shape[2])


def _drop(keys: Tensor, p: float, *blocks: Tensor) -> list[Tensor]:
    """Blocks [n, rows, columns] after dropout, which begin at the first column."""
    dropped = multiply(keys.flatten(), p, *(each.flatten(0, 1) for each in blocks))
    return [each.view(blocks[0].shape) for each in dropped]


def _blocks(queries: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """(queries of a block, keys that some of them see)."""
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield slice(start, stop), slice(0, stop if is_causal else keys)


def pays_in_blocks(q: Tensor, is_causal: bool) -> bool:
    """Whether training takes less time than in torch's kernel for CPUs, and keeps not much more."""
    is_training = torch.is_grad_enabled() and q.requires_grad
    return is_training and q.shape[2] <= SHORT and (is_causal or q.itemsize < 4)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float = 0.0,
    keys: Tensor | None = None,
) -> Tensor:
    """As kernels.attention; the result of a query that may look nowhere is meaningless, but finite.

    dropout: of the probabilities, by coordinates. keys: int64 [b, a, s], see `head_keys`.
    """
    bias = None
    if mask is not None:
        # Finite, so that the rows of a sequence of padding alone are no NaN.
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(
            ~mask, torch.finfo(torch.float32).min
        )
        bias = bias.expand(-1, -1, q.shape[2], -1)
    flat = (each.flatten(0, 1) for each in (q, k, v))
    keys = None if keys is None else keys.flatten(0, 1)
    out: Tensor = _BlockAttention.apply(*flat, bias, is_causal, dropout, keys)
    return out.view(*q.shape[:3], v.shape[3])
