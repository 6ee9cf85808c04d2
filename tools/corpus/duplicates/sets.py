"""Shingle sets of the documents that are in a candidate pair, and exact similarities."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import atomic_writer
from tools.corpus.compiled import HAVE_NUMBA, compiled
from tools.corpus.duplicates.index import Index, Numbers, mapped, save
from tools.corpus.duplicates.pairs import unpack
from tools.corpus.shingles import Shingler, Words

EDGE = np.dtype([("a", "<i8"), ("b", "<i8"), ("shared", "<i8"), ("union", "<i8")])
BIN = 20  # bins of the histogram of similarities, from 0 to 1


def write_sets(
    folder: Path, index: Index, unit: int, needed: Sequence[Path], shingler: Shingler
) -> int:
    """Write the sets of a unit's documents that are in some file of `needed`.

    Two files: the hashes, set after set, and int64 [2, n + 1]: the documents' numbers (then -1),
    and where the set of each begins (then where the last ends).
    """
    first, last = index.unit_firsts[unit : unit + 2]
    wanted = [np.empty(0, np.int64)]
    for file in needed:
        numbers = mapped(file)
        wanted.append(numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, last)])
    numbers = np.unique(np.concatenate(wanted))
    ends = np.zeros(len(numbers) + 1, np.int64)
    with atomic_writer(folder / f"{index.units[unit].name}.sets") as file:
        for k, (_, text) in enumerate(index.documents(numbers)):
            hashes = shingler.shingle_set(text)
            file.write(hashes.tobytes())
            ends[k + 1] = ends[k] + len(hashes)
    save(folder / f"{index.units[unit].name}.npy", np.stack([np.append(numbers, -1), ends]))
    return len(numbers)


class Sets:
    """The sets that write_sets wrote, read on demand."""

    def __init__(self, folder: Path, index: Index, memory: int) -> None:
        self._folder = folder
        self._index = index
        self._memory = memory
        self._held: dict[int, Words] = {}
        self._bytes = 0
        self._places = lru_cache(maxsize=256)(self._read_places)

    def __getitem__(self, number: int) -> Words:
        found = self._held.get(number)
        if found is None:
            if self._bytes > self._memory:
                self._held.clear()
                self._bytes = 0
            found = self._held[number] = self._read(number)
            self._bytes += found.nbytes
        return found

    def _read(self, number: int) -> Words:
        unit = int(np.searchsorted(self._index.unit_firsts, number, "right")) - 1
        numbers, ends = self._places(unit)
        place = int(np.searchsorted(numbers[:-1], number))
        assert numbers[place] == number
        start, end = ends[place : place + 2].tolist()
        path = self._folder / f"{self._index.units[unit].name}.sets"
        return np.fromfile(path, np.uint64, end - start, offset=8 * start)

    def _read_places(self, unit: int) -> NDArray[np.int64]:
        return np.load(self._folder / f"{self._index.units[unit].name}.npy")

    def compare(self, a: Numbers, b: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sizes of the intersections, sizes of the unions) of pairs of documents."""
        shared, union = np.empty(len(a), np.int64), np.empty(len(a), np.int64)
        for k, (left, right) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            ours, theirs = self[left], self[right]
            shared[k] = count_shared(ours, theirs)
            union[k] = len(ours) + len(theirs) - shared[k]
        return shared, union


def verify_pairs(
    folder: Path, pairs: Path, sets: Path, index: Index, threshold: Fraction, memory: int
) -> list[int]:
    """Write the pairs whose similarity is at least the threshold, compared in integers.

    Returns how many there are in each of BIN intervals from 0 to 1; the last includes 1.
    """
    a, b = unpack(np.load(pairs))
    shared, union = Sets(sets, index, memory).compare(a, b)
    met = shared * threshold.denominator >= union * threshold.numerator
    edges = np.empty(int(met.sum()), EDGE)
    for name, values in zip(EDGE.names or (), (a, b, shared, union), strict=True):
        edges[name] = values[met]
    save(folder / pairs.name, edges)
    bins = np.minimum(edges["shared"] * BIN // np.maximum(edges["union"], 1), BIN - 1)
    return np.bincount(bins, minlength=BIN).tolist()


def count_shared(a: Words, b: Words) -> int:
    """Number of values that two sorted arrays without repetition share."""
    if HAVE_NUMBA:
        return int(_count_shared(a, b))
    return len(np.intersect1d(a, b, assume_unique=True))


@compiled
def _count_shared(a: Words, b: Words) -> int:
    i, j, shared = 0, 0, 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]
        shared += x == y
        i += x <= y
        j += y <= x
    return shared
