"""Shingle sets of the documents that are in a candidate pair, and exact similarities."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np

from tools.corpus import external
from tools.corpus.compiled import compiled
from tools.corpus.dedup.candidates import unpack
from tools.corpus.dedup.index import Index
from tools.corpus.dedup.signatures import Shingler
from tools.corpus.external import Numbers, Words
from tools.corpus.files import scratch_writer

EDGE = np.dtype([("a", "<i8"), ("b", "<i8"), ("shared", "<i8"), ("union", "<i8")])
BIN = 20  # bins of the histogram of similarities, from 0 to 1


def write_sets(
    folder: Path, index: Index, unit: int, needed: Sequence[Path], shingler: Shingler
) -> int:
    """Write the sets of a unit's documents that are in some file of `needed`.

    Two files: the hashes, set after set, and int64 [2, n + 1]: the documents' numbers (then -1),
    and where the set of each begins (then where the last ends).
    """
    first, last = index.unit_firsts[unit : unit + 2].tolist()
    wanted = [np.empty(0, np.int64)]
    for file in needed:
        found = external.mapped(file)
        wanted.append(found[external.span(found, first, last)])
    numbers = np.unique(np.concatenate(wanted))
    name = index.units[unit].name
    ends = np.zeros(len(numbers) + 1, np.int64)
    with scratch_writer(folder / f"{name}.sets") as file:
        for k, (_, text) in enumerate(index.texts(numbers)):
            hashes = shingler.shingle_set(text)
            file.write(hashes.tobytes())
            ends[k + 1] = ends[k] + len(hashes)
    external.save(folder / f"{name}.npy", np.stack([np.append(numbers, -1), ends]))
    return len(numbers)


class Sets:
    """The sets that write_sets wrote, read on demand; about `memory` bytes of them are kept."""

    def __init__(self, folder: Path, index: Index, memory: int) -> None:
        self._folder = folder
        self._index = index
        self._memory = memory
        self._kept: dict[int, Words] = {}
        self._bytes = 0
        self._places = lru_cache(maxsize=256)(np.load)

    def __getitem__(self, number: int) -> Words:
        found = self._kept.get(number)
        if found is None:
            if self._bytes > self._memory:
                self._kept.clear()
                self._bytes = 0
            found = self._kept[number] = self._read(number)
            self._bytes += found.nbytes
        return found

    def _read(self, number: int) -> Words:
        unit = int(np.searchsorted(self._index.unit_firsts, number, "right")) - 1
        path = self._folder / f"{self._index.units[unit].name}.sets"
        numbers, ends = self._places(path.with_suffix(".npy"))
        place = int(np.searchsorted(numbers[:-1], number))
        assert numbers[place] == number
        start, end = ends[place : place + 2].tolist()
        return np.fromfile(path, np.uint64, end - start, offset=8 * start)

    def compare(self, a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
        """(sizes of the intersections, sizes of the unions) of pairs of documents."""
        shared, union = np.empty(len(a), np.int64), np.empty(len(a), np.int64)
        for k, (left, right) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            ours, theirs = self[left], self[right]
            shared[k] = _count_shared(ours, theirs)
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
    external.save(folder / pairs.name, edges)
    bins = np.minimum(edges["shared"] * BIN // np.maximum(edges["union"], 1), BIN - 1)
    return np.bincount(bins, minlength=BIN).tolist()


@compiled
def _count_shared(a: Words, b: Words) -> int:
    """Number of values that two sorted arrays without repetition share."""
    i, j, shared = 0, 0, 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]
        shared += x == y
        i += x <= y
        j += y <= x
    return shared
