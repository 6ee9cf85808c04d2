"""Attention in blocks of queries, for dropout by coordinates and where it is faster on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.dropout import drop_elements

BLOCK = 128  # queries


def widen(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _BlockAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(d)) v, with q [b a, s, d], k and v [b g, m, d], and bias None or
    [b or 1, 1, s, m]. r = a/g adjacent heads of q share one of k and v, as one head of r s queries.

    With is_causal, a block of queries reads only the keys up to its last query, which skips up to
    half of the matmul. The probabilities before dropout are saved for the backward: in a causal
    layer of GPT-2 a sixth of what the layer saves at 256 tokens, a third at 1024. P are these
    probabilities, dO is the gradient of the result, and D are the factors of dropout, recomputed
    from keys [b a, s]:

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
        # Scores stay in fp32 or wider until softmax: in bf16 a score of 100 would be off by 0.25.
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
            # To write into a slice, torch would multiply one sequence and head at a time.
            out.append((_folded(p, k) @ v[:, columns]).view(len(q), -1, v.shape[2]))
        ctx.save_for_backward(q, k, v, keys, *probabilities)
        ctx.is_causal, ctx.dropout, ctx.scale = is_causal, dropout, scale
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, *probabilities = ctx.saved_tensors
        # Sums over blocks are kept in fp32 or wider, too.
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (torch.zeros_like(each, dtype=wide) for each in (k, v))
        dq = []
        blocks = _blocks(q.shape[1], k.shape[1], ctx.is_causal)
        for p, (rows, columns) in zip(probabilities, blocks, strict=True):
            dropped, d_out_rows = p, _folded(d_out[:, rows], k)
            dp = (d_out_rows @ v[:, columns].mT).view(p.shape)
            if keys is not None:
                dropped, dp = _drop(keys[:, rows], ctx.dropout, p, dp)
            dv[:, columns] += _folded(dropped, k).mT @ d_out_rows
            # The backward of softmax that autograd uses; torch (2.13) has no public name for it.
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(ctx.scale)
            ds = _folded(ds, k)
            dq.append((ds @ k[:, columns]).view(len(q), -1, q.shape[2]))
            dk[:, columns] += ds.mT @ _folded(q[:, rows], k)
        return torch.cat(dq, dim=1), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """Reshape x [b a, rows, any] to [b g, r x rows, any], with b g = len(k): concatenates the rows
    of heads that share a head of k. Copies nothing for r = 1."""
    return x.reshape(len(k), -1, x.shape[2])


def _drop(keys: Tensor, p: float, *blocks: Tensor) -> list[Tensor]:
    """Apply dropout to blocks [b a, rows, columns] that begin at the first column."""
    dropped = drop_elements(keys.flatten(), p, *(each.flatten(0, 1) for each in blocks))
    return [each.view(blocks[0].shape) for each in dropped]


def _blocks(queries: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield (queries of a block, keys that at least one of them sees)."""
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield slice(start, stop), slice(0, stop if is_causal else keys)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float = 0.0,
    keys: Tensor | None = None,
) -> Tensor:
    """See kernels.attention; a query that may attend to no key gets a finite, meaningless result.

    dropout: rate for the probabilities, by coordinates. keys: int64 [b, a, s], see `head_keys`.
    """
    bias = None
    if mask is not None:
        # Finite, so that rows of a sequence that is all padding are not NaN.
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(
            ~mask, torch.finfo(torch.float32).min
        )
        bias = bias.expand(-1, -1, q.shape[2], -1)
    flat = (each.flatten(0, 1) for each in (q, k, v))
    keys = None if keys is None else keys.flatten(0, 1)
    out = _BlockAttention.apply(*flat, bias, is_causal, dropout, keys)
    return out.view(*q.shape[:3], v.shape[3])
