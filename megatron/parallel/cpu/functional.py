"""Layer norm, dropout and attention for CPUs: exact sums in bf16 and fp16, and faster draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NARROW = (torch.bfloat16, torch.float16)


def _widen(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _NarrowLayerNorm(torch.autograd.Function):
    """torch's own adds up the gradients of weight and bias in the dtype of x: over 2048 tokens in
    bf16 half of a bias's gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide = _widen(weight), _widen(bias)  # with these its mean and deviation are wide too
        y, mean, deviation = torch.native_layer_norm(x, weight.shape, *wide, epsilon)
        ctx.save_for_backward(x, mean, deviation, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, deviation, weight, bias = ctx.saved_tensors
        gradients = torch.ops.aten.native_layer_norm_backward(
            _widen(dy),
            _widen(x),
            weight.shape,
            mean,
            deviation,
            _widen(weight),
            _widen(bias),
            ctx.needs_input_grad[:3],
        )
        return *(each if each is None else each.to(x.dtype) for each in gradients), None


def narrow_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Layer norm of bf16 and fp16, with a backward in fp32."""
    return _NarrowLayerNorm.apply(x, weight, bias, epsilon)


STEPS = 2**16  # probabilities of dropout are multiples of 1 / STEPS


def _dropped_steps(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def draw_kept(shape: Sequence[int], p: float) -> Tensor:
    """Draw from the default generator what dropout of probability p keeps: bool of this shape.

    16 random bits an element are drawn four times as fast as torch draws.
    """
    count = prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    halves = words.view(torch.int16)[:count]  # from -STEPS / 2
    return (halves >= _dropped_steps(p) - STEPS // 2).view(shape)


def _drop(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """x where it is kept, scaled so that its expectation stays, and 0 elsewhere."""
    return (x * kept).mul_(STEPS / (STEPS - _dropped_steps(p)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = draw_kept(x.shape, p)
        ctx.save_for_backward(kept)
        ctx.p = p
        return _drop(x, kept, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _drop(dy, kept, ctx.p), None


def dropout(x: Tensor, p: float) -> Tensor:
    """F.dropout, with p rounded to a multiple of 1 / STEPS."""
    dropped: Tensor = _Dropout.apply(x, p)
    return dropped


BLOCK = 128  # queries
SHORT = 512  # tokens up to which blocks are faster without dropout too


class _BlockAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(d)) v of q, k, v [n, s, d], n = b x a; bias [b or 1, 1, s, s] or None.

    A block of queries sees the keys up to its own last one, so that up to half of a causal matmul
    is not computed. The probabilities are kept for the backward: at 256 tokens a sixth of what a
    layer keeps in all, at 1024 a third. With P the probabilities, D the keep-mask of dropout over
    (1 - p), and dO the gradient of the result:

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
    ) -> Tensor:
        scale = q.shape[2] ** -0.5
        out, probabilities, kept = [], [], []
        # Scores stay wide until they are probabilities: in bf16 one of 100 would be wrong by 0.25.
        wide_q, wide_k = _widen(q) * scale, _widen(k)
        for rows, columns in _blocks(q.shape[1], is_causal):
            scores = wide_q[:, rows] @ wide_k[:, columns].mT
            if bias is not None:
                scores.view(len(bias), -1, *scores.shape[1:]).add_(bias[:, :, rows, columns])
            if is_causal:
                size = scores.shape[1]
                scores[:, :, rows].add_(scores.new_full((size, size), -torch.inf).triu_(1))
            p = F.softmax(scores, dim=-1).to(q.dtype)
            probabilities.append(p)
            if dropout:
                kept.append(draw_kept(p.shape, dropout))
                p = _drop(p, kept[-1], dropout)
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
                used, dp = (_drop(each, kept, ctx.dropout) for each in (p, dp))
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


def pays_in_blocks(q: Tensor, is_causal: bool, dropout: float) -> bool:
    """Whether training takes less time than in torch's kernel and keeps not much more memory.

    With dropout torch has no kernel of its own for the CPU and keeps as much.
    """
    if not (torch.is_grad_enabled() and q.requires_grad):
        return False
    return dropout > 0 or (q.shape[2] <= SHORT and (is_causal or q.dtype in NARROW))


def block_attention(
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
