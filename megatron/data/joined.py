"""Arrays in files: read where they are asked for, and those of several files like one."""

import operator
import os
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class _Sliced(ABC):
    """What is read by entry or by slice without a step."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, start: int, stop: int) -> NDArray[Any]: ...

    def __getitem__(self, key: int | slice) -> Any:
        if not isinstance(key, slice):
            place = range(len(self))[operator.index(key)]
            return self._read(place, place + 1)[0]
        start, stop, step = key.indices(len(self))
        assert step == 1
        return self._read(start, max(start, stop))


class Stored(_Sliced):
    """An array of one dimension that fills a file; what is asked for is read, in any thread.

    Not mapped: the first touch of a mapped page makes the kernel read up to a hundred times as much
    around it, in vain where samples lie in random order; the pages count as this process's memory;
    and a disk that fails ends the process by a signal where reading raises OSError.
    """

    def __init__(self, file: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._stream = file.open("rb", buffering=0)
        self.nbytes = os.fstat(self._stream.fileno()).st_size

    def __del__(self) -> None:
        if hasattr(self, "_stream"):  # else it did not open
            self._stream.close()

    def __len__(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def expect(self, start: int, stop: int) -> None:
        """Say that these entries are read next: a disk finds many together sooner than in turn."""
        if sys.platform == "linux":  # others read ahead as they like
            size = self.dtype.itemsize
            where = start * size, (stop - start) * size
            os.posix_fadvise(self._stream.fileno(), *where, os.POSIX_FADV_WILLNEED)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """The caller's own."""
        entries = np.empty(stop - start, self.dtype)
        left, offset = entries.view(np.uint8).data, start * self.dtype.itemsize
        while left:
            count = os.preadv(self._stream.fileno(), [left], offset)
            if not count:
                raise OSError(f"{self._stream.name} has become shorter since it was opened")
            left, offset = left[count:], offset + count
        return entries


class Joined(_Sliced):
    """Arrays of one dimension and one dtype, one after another; nothing is read beforehand."""

    def __init__(
        self, arrays: Sequence[NDArray[Any] | Stored], shifts: Sequence[int] | None = None
    ) -> None:
        """shifts: what is added to the entries of each array, if anything."""
        self._arrays = arrays
        self._shifts = shifts or [0] * len(arrays)
        self._starts = [0, *accumulate(map(len, arrays))]

    def __len__(self) -> int:
        return self._starts[-1]

    def expect(self, start: int, stop: int) -> None:
        """As Stored.expect, of arrays that are stored."""
        for number, part in self._parts(start, stop):
            array = self._arrays[number]
            assert isinstance(array, Stored)
            array.expect(part.start, part.stop)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """A view if all lies in one array."""
        pieces = []
        for number, part in self._parts(start, stop):
            piece, shift = self._arrays[number][part.start : part.stop], self._shifts[number]
            pieces.append(piece + shift if shift else piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """(array, its entries) for each array in which some of these lie; one if there are none."""
        first = min(bisect_right(self._starts, start), len(self._arrays)) - 1
        for number in range(first, len(self._arrays)):
            offset, end = self._starts[number : number + 2]
            yield number, range(max(0, start - offset), max(0, min(stop, end) - offset))
            if stop <= end:
                break


Array = NDArray[Any] | Joined


def join(arrays: Sequence[NDArray[Any]], shifts: Sequence[int] | None = None) -> Array:
    """The arrays as one; an array that is alone as it is."""
    return arrays[0] if len(arrays) == 1 else Joined(arrays, shifts)
