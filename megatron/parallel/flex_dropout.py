"""Attention with dropout by coordinates in two calls of torch's flex_attention, for GPUs. Compiled,
it saves no probabilities and computes the mask again in its backward.

flex_attention drops scores, not probabilities. With minus infinity for dropped scores it returns
O1, normalised by the sum over kept keys, and lse1, the logarithm of this sum. A second call without
dropout returns lse, the logarithm of the whole sum. With a dropout probability p

    O = O1 exp(lse1 - lse) / (1 - p)

The second call needs no output, so it takes 16 columns of the values, the kernel's minimum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron.parallel.dropout import STEPS, block_attention, kept_mask_traced, rounded

BLOCK = 128  # queries, and keys, of a block that is computed or skipped
SMALLEST = 16  # fewest elements of a head in the compiler's kernel


def flex_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    keys: Tensor,
) -> Tensor:
    """See block_attention; 0 for a query that may look nowhere or whose keys are all dropped.

    Without torch.compile, flex_attention holds all scores and has no backward on a CPU.
    """
    size, scale, steps = q.shape[3], q.shape[3] ** -0.5, rounded(dropout)
    if size < SMALLEST:
        q, k, v = (F.pad(each, (0, SMALLEST - size)) for each in (q, k, v))
    blocks = block_table(mask, is_causal, q.shape[2], k.shape[2], q.device)

    def dropped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Indices are int32, but int64 on a CPU, where this is traced with int32: a single cast
        # would do nothing in the trace and be left out.
        column = j.to(torch.int64).to(torch.int32)
        return torch.where(kept_mask_traced(keys[b, h, i], column, steps), score, -torch.inf)

    settings: Any = {"scale": scale, "enable_gqa": q.shape[1] > k.shape[1]}
    # Fewer than 128 queries would take another kernel.
    settings |= {"return_aux": AuxRequest(lse=True), "kernel_options": {"BACKEND": "TRITON"}}
    out, kept = flex_attention(q, k, v, dropped, blocks, **settings)
    few = v[..., :SMALLEST].detach()
    unused, whole = flex_attention(q, k, few, None, blocks, **settings)
    assert kept.lse is not None
    assert whole.lse is not None
    # Inductor's backward needs a gradient of every output: this one's is 0.
    lse = whole.lse + 0.0 * unused[..., 0]
    # For a query that may look nowhere both are minus infinity, and their difference is NaN.
    looks = lse > -torch.inf
    share = torch.where(looks, kept.lse - torch.where(looks, lse, 0.0), -torch.inf).exp()
    return (out[..., :size] * (share * STEPS / (STEPS - steps))[..., None]).to(q.dtype)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i looks at key j."""
    return j <= i


def block_table(
    mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device
) -> BlockMask | None:
    """The blocks that are computed, and those that need no mask. None: all, without a mask."""
    if mask is not None:
        tiles = F.pad(mask.expand(-1, 1, queries, keys), (0, -keys % BLOCK, 0, -queries % BLOCK))
        tiles = tiles.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        some, every = tiles.any(5).any(3), tiles.all(5).all(3)
        cut = (mask.shape[0] > 1, mask.shape[2] > 1, True)
        # All indices are tensors: a number among them would be a constant, which no kernel takes.
        table = mask[:, 0][tuple(slice(None) if each else 0 for each in cut)]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[tuple(x for x, each in zip((b, i, j), cut, strict=True) if each)]

        rule = visible
    elif is_causal:
        number = torch.arange(-(-queries // BLOCK), device=device)
        row, column = number[None, None, :, None], number
        # The last block may be padded with queries that do not exist.
        some, every = column <= row, (column < row) & (row < queries // BLOCK)
        rule = causal
    else:
        return None
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every),
        *_in_order(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(queries, keys),
    )


def _in_order(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(number of chosen columns in each row; their indices, followed by those of the others)."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def flex_or_blocks(q: Tensor, *others: Any) -> Tensor:
    """flex_dropout in a compiled layer, or on meta, to plan one; otherwise block_attention."""
    is_flex = torch.compiler.is_compiling() or q.is_meta
    return (flex_dropout if is_flex else block_attention)(q, *others)
