"""Attention to one block of keys, which also returns the log-sum-exp by which blocks are merged.

    CPU                                      torch's flash attention
    GPU, bf16 and fp16 without a bias        flash attention
    GPU with a bias, and in fp32             memory-efficient attention
    dropout by coordinates; GPU in fp64      matmuls and softmax in fp32 or wider

A backward is given the result and the log-sum-exp of all blocks together, so it returns this
block's terms of the gradients. torch has no public function for that: these are operators of torch
2.13, called as its derivatives.yaml does. Those for a GPU are not yet run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.dropout import drop_elements, widen
from megatron.parallel.kernels import is_on_cpu

_ATEN = torch.ops.aten
_BIAS_MULTIPLE = 16  # elements that the rows of the memory-efficient kernel's bias are aligned to
_LSE_MULTIPLE = 32  # rows that its log-sum-exp is padded to
_HEAD_MULTIPLE = 8  # elements of a head on a GPU
_LARGEST_FLASH_HEAD = 256


class Dropout(NamedTuple):
    """Dropout of the probabilities [b, a, n, m] of a block by coordinates."""

    keys: Tensor
    """int64 [b, a, n], keys of the rows; see `head_keys`."""
    p: float
    first: int
    """Position in the sample of the block's first key; the others follow it."""

    def apply_to(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 2)
        return drop_elements(self.keys.flatten(), self.p, rows, first=self.first)[0].view(x.shape)


class Mask(NamedTuple):
    """The scores [n, m] of a block that count."""

    is_causal: bool = False
    """Query i looks at keys 0 to i, and n is m. Not for kernels that hold the scores."""
    bias: Tensor | None = None
    """[b or 1, 1, n, m], see `bias_of`."""
    dropout: Dropout | None = None


def holds_scores(q: Tensor, dropout: bool) -> bool:
    """Whether the kernel holds all scores of a block."""
    return dropout or (q.dtype == torch.float64 and not is_on_cpu(q))


def bias_of(visible: Tensor, q: Tensor, dropout: bool) -> Tensor:
    """The bias that masks scores by the mask [b or 1, 1, n, m], True where a query may look."""
    # A kernel on a CPU takes fp32 beside fp64, in silence and wrongly; one on a GPU q's dtype only.
    in_fp32 = is_on_cpu(q) or holds_scores(q, dropout)
    dtype = torch.promote_types(q.dtype, torch.float32) if in_fp32 else q.dtype
    columns = visible.shape[3]
    bias = visible.new_zeros(*visible.shape[:3], columns + -columns % _BIAS_MULTIPLE, dtype=dtype)
    # Finite, because a row of minus infinity has the log-sum-exp 0 there; half of the smallest
    # number, because kernels of a GPU multiply it by log2(e).
    return bias[..., :columns].masked_fill_(~visible, torch.finfo(dtype).min / 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """(softmax(q k' / sqrt(d) + bias) v [b, a, n, d], log-sum-exp of the scores [b, a, n], in fp32
    or wider), of q [b, a, n, d], k and v [b, g, m, d]. The last dims have stride 1.

    a/g adjacent heads of q share a head of k and v. A row that looks nowhere has a finite result
    and about the mask's log-sum-exp, next to which any other is infinitely large.
    """
    (is_causal, bias, dropout), (rows, size) = mask, q.shape[2:]
    scale = size**-0.5
    if holds_scores(q, dropout is not None):
        return _plain(q, k, v, bias, dropout)
    if is_on_cpu(q):
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out, lse
    q, k, v = (_pad_heads(each) for each in (q, k, v))
    if _is_flash(q, bias):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, scale=scale
        )
    else:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, k, v, _for_heads(bias, q), True, 0.0, is_causal, scale=scale
        )
    return out[..., :size], lse[..., :rows]


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's terms of (dq, dk, dv), in q's dtype or wider. out, lse: merged from all blocks.
    The last dims have stride 1."""
    (is_causal, bias, dropout), (rows, size) = mask, q.shape[2:]
    (groups, columns), scale = k.shape[1:3], size**-0.5
    if holds_scores(q, dropout is not None):
        return _plain_backward(d_out, q, k, v, out, lse, bias, dropout)
    if is_on_cpu(q):
        if is_summed := groups < q.shape[1] and q.itemsize == 2:
            # The kernel adds up gradients of shared heads in q's dtype: 1.8 x the error of bf16.
            k, v = (each.repeat_interleave(q.shape[1] // groups, 1) for each in (k, v))
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        if is_summed:
            dk, dv = (widen(each).unflatten(1, (groups, -1)).sum(2) for each in (dk, dv))
        return dq, dk, dv
    d_out, q, k, v, out = (_pad_heads(each) for each in (d_out, q, k, v, out))
    # Kernels without dropout do not read the state of the random generator.
    drawn = [q.new_empty(shape, dtype=torch.uint64) for shape in (2, ())]
    if _is_flash(q, bias):
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse.contiguous(), None, None, rows, columns, 0.0, is_causal,
            *drawn, scale=scale,
        )  # fmt: skip
    else:
        k, v = (each.repeat_interleave(q.shape[1] // groups, 1) for each in (k, v))
        lse = F.pad(lse, (0, -rows % _LSE_MULTIPLE), value=torch.inf)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # its strides are taken for granted
        dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, _for_heads(bias, q), out, lse, *drawn, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        dk, dv = (widen(each).unflatten(1, (groups, -1)).sum(2) for each in (dk, dv))
    return dq[..., :size], dk[..., :size], dv[..., :size]


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.itemsize == 2 and q.shape[3] <= _LARGEST_FLASH_HEAD


def _pad_heads(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[3] % _HEAD_MULTIPLE))


def _for_heads(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q.shape[:2], -1, -1)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    p = p if dropout is None else dropout.apply_to(p)
    return (_folded(p, k) @ widen(v)).view(q.shape), lse


def _plain_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See block_attention; the sum of dP P over all blocks is that of dO O, with dropout, too."""
    d_out = widen(d_out)
    p = _scores(q, k, bias).sub_(lse[..., None]).exp_()
    dropped, dp = p, (_folded(d_out, k) @ widen(v).mT).view(p.shape)
    if dropout is not None:
        dropped, dp = dropout.apply_to(p), dropout.apply_to(dp)
    dv = _folded(dropped, k).mT @ _folded(d_out, k)
    ds = dp.sub_((d_out * out).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[3] ** -0.5)
    dk = _folded(ds, k).mT @ _folded(widen(q), k)
    return (_folded(ds, k) @ widen(k)).view(q.shape), dk, dv


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """[b, a, n, m] in fp32 or wider."""
    scores = _folded(widen(q) * q.shape[3] ** -0.5, k) @ widen(k).mT
    scores = scores.view(*q.shape[:3], k.shape[2])
    return scores if bias is None else scores.add_(bias)


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """Reshape x [b, a, n, any] to [b, g, a/g n, any]."""
    return x.reshape(*k.shape[:2], -1, x.shape[3])
