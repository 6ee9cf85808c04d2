"""Ring attention: ranks hold parts of a sample's tokens and pass their keys and values round
(Li et al., 2021, arXiv:2105.13120; in blocks Liu et al., 2023, arXiv:2310.01889).

A sample is cut into 2c equal chunks for c ranks. In zigzag order rank r holds the chunks r and
2c - 1 - r, so that all ranks have the same work under a causal mask. For c = 2, with # for scores
that count and \\ for those of a chunk with itself:

    keys of rank        0       1
    chunk               0  3    1  2
    rank 0  chunk 0     \\
            chunk 3     #  \\    #  #
    rank 1  chunk 1     #       \\
            chunk 2     #       #  \\

In step i this rank has the keys and values of rank r - i. It attends to them while they travel on
to rank r + 1, and merges the result into that of the steps before, by the log-sum-exps of both, in
fp32 or wider. The backward goes the same way round: the gradients of keys and values follow them
one step behind, each rank adds its term, and after c steps they are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import start_shift
from megatron.parallel.mesh import Axis
from megatron.parallel.ring_kernels import (
    Dropout,
    Mask,
    attend,
    attend_backward,
    bias_of,
    holds_scores,
)

ROWS = 256  # queries of a piece on the diagonal: a longer one computes more that its bias hides
SCORES = 2**23  # most elements of a piece's bias, or of its scores if the kernel holds them


class Visible(NamedTuple):
    """Keys that each query may look at; either may be None."""

    starts: Tensor | None = None
    """int64 [b, s/c]: position in the sample of the first key that each of this rank's queries may
    look at, which is where its document starts; implies causal."""
    lengths: Tensor | None = None
    """int64 [b]: keys at this position in the sample and later are padding."""


EVERYTHING = Visible()


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    is_causal: bool,
    visible: Visible = EVERYTHING,
    dropout: float = 0.0,
    keys: Tensor | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(d)) v over whole samples, for this rank's queries: [b, a, s/c, d].

    q [b, a, s/c, d], k and v [b, g, s/c, d]: of this rank's tokens in zigzag order. a/g adjacent
        heads of q share a head of k and v.
    axis: its c ranks hold the tokens of the same samples.
    visible: a query that may look nowhere gets 0, and its gradient is 0.
    dropout: rate for the probabilities, by coordinates: the same at any c. keys: int64
        [b, a, s/c], see `head_keys`.

    Saves q, k, v, the result and the log-sum-exps for the backward. Raises ValueError if shapes do
    not fit, or if several ranks have an odd number of tokens.
    """
    (b, a, length, d), (starts, lengths) = q.shape, visible
    if 0 in q.shape or a % k.shape[1] or {k.shape, v.shape} != {(b, k.shape[1], length, d)}:
        raise ValueError(
            f"q, k and v are {[*q.shape]}, {[*k.shape]} and {[*v.shape]}: they must be "
            "[b, a, n, d], [b, g, n, d] and [b, g, n, d], not empty, and g must divide a"
        )
    if axis.size > 1 and length % 2:
        raise ValueError(f"{length} tokens of a rank are not two equal chunks")
    expected = {"starts": (starts, (b, length)), "lengths": (lengths, (b,))}
    for name, (x, shape) in (expected | {"keys": (keys, (b, a, length))}).items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} are {[*x.shape]}, not {[*shape]}")
    if dropout and keys is None:
        raise ValueError("dropout by coordinates needs the keys of its rows")
    keys, is_causal = keys if dropout else None, is_causal or starts is not None
    return _RingAttention.apply(q, k, v, starts, lengths, keys, axis, is_causal, dropout)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        lengths: Tensor | None,
        keys: Tensor | None,
        axis: Axis,
        is_causal: bool,
        dropout: float,
    ) -> Tensor:
        blocks = _Blocks(axis, is_causal, dropout, starts, lengths, keys)
        local_q, kv = _strided(q), torch.stack([k, v])  # in one message
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(local_q, dtype=wide)
        lse = q.new_full(q.shape[:3], torch.finfo(wide).min, dtype=wide)
        for step in range(axis.size):
            wait = start_shift(kv, axis) if step + 1 < axis.size else None
            for rows, columns, mask in blocks.pieces(q, step):
                part_k, part_v = (each[:, :, columns] for each in kv)
                part, part_lse = attend(local_q[:, :, rows], part_k, part_v, mask)
                _merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)
            kv = kv if wait is None else wait()
        if lengths is not None:
            first = torch.zeros_like(lengths)[:, None] if starts is None else starts
            nowhere = (first >= lengths[:, None])[:, None]
            out.masked_fill_(nowhere[..., None], 0.0)
            # Its exponentials in the backward are then 0; beside the mask's own log-sum-exp, which
            # kernels round, they might be infinite.
            lse.masked_fill_(nowhere, 0.0)
        # A copy while compiling: else all gradients are 0 in fp32, see _Normalise in regions.py.
        out = out.to(q.dtype, copy=torch.compiler.is_compiling())
        ctx.save_for_backward(q, k, v, out, lse, starts, lengths, keys)
        ctx.axis, ctx.is_causal, ctx.dropout = axis, is_causal, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        axis = ctx.axis
        blocks = _Blocks(axis, ctx.is_causal, ctx.dropout, *masks)
        local_q, d_out, kv = _strided(q), _strided(d_out), torch.stack([k, v])
        dq = torch.zeros_like(local_q, dtype=lse.dtype)
        wait_for_d_kv = None
        for step in range(axis.size):
            wait = start_shift(kv, axis) if step + 1 < axis.size else None
            d_kv = lse.new_zeros(2, *k.shape)  # this rank's term
            for rows, columns, mask in blocks.pieces(q, step):
                of_rows = [each[:, :, rows] for each in (d_out, local_q, out, lse)]
                d_part, part_q, part, part_lse = of_rows
                part_k, part_v = (each[:, :, columns] for each in kv)
                part_dq, part_dk, part_dv = attend_backward(
                    d_part, part_q, part_k, part_v, part, part_lse, mask
                )
                dq[:, :, rows] += part_dq
                d_kv[0, :, :, columns] += part_dk
                d_kv[1, :, :, columns] += part_dv
            if wait_for_d_kv is not None:
                d_kv += wait_for_d_kv()
            wait_for_d_kv = start_shift(d_kv, axis)
            kv = kv if wait is None else wait()
        assert wait_for_d_kv is not None
        dk, dv = wait_for_d_kv()
        nothing = (None,) * 6
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *nothing


