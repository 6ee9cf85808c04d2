"""The kernels that the layers run on: torch's, and on CPUs those of parallel/cpu/.

The latter are faster, and exact where torch adds up many numbers in bf16 or fp16. They are used if
the folder exists and `use_cpu_kernels` is True; torch's kernels differ from them by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from megatron.parallel.dropout import block_attention, widen

try:
    from megatron.parallel.cpu import norms, onednn

    use_cpu_kernels = True
except ImportError:
    use_cpu_kernels = False

SHORT = 512  # tokens; up to this length attention in blocks is faster on a CPU
_meta_is_cpu = True


@contextmanager
def meta_as(device: str) -> Iterator[None]:
    """Let tensors on meta take the kernels of `device`, "cpu" or "cuda", instead of a CPU's."""
    global _meta_is_cpu
    before, _meta_is_cpu = _meta_is_cpu, device == "cpu"
    try:
        yield
    finally:
        _meta_is_cpu = before


def is_on_cpu(x: Tensor) -> bool:
    """Whether x is on a CPU, or on meta in place of a tensor on a CPU."""
    return _meta_is_cpu if x.is_meta else not x.is_cuda


def _by_cpu_kernels(x: Tensor) -> bool:
    return use_cpu_kernels and is_on_cpu(x)


def padded_rows(rows: int) -> int:
    """Rows that a matrix of varying height is padded to: oneDNN keeps code for each size."""
    return -(-rows // onednn.ROW_MULTIPLE) * onednn.ROW_MULTIPLE if use_cpu_kernels else rows


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of two matrices [n, in] and [out, in] with any strides; not differentiable."""
    if _by_cpu_kernels(x):
        if x.dtype in onednn.EMULATED:
            return onednn.matmul_widened(x, weight, bias)
        if onednn.is_faster(x, weight):
            return onednn.matmul(x, weight, bias)
        if bias is None and onednn.has_few_rows(x, weight):
            return onednn.matmul_few_rows(x, weight)
    return F.linear(x, weight, bias)


def add_matmul_(out: Tensor, dy: Tensor, x: Tensor, *, accumulate: bool) -> None:
    """Add dy' x to `out` [out, in], or overwrite it; dy [n, out] and x [n, in] have one dtype."""
    if out.dtype != x.dtype and x.is_cuda:  # the result is not rounded to the dtype of x
        into: Any = {"out_dtype": out.dtype, "out": out}
        torch.addmm(out, dy.T, x, **into) if accumulate else torch.mm(dy.T, x, **into)
    elif out.dtype != x.dtype:
        product = matmul(dy.T, x.T)
        out.add_(product) if accumulate else out.copy_(product)
    elif _by_cpu_kernels(x) and x.dtype in onednn.EMULATED:
        product = dy.float().T @ x.float()
        out.copy_(product.add_(out) if accumulate else product)
    elif _by_cpu_kernels(x) and onednn.is_faster(dy.T, x.T):
        onednn.add_matmul_(out, dy, x, accumulate=accumulate)
    elif accumulate:
        out.addmm_(dy.T, x)
    else:
        torch.mm(dy.T, x, out=out)


def sum_rows(x: Tensor, sequences: int) -> Tensor:
    """The sum of the rows of x [n, f], in a compiled graph by sequence: the kernel of a GPU that
    writes x as [b, s, f] computes such sums, too. A sum over n rows is a kernel of its own, which
    reads x again: for two biases of a GPT-2 layer an eighth of all elementwise bytes."""
    if sequences == 1 or not torch.compiler.is_compiling():
        return x.sum(0)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(0, (sequences, -1)).sum(1, dtype=wide).sum(0).to(x.dtype)


def squares(pieces: list[Tensor]) -> Tensor:
    """The sum of all squares, an fp64 scalar. pieces: flat, with multiples of 64 elements."""
    if pieces[0].is_cuda:  # one launch for all pieces
        return torch.stack(torch._foreach_norm(pieces, dtype=torch.float64)).square().sum()
    # A CPU adds squares one by one in fp32: the norm of 10^5 elements is off by 1e-6, that of 10^8
    # by 1e-2. So only a few are added at a time.
    norms = (
        vector_norm(each.view(-1, 64), dim=1, dtype=torch.promote_types(each.dtype, torch.float32))
        for each in pieces
    )
    return torch.stack([each.double().square().sum() for each in norms]).sum()


def rounded_sqrt(x: Tensor) -> Tensor:
    """The square root of an fp64 scalar, rounded to nearest; a GPU's host does not wait."""
    # On a CPU torch calls MKL's, which was off by one bit for 42 of 3,000 numbers (torch 2.13).
    return x.sqrt() if x.is_cuda else torch.full_like(x, sqrt(x.numpy()))


def add_rows_(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows [n, h] to the rows of `table` at `index` [n], always in the same order."""
    rows = rows.to(table.dtype)
    # torch has two functions, each deterministic on one kind of device only.
    if table.is_cuda:
        return table.index_put_((index,), rows, accumulate=True)
    return table.index_add_(0, index, rows)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """F.scaled_dot_product_attention of q [b, a, s, d] and k, v [b, g, m, d]; a/g heads of q share
    a head of k and v.

    mask: bool [b or 1, 1, 1 or s, m], True where a query may look. dropout: rate; torch draws it.
    """
    # Where blocks train faster than torch's CPU kernel, and save not much more memory.
    trains = torch.is_grad_enabled() and q.requires_grad and not dropout
    is_short = q.shape[2] == k.shape[2] <= SHORT and (is_causal or q.itemsize < 4)
    if trains and is_short and _by_cpu_kernels(q):
        return block_attention(q, k, v, mask, is_causal)
    shared = q.shape[1] // k.shape[1]
    # Among torch's kernels that keep no scores, only flash attention takes shared heads.
    if shared > 1 and q.is_cuda and (mask is not None or q.itemsize > 2):
        k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=shared > 1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """F.layer_norm over the last dim of x."""
    if _by_cpu_kernels(x) and x.dtype in norms.NARROW and torch.is_grad_enabled():
        return norms.NarrowLayerNorm.apply(x, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, *, rounds_before_weight: bool = False
) -> Tensor:
    """weight x / sqrt(mean of x^2 + epsilon) of x [.., h], rounded once to its dtype.
    rounds_before_weight: also rounded before multiplying by the weight, as in transformers."""
    if _by_cpu_kernels(x) and not torch.compiler.is_compiling():
        return norms.RMSNorm.apply(x, weight, epsilon, rounds_before_weight)
    if rounds_before_weight:
        return weight * F.rms_norm(widen(x), weight.shape, None, epsilon).to(x.dtype)
    return F.rms_norm(widen(x), weight.shape, widen(weight), epsilon).to(x.dtype)
