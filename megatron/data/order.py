"""The order of an epoch: a keyed bijection, computed and never stored.

A Feistel network is a bijection of 2^(2h) numbers whatever its round function. A number that it
throws beyond `size` goes through it again until it lands inside (cycle walking), which leaves a
bijection of range(size); 2^(2h) is at most 4 size, so that takes at most 4 turns on average.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def permute(
    numbers: NDArray[np.int64], size: int, *, seed: int, epochs: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where each of `numbers`, in range(size), stands in the order of its epoch: int64 [n].

    epochs: int64 [n], the epoch of each number. For one epoch a bijection of range(size); a pure
    function of (number, size, seed, epoch).
    """
    assert numbers.shape == epochs.shape
    assert np.all((numbers >= 0) & (numbers < size))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    key = _mix(_mix(np.full(numbers.shape, seed % 2**64, np.uint64)) ^ epochs.astype(np.uint64))
    value = _feistel(numbers.astype(np.uint64), half, key)
    while np.any(outside := value >= size):
        value[outside] = _feistel(value[outside], half, key[outside])
    return value.astype(np.int64)


def _feistel(
    value: NDArray[np.uint64], half: np.uint64, key: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """A bijection of the numbers of 2 half bits, for each key."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(_mix(key + np.uint64(number)) ^ right) & mask)
    return (left << half) | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: every bit of the result depends on every bit of value."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
