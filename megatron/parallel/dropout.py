"""Dropout without a random generator: the coordinates of an element decide whether it is kept.
Attention in blocks of queries drops probabilities so; on a CPU it is also used where it is faster.

The keep-mask is an integer hash of (seed, name of the layer, sample, position in it, channel), or
for attention probabilities of (seed, name, sample, query, head, key). So every rank computes the
mask of the elements it holds, however model and batch are cut. The backward computes the mask again
from the keys, 8 bytes a row. Recomputation, other micro-batches and a resume drop the same: with
masks drawn from a generator, the loss of 8 steps moved by 1.6e-3 to 9.7e-3 with the layout.

    key of a row       64 bits: one coordinate after another is added and mixed (SplitMix64, Steele
                       et al., 2014), then the key of the layer and, for attention, the head
    two columns        32 bits: key and number of the pair, mixed by two multiplications
    an element         16 of these bits, as a signed number: kept if at least 2^16 p - 2^15
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import own_rows
from megatron.parallel.initialize import derive_seed
from megatron.parallel.mesh import ALONE, Axis

STEPS = 2**16  # probabilities are multiples of 1 / STEPS
CHUNK = 2**18  # pairs of columns that are mixed at a time, so that they stay in a CPU's cache
BLOCK = 128  # queries of block_attention at a time
PAIR = 0x9E3779B1 - 2**32  # factor of a pair's number; any odd number with many bits set


def row_keys(numbers: Tensor, positions: Tensor) -> Tensor:
    """Keys of the rows of hidden states, int64 [b x s]. numbers: of samples, [b]. positions: of
    tokens in their sample, [s]."""
    return fold(fold(0, numbers)[:, None], positions).flatten()


def head_keys(token_keys: Tensor, layer: Tensor, heads: range, batch: int) -> Tensor:
    """Keys of the rows of attention probabilities in one layer, int64 [b, heads, s].

    token_keys: see `row_keys`. layer: its `layer_key`. heads: their numbers in the whole model.
    """
    numbers = torch.arange(heads.start, heads.stop, device=token_keys.device)
    return fold(fold(layer, token_keys).view(batch, 1, -1), numbers[:, None])


def layer_key(seed: int, name: str) -> Tensor:
    """int64 scalar on the host: as it is a tensor, compiled layers share one graph."""
    return torch.tensor(derive_seed(seed, "dropout", name), device="cpu")


class Dropout(nn.Module):
    """Dropout of hidden states [n, h] or [b, s, h] outside the parallel region. Every rank that
    holds a row drops the same elements of it."""

    def __init__(
        self, seed: int, p: float, name: str, *, stream: Axis = ALONE, hidden: Axis = ALONE
    ) -> None:
        """name: name of the layer; layers of other names drop other elements. stream, hidden: the
        axes that cut its rows and its columns."""
        super().__init__()
        self.p, self.name, self.key = p, name, layer_key(seed, name)
        self.stream, self.hidden = stream, hidden

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """keys: int64 [n], of all rows, also those of other ranks of `stream`: what
        `megatron.parallel.dropout.row_keys(sample_numbers, positions)` returns."""
        if not self.training or self.p == 0.0:
            return x
        keys = fold(self.key, own_rows(require_keys(keys), self.stream))
        first = self.hidden.rank * x.shape[-1]
        return dropout(x.flatten(0, -2), keys, self.p, first).view_as(x)


def require_keys(keys: Tensor | None) -> Tensor:
    """Return `keys`. Raises ValueError if they are None, as for a batch without sample numbers."""
    if keys is None:
        raise ValueError(
            "dropout is a function of sample numbers, and there are none: set Batch.numbers, and a "
            "dropout of the model's settings, or call eval() on the model"
        )
    return keys


def dropout(x: Tensor, keys: Tensor, p: float, first: int = 0) -> Tensor:
    """x [r, c] with each element set to 0 with probability p, else to x / (1 - p).

    keys: int64 [r], keys of the rows. first: number of x's first column in the whole row. p is
    rounded to a multiple of 1 / STEPS.
    """
    if torch.compiler.is_compiling():
        return drop_elements(keys, p, x, first=first)[0]
    return _Dropout.apply(x, keys, p, first)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float, first: int) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p, ctx.first = p, first
        return drop_elements(keys, p, x, first=first)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return drop_elements(*ctx.saved_tensors, ctx.p, dy, first=ctx.first)[0], None, None, None


def drop_elements(keys: Tensor, p: float, *tensors: Tensor, first: int = 0) -> list[Tensor]:
    """Each tensor [r, c] after the same dropout; arguments: see `dropout`."""
    count, scale = tensors[0].shape[1], STEPS / (STEPS - rounded(p))
    # Mask and scale are two factors, as bf16 rounds mask x scale: the same error everywhere.
    if torch.compiler.is_compiling():  # one kernel that hashes each pair twice and stores no mask
        columns = torch.arange(first, first + count, dtype=torch.int32, device=keys.device)
        mask = kept_mask_traced(keys[:, None], columns, rounded(p))
        return [x * mask * scale for x in tensors]
    if keys.is_meta:  # only shapes and work count: the mask is hashed in a cache or in registers
        return [x * scale for x in tensors]
    products = [torch.empty_like(each) for each in tensors]
    size = max(1, 2 * CHUNK // count) if keys.device.type == "cpu" else len(keys)
    for start in range(0, len(keys), size):
        rows = slice(start, start + size)
        mask = kept_mask(keys[rows], first, count, p, tensors[0].dtype)
        for x, product in zip(tensors, products, strict=True):
            torch.mul(x[rows], mask, out=product[rows]).mul_(scale)
    return products


def rounded(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def kept_mask(keys: Tensor, first: int, count: int, p: float, dtype: torch.dtype) -> Tensor:
    """Mask [r, c] of 0 and 1 in this dtype, for columns first to first + count."""
    pairs = torch.arange(first // 2, (first + count + 1) // 2, device=keys.device).int()
    words = hash_pairs(keys[:, None], pairs)
    halves = words.view(torch.int16)[:, first % 2 : first % 2 + count]
    mask = torch.empty(halves.shape, dtype=dtype, device=keys.device)
    return torch.ge(halves, rounded(p) - STEPS // 2, out=mask)


def kept_mask_traced(keys: Tensor, columns: Tensor, steps: int) -> Tensor:
    """The mask of `kept_mask` in bool, by operations that compile into one kernel. p is steps /
    STEPS; int64 keys and int32 columns broadcast."""
    words = hash_pairs(keys, columns >> 1)
    halves = torch.where((columns & 1).bool(), words >> 16, words << 16 >> 16)
    return halves >= steps - STEPS // 2


def hash_pairs(keys: Tensor, pairs: Tensor) -> Tensor:
    """Hash of (key, pair), int32; the two broadcast."""
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    # The multipliers are those of lowbias32 (Wellons, 2018). The upper half of the key is added in
    # between: with the lower half only, 14 pairs of attention's rows shared a shifted mask in one
    # step. So rate, means and correlations of 16.8M elements are all within 1.7 sigma.
    x = low + pairs * PAIR
    x ^= shifted(x, 16)
    x = torch.add(high, x, alpha=0x7FEB352D)
    x ^= x >> 15  # arithmetic shift: saves an operation, and loses only the sign
    x *= 0x846CA68B - 2**32
    return x


def fold(key: Tensor | int, number: Tensor) -> Tensor:
    """SplitMix64 of key + number."""
    x = number + key + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift x >> bits: fills in zeros from the left, where torch's fills in the sign."""
    return (x >> bits) & ((1 << 8 * x.itemsize - bits) - 1)


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
