"""The order of an epoch: a keyed bijection, computed and never stored.

A Feistel network is a bijection of 2^(2h) numbers whatever its round function. A number that it
throws beyond `size` goes through it again until it lands inside (cycle walking), which leaves a
bijection of range(size); 2^(2h) is at most 4 size, so that takes at most 4 turns on average.

All arithmetic is modulo 2^64, on integers of Python or on arrays of numpy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
WORD = 2**64 - 1
# Of fewer numbers each takes Python less time than an operation on an array takes to begin.
FEW = 64


def permute(
    numbers: NDArray[np.int64], size: int, *, seed: int, epochs: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where each of `numbers`, in range(size), stands in the order of its epoch: int64 [n].

    epochs: int64 [n], the epoch of each number. For one epoch a bijection of range(size); a pure
    function of (number, size, seed, epoch).
    """
    assert numbers.shape == epochs.shape
    assert np.all((numbers >= 0) & (numbers < size))
    if len(numbers) < FEW:
        keys = {epoch: _keys(seed, epoch) for epoch in set(epochs.tolist())}
        pairs = zip(numbers.tolist(), epochs.tolist(), strict=True)
        return np.array([_walk(number, size, keys[epoch]) for number, epoch in pairs], np.int64)
    all_keys = np.stack(_keys(seed, epochs.astype(np.uint64)))
    value = _feistel(numbers.astype(np.uint64), _half(size), all_keys)
    while np.any(outside := value >= size):
        value[outside] = _feistel(value[outside], _half(size), all_keys[:, outside])
    return value.astype(np.int64)


def _walk(number: int, size: int, keys: Sequence[int]) -> int:
    half = _half(size)
    value: int = _feistel(number, half, keys)
    while value >= size:
        value = _feistel(value, half, keys)
    return value


def _half(size: int) -> int:
    """h for the smallest 2^(2h) that is at least `size`."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def _keys(seed: int, epoch: Any) -> list[Any]:
    """Those of the rounds, for an epoch or for many."""
    key = _mix(_mix(seed & WORD) ^ epoch)
    return [_mix(key + number) for number in range(ROUNDS)]


def _feistel(value: Any, half: int, keys: Sequence[Any] | NDArray[np.uint64]) -> Any:
    """A bijection of the numbers of 2 half bits, for the keys of the rounds."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(key ^ right) & mask)
    return (left << half) | right


def _mix(value: Any) -> Any:
    """SplitMix64's output function: every bit of the result depends on every bit of value."""
    value = value + 0x9E3779B97F4A7C15 & WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & WORD
    return value ^ (value >> 31)