def _strided(x: Tensor) -> Tensor:
    """x, or a copy if its last dim has not stride 1, which kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to the attention `out` [b, a, n, d] that to further keys. A row that looks nowhere in
    them keeps its bits: exp(part_lse - total) is 0 there."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(part * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


@dataclass(frozen=True)
class _Blocks:
    """The scores of this rank's queries and of each rank's keys, in pieces for a kernel."""

    axis: Axis
    is_causal: bool
    rate: float  # of dropout
    starts: Tensor | None
    lengths: Tensor | None
    keys: Tensor | None

    def pieces(self, q: Tensor, step: int) -> Iterator[tuple[slice, slice, Mask]]:
        """(queries, keys, which scores count) of each piece of the block that is here in a step."""
        rank, length, half = self.axis.rank, q.shape[2], q.shape[2] // 2
        source = (rank - step) % self.axis.size
        is_diagonal = self.is_causal and source == rank
        first_row, last_column = 0, length
        if self.is_causal and source < rank:  # its second chunk is later than both of this rank
            last_column = half
        if self.is_causal and source > rank:  # its chunks lie between those of this rank
            first_row = half
        holds = holds_scores(q, self.keys is not None)
        if not holds and self.starts is None and self.lengths is None:
            yield slice(first_row, length), slice(0, last_column), Mask(is_causal=is_diagonal)
            return
        positions = self._positions(q, source)
        # Columns of dropout are positions, which are consecutive within a chunk.
        cut = half if self.keys is not None and self.axis.size > 1 else length
        per_score = q.shape[0] * (q.shape[1] if holds else 1)
        size = max(1, SCORES // (per_score * min(cut, last_column)))
        if is_diagonal:
            size = min(size, max(ROWS, length // 8))
        for start in range(first_row, length, size):
            rows = slice(start, min(start + size, length))
            visible = rows.stop if is_diagonal else last_column
            for first in range(0, visible, cut):
                columns = slice(first, min(first + cut, visible))
                bias = self._bias(q, rows, positions[columns])
                yield rows, columns, Mask(False, bias, self._dropout(rows, first, source, half))

    def _positions(self, q: Tensor, rank: int) -> Tensor:
        """Positions in the sample of a rank's tokens, [s/c]."""
        half = q.shape[2] // 2
        local = torch.arange(q.shape[2], device=q.device)
        return local + torch.where(local < half, rank, 2 * self.axis.size - 2 - rank) * half

    def _bias(self, q: Tensor, rows: slice, columns: Tensor) -> Tensor | None:
        """columns: positions of the keys."""
        queries, conditions = self._positions(q, self.axis.rank)[rows, None], []
        if self.is_causal:
            conditions.append((columns <= queries)[None, None])
        if self.starts is not None:
            conditions.append(columns >= self.starts[:, None, rows, None])
        if self.lengths is not None:
            conditions.append((columns < self.lengths[:, None])[:, None, None])
        if not conditions:
            return None
        bias = bias_of(reduce(torch.logical_and, conditions), q, self.keys is not None)
        return bias.expand(-1, -1, len(queries), -1)

    def _dropout(self, rows: slice, first: int, source: int, half: int) -> Dropout | None:
        if self.keys is None:
            return None
        chunk = 2 * self.axis.size - 1 - source if first else source
        return Dropout(self.keys[:, :, rows], self.rate, chunk * half)
