"""Candidate pairs: documents that share a bucket of a band and look alike in their sketches.

A pair is one uint64, the smaller number in its upper half.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.duplicates.grouping import Part, by_size, group, look_up, read_part
from tools.corpus.duplicates.index import SPARE_BITS, Index, Numbers, save
from tools.corpus.shingles import PERMUTATIONS, Words

AT_ONCE = 1 << 20  # pairs looked at at a time
HALF = np.uint64(32)
LOW = np.uint64((1 << 32) - 1)
LEEWAY = 4.5  # standard deviations that a pair at the threshold may look less alike by chance


def pack(a: Numbers, b: Numbers) -> Words:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return (low.astype(np.uint64) << HALF) | high.astype(np.uint64)


def unpack(pairs: Words) -> tuple[Numbers, Numbers]:
    return (pairs >> HALF).astype(np.int64), (pairs & LOW).astype(np.int64)


def least_agreement(jaccard: float) -> int:
    """Bits of a sketch in which a pair has to agree to be a candidate.

    Of two documents each bit agrees with probability p = (1 + J) / 2: always where the values of
    the signatures do, else half the time.
    """
    p = (1 + jaccard) / 2
    deviation = float(np.sqrt(PERMUTATIONS * p * (1 - p)))
    return int(PERMUTATIONS * p - LEEWAY * deviation)


def find_pairs(
    folder: Path, index: Index, part: Part, copies: Sequence[Path], jaccard: float, limit: int
) -> dict[str, int]:
    """Write the candidate pairs of one part of a band, sorted; counts of pairs and buckets.

    copies: files of the documents for which an equal one stands.  A bucket of more than `limit`
    documents is split.
    """
    keys, numbers = read_part(index, part)
    distinct = look_up(copies, numbers, numbers) == numbers
    members, starts = group(keys[distinct], numbers[distinct])
    sketches = _sketches(index, members)
    buckets = Buckets(members, sketches, least_agreement(jaccard))
    found = [np.empty(0, np.uint64)]
    split = 0
    for places in by_size(starts):
        if places.shape[1] <= limit:
            found += buckets.pairs(places)
            continue
        split += len(places)
        for bucket in places:
            for piece in buckets.split(bucket, limit):
                found += buckets.pairs(piece[None])
    pairs = np.unique(np.concatenate(found))
    save(folder / f"{part.name}.npy", pairs)
    largest = int(np.diff(starts).max(initial=0))
    return {"pairs": len(pairs), "split": split, "largest": largest}


class Buckets:
    """The members of the buckets of a part, and what tells whether two may be alike."""

    def __init__(self, members: Numbers, sketches: NDArray[Any], agreement: int) -> None:
        self._members = members
        self._bits = sketches["bits"]
        self._spare = sketches["spare"]
        self._most_different = PERMUTATIONS - agreement

    def pairs(self, places: NDArray[np.int64]) -> list[Words]:
        """Of the groups [n, size], all pairs within that look alike."""
        size = places.shape[1]
        left, right = np.triu_indices(size, 1)
        found = []
        for rows, columns in _blocks(len(places), len(left)):
            a = places[rows, left[columns]].ravel()
            b = places[rows, right[columns]].ravel()
            different = np.bitwise_count(self._bits[a] ^ self._bits[b]).sum(axis=1)
            alike = different <= self._most_different
            found.append(pack(self._members[a[alike]], self._members[b[alike]]))
        return found

    def split(
        self, places: NDArray[np.int64], limit: int, shift: int = 2 * SPARE_BITS
    ) -> Iterator[NDArray[np.int64]]:
        """The bucket in pieces of up to `limit`, by the values that no band has; by content."""
        if len(places) <= limit:
            if len(places) > 1:
                yield places
        elif shift < 0:
            order = np.lexsort((*self._bits[places].T, self._spare[places]))
            for piece in np.split(places[order], range(limit, len(places), limit)):
                yield from self.split(piece, limit)
        else:
            values = self._spare[places] >> np.uint64(shift) & np.uint64((1 << SPARE_BITS) - 1)
            order = np.argsort(values, kind="stable")
            cuts = np.flatnonzero(np.diff(values[order])) + 1
            for piece in np.split(places[order], cuts):
                yield from self.split(piece, limit, shift - SPARE_BITS)


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """A table in blocks of up to AT_ONCE cells."""
    height = max(1, AT_ONCE // columns)
    for row in range(0, rows, height):
        for column in range(0, columns, AT_ONCE):
            yield slice(row, row + height), slice(column, column + AT_ONCE)


def _sketches(index: Index, members: Numbers) -> NDArray[Any]:
    if not len(members):
        return index.array(0, "sketches")[:0]
    distinct, inverse = np.unique(members, return_inverse=True)
    return index.gather(distinct, "sketches")[inverse]


def bounds_of(files: Sequence[Path], pairs: int, most: int) -> list[int]:
    """First documents of ranges in which about `most` pairs begin, and the end of all.

    pairs: in all files.  A document's pairs are never in two ranges.
    """
    ranges = max(1, -(-pairs // most))
    stride = max(1, most // 64)
    sample = [np.load(file, mmap_mode="r")[::stride] for file in files if _filled(file)]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *sample])) >> HALF
    cuts = ordered[[len(ordered) * k // ranges for k in range(1, ranges)]] if pairs else []
    return [0, *sorted({int(cut) for cut in cuts} - {0}), 1 << 32]


def _filled(file: Path) -> bool:
    """Whether there is anything behind the header of an array; nothing cannot be mapped."""
    return file.stat().st_size > 128


def merge_pairs(folder: Path, name: str, files: Sequence[Path], first: int, last: int) -> int:
    """Write the pairs that begin in [first, last), each once, and the documents they need."""
    parts = [np.empty(0, np.uint64)]
    edges = np.array([first, last - 1], np.uint64) << HALF | np.array([0, LOW], np.uint64)
    for file in filter(_filled, files):
        pairs = np.load(file, mmap_mode="r")
        start = np.searchsorted(pairs, edges[0])
        parts.append(pairs[start : np.searchsorted(pairs, edges[1], "right")])
    pairs = np.unique(np.concatenate(parts))
    save(folder / f"{name}.npy", pairs)
    save(folder / f"{name}.needed.npy", np.unique(np.concatenate(unpack(pairs))))
    return len(pairs)
