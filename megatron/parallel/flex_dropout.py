"""Attention with dropout by coordinates in two calls of torch's flex_attention, for GPUs: compiled,
it keeps no probabilities, and computes the mask again in its backward.

flex_attention drops scores, and no probabilities. With minus infinity for those that are dropped it
gives O1, divided by the sum of what is kept, whose logarithm is lse1. A second call, which drops
nothing, gives lse, that of the whole sum. With a probability p of dropout

    O = O1 exp(lse1 - lse) / (1 - p)

The second call needs no output: it takes 16 columns of the values, the fewest that the kernel does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron.parallel.block_attention import block_attention
from megatron.parallel.dropout import STEPS, keeps, rounded
from megatron.parallel.layers import AttentionCore

BLOCK = 128  # queries, and keys, of a block that is computed or left out
SMALLEST = 16  # elements of a head in the compiler's kernel


def flex_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    keys: Tensor,
) -> Tensor:
    """As block_attention, and 0 for a query whose keys are all dropped, or that may look nowhere.

    Not compiled, flex_attention holds all scores, and has no backward on a CPU.
    """
    size, scale, steps = q.shape[3], q.shape[3] ** -0.5, rounded(dropout)
    if size < SMALLEST:
        q, k, v = (F.pad(each, (0, SMALLEST - size)) for each in (q, k, v))
    blocks = block_table(mask, is_causal, q.shape[2], k.shape[2], q.device)

    def dropped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Places are int32, but int64 on a CPU, which traces this with int32: one cast alone would
        # do nothing there, and be left out.
        column = j.to(torch.int64).to(torch.int32)
        return torch.where(keeps(keys[b, h, i], column, steps), score, -torch.inf)

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
    # Both are minus infinity where a query may look nowhere, and their difference no number.
    looks = lse > -torch.inf
    share = torch.where(looks, kept.lse - torch.where(looks, lse, 0.0), -torch.inf).exp()
    return (out[..., :size] * (share * STEPS / (STEPS - steps))[..., None]).to(q.dtype)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i looks at key j."""
    return j <= i


def block_table(
    mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device
) -> BlockMask | None:
    """Which blocks are computed, and of these, which without the mask. None: all."""
    if mask is not None:
        tiles = F.pad(mask.expand(-1, 1, queries, keys), (0, -keys % BLOCK, 0, -queries % BLOCK))
        tiles = tiles.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        some, every = tiles.any(5).any(3), tiles.all(5).all(3)
        cut = (mask.shape[0] > 1, mask.shape[2] > 1, True)
        # Looked up by tensors alone: a number among them is a constant that no kernel takes.
        table = mask[:, 0][tuple(slice(None) if each else 0 for each in cut)]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[tuple(x for x, each in zip((b, i, j), cut, strict=True) if each)]

        rule = visible
    elif is_causal:
        number = torch.arange(-(-queries // BLOCK), device=device)
        row, column = number[None, None, :, None], number
        # The last block may be filled up with queries that are not there.
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
    """(how many columns of each row are chosen; their numbers, followed by those of the others)."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def flex_or_blocks(q: Tensor, *others: Any) -> Tensor:
    """flex_dropout in a compiled layer, and on meta, where it is planned; else block_attention."""
    is_flex = torch.compiler.is_compiling() or q.is_meta
    return (flex_dropout if is_flex else block_attention)(q, *others)


class FlexAttentionCore(AttentionCore):
    """AttentionCore by `flex_or_blocks`."""

    drop = staticmethod(flex_or_blocks)
