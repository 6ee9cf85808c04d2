"""Dropout that no generator draws: whether an element is kept is a function of where it is.

The keep-mask is an integer hash of (seed, name of the layer, sample, place in the sample, channel),
or for a probability of attention of (seed, name, sample, query, head, key). So every rank computes
the elements that it holds, however model and batch are cut, and nothing is kept for the backward,
which computes the mask again. Recomputation, other micro-batches and a resumed run drop the same.

    key of a row       64 bits: one coordinate after another is added and mixed (SplitMix64, Steele
                       et al., 2014), then the key of the layer, and of attention the head
    two columns        32 bits: key and number of the pair, mixed by two multiplications
    an element         16 of these bits, compared with p
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import own_rows
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.random import derive_seed

STEPS = 2**16  # probabilities are multiples of 1 / STEPS
CHUNK = 2**18  # pairs of columns that are mixed at a time, so that they stay in a CPU's cache
PAIR = 0x9E3779B1 - 2**32  # of two columns; any odd number with many bits set


def row_keys(numbers: Tensor, places: Tensor) -> Tensor:
    """Keys of the rows of a stream, int64 [b x s]: of samples [b] and places in a sample [s]."""
    return fold(fold(0, numbers)[:, None], places).flatten()


def head_keys(rows: Tensor, key: Tensor, heads: range, batch: int) -> Tensor:
    """int64 [b, heads, s]: of the rows of attention's probabilities in one layer, by their heads of
    the whole model. rows: see `row_keys`."""
    numbers = torch.arange(heads.start, heads.stop, device=rows.device)
    return fold(fold(key, rows).view(batch, 1, -1), numbers[:, None])


def layer_key(seed: int, name: str) -> Tensor:
    """int64, a scalar on the host: a tensor, so that compiled layers share one graph."""
    return torch.tensor(derive_seed(seed, "dropout", name), device="cpu")


class Dropout(nn.Module):
    """Dropout of the stream [n, h] or [b, s, h] outside the parallel region: a row is dropped alike
    wherever it is held."""

    def __init__(
        self, seed: int, p: float, name: str, *, stream: Axis = ALONE, hidden: Axis = ALONE
    ) -> None:
        """name: of the layer; another one drops other elements. stream, hidden: that its rows, and
        its columns, are cut over."""
        super().__init__()
        self.p, self.name, self.key = p, name, layer_key(seed, name)
        self.stream, self.hidden = stream, hidden

    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """rows: int64 [n], see `row_keys`, of all rows of the stream."""
        if not self.training or self.p == 0.0:
            return x
        keys = fold(self.key, own_rows(known(rows), self.stream))
        first = self.hidden.rank * x.shape[-1]
        return dropout(x.flatten(0, -2), keys, self.p, first).view_as(x)


def known(rows: Tensor | None) -> Tensor:
    """Raises ValueError for the rows of a batch without sample numbers."""
    if rows is None:
        raise ValueError(
            "dropout is a function of sample numbers, and there are none: set Batch.numbers, and a "
            "dropout of the model's settings, or call eval() on the model"
        )
    return rows


def dropout(x: Tensor, keys: Tensor, p: float, first: int = 0) -> Tensor:
    """x [r, c] with each element 0 with probability p, else x / (1 - p).

    keys: int64 [r], of the rows. first: number of the first column of x among those of the whole
    row. p is rounded to a multiple of 1 / STEPS.
    """
    if torch.compiler.is_compiling():
        return multiply(keys, p, x, first=first)[0]
    dropped: Tensor = _Dropout.apply(x, keys, p, first)
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float, first: int) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p, ctx.first = p, first
        return multiply(keys, p, x, first=first)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return multiply(*ctx.saved_tensors, ctx.p, dy, first=ctx.first)[0], None, None, None


def multiply(keys: Tensor, p: float, *tensors: Tensor, first: int = 0) -> list[Tensor]:
    """Each tensor [r, c] after the same dropout; arguments: see `dropout`."""
    count, scale = tensors[0].shape[1], STEPS / (STEPS - rounded(p))
    # Not by mask times scale, one pass less: in bf16 the scale is rounded, a constant error.
    if torch.compiler.is_compiling():  # one kernel, which hashes each pair twice and writes nothing
        columns = torch.arange(first, first + count, dtype=torch.int32, device=keys.device)
        kept = keeps(keys[:, None], columns, rounded(p))
        return [x * kept * scale for x in tensors]
    if keys.is_meta:  # for shapes and work alone: the mask is hashed in a cache, or in registers
        return [x * scale for x in tensors]
    products = [torch.empty_like(each) for each in tensors]
    size = max(1, 2 * CHUNK // count) if keys.device.type == "cpu" else len(keys)
    for start in range(0, len(keys), size):
        rows = slice(start, start + size)
        kept = is_kept(keys[rows], first, count, p, tensors[0].dtype)
        for x, product in zip(tensors, products, strict=True):
            torch.mul(x[rows], kept, out=product[rows]).mul_(scale)
    return products


def rounded(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def is_kept(keys: Tensor, first: int, count: int, p: float, dtype: torch.dtype) -> Tensor:
    """[r, c] of 0 and 1, for the columns first to first + count."""
    pairs = torch.arange(first // 2, (first + count + 1) // 2, device=keys.device).int()
    words = hash_pairs(keys[:, None], pairs)
    halves = words.view(torch.int16)[:, first % 2 : first % 2 + count]
    kept = torch.empty(halves.shape, dtype=dtype, device=keys.device)
    return torch.ge(halves, rounded(p) - STEPS // 2, out=kept)


def keeps(keys: Tensor, columns: Tensor, steps: int) -> Tensor:
    """Bool, with p = steps / STEPS: of int64 keys and int32 columns, which broadcast."""
    words = hash_pairs(keys, columns >> 1)
    halves = torch.where((columns & 1).bool(), words >> 16, words << 16 >> 16)
    return halves >= steps - STEPS // 2


def hash_pairs(keys: Tensor, pairs: Tensor) -> Tensor:
    """int32: a hash of (key, pair), which broadcast."""
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    # The multipliers are those of lowbias32 (Wellons, 2018). The upper half of the key comes in
    # between: with the lower one alone, two rows could share a mask that is shifted.
    x = low + pairs * PAIR
    x ^= shifted(x, 16)
    x = torch.add(high, x, alpha=0x7FEB352D)
    x ^= x >> 15  # loses the sign and nothing else, and is one operation less
    x *= 0x846CA68B - 2**32
    return x


def fold(key: Tensor | int, number: Tensor) -> Tensor:
    """SplitMix64 of key + number."""
    x = number + key + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros from the left, where torch's fills in the sign."""
    return (x >> bits) & ((1 << 8 * x.itemsize - bits) - 1)
