"""Dropout without a random generator: the coordinates of an element decide whether it is kept.

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

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import own_rows
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.random import derive_seed

STEPS = 2**16  # probabilities are multiples of 1 / STEPS
CHUNK = 2**18  # pairs of columns that are mixed at a time, so that they stay in a CPU's cache
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
