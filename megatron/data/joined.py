"""Arrays in several files, read like one."""

import operator
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Joined:
    """Arrays of one dimension and one dtype, one after another; nothing is read beforehand."""

    def __init__(self, arrays: Sequence[NDArray[Any]], shifts: Sequence[int]) -> None:
        """shifts: what is added to the entries of each array."""
        self._arrays = arrays
        self._shifts = shifts
        self._starts = [0, *accumulate(map(len, arrays))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, key: int | slice) -> Any:
        """An entry, or the array of a slice without a step: a view if it lies in one array."""
        if not isinstance(key, slice):
            place = range(len(self))[operator.index(key)]
            return self[place : place + 1][0]
        start, stop, step = key.indices(len(self))
        assert step == 1
        first = min(bisect_right(self._starts, start), len(self._arrays)) - 1
        pieces = []
        for number in range(first, len(self._arrays)):
            offset = self._starts[number]
            piece = self._arrays[number][max(0, start - offset) : max(0, stop - offset)]
            shift = self._shifts[number]
            pieces.append(piece + shift if shift else piece)
            if stop <= self._starts[number + 1]:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


Array = NDArray[Any] | Joined


def join(arrays: Sequence[NDArray[Any]], shifts: Sequence[int] | None = None) -> Array:
    """The arrays as one; an array that is alone as it is."""
    if len(arrays) == 1:
        return arrays[0]
    return Joined(arrays, shifts or [0] * len(arrays))
