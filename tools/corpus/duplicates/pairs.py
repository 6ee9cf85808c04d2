"""Candidate pairs: documents that share a bucket of a band and have similar sketches.

A pair is one uint64, the smaller number in its upper half.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.compiled import mix
from tools.corpus.duplicates.grouping import Part, by_size, group, look_up, read_part
from tools.corpus.duplicates.index import Index, Numbers, mapped, save
from tools.corpus.shingles import PERMUTATIONS, Words

AT_ONCE = 1 << 20  # pairs examined at a time
HALF = np.uint64(32)
LOW = np.uint64((1 << 32) - 1)
PIECE, ROUNDS = 128, 4  # documents in a piece of a split bucket; orders that it is split in
LEEWAY = 4.5  # standard deviations by which a pair at the threshold may agree less by chance


def pack(a: Numbers, b: Numbers) -> Words:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return (low.astype(np.uint64) << HALF) | high.astype(np.uint64)


def unpack(pairs: Words) -> tuple[Numbers, Numbers]:
    return (pairs >> HALF).astype(np.int64), (pairs & LOW).astype(np.int64)


def least_agreement(jaccard: float) -> int:
    """Bits of a sketch in which a pair has to agree to be a candidate.

    Each bit of two documents agrees with probability p = (1 + J) / 2: always where the values of
    the signatures do, otherwise half the time.
    """
    p = (1 + jaccard) / 2
    deviation = float(np.sqrt(PERMUTATIONS * p * (1 - p)))
    return int(PERMUTATIONS * p - LEEWAY * deviation)


def find_pairs(
    folder: Path,
    index: Index,
    part: Part,
    copies: Sequence[Path],
    jaccard: float,
    limit: int,
    memory: int,
) -> dict[str, Any]:
    """Write the candidate pairs of a part of a band, in sorted runs.  Returns facts of both.

    copies: files of the documents that an equal one represents.  A bucket of more than `limit`
    documents is split.
    """
    keys, numbers = read_part(index, part)
    distinct = look_up(copies, numbers, numbers) == numbers
    members, starts = group(keys[distinct], numbers[distinct])
    largest = int(np.diff(starts).max(initial=0))
    buckets = Buckets(index, members, least_agreement(jaccard), largest > limit)
    runs = Runs(folder, part.name, memory // 8)
    split = 0
    for places in by_size(starts):
        if places.shape[1] <= limit:
            runs.add(buckets.pairs(places))
            continue
        split += len(places)
        for bucket in places:
            for piece in buckets.split(bucket, part.column, min(PIECE, limit)):
                runs.add(buckets.pairs(piece[None]))
    return {**runs.close(), "split": split, "largest": largest}


class Runs:
    """Collects pairs, and writes them in sorted runs of up to `most` bytes."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self._folder = folder
        self._name = name
        self._most = most
        self._held: list[Words] = []
        self._bytes = 0
        self._files: list[str] = []
        self._pairs = 0

    def add(self, found: Iterable[Words]) -> None:
        for pairs in found:
            self._held.append(pairs)
            self._bytes += pairs.nbytes
            if self._bytes > self._most:
                self._write()

    def close(self) -> dict[str, Any]:
        """The number of pairs, and the names of the files."""
        if self._bytes:
            self._write()
        return {"pairs": self._pairs, "files": self._files}

    def _write(self) -> None:
        pairs = np.unique(np.concatenate(self._held))
        self._files.append(f"{self._name}-{len(self._files):04}.npy")
        save(self._folder / self._files[-1], pairs)
        self._pairs += len(pairs)
        self._held, self._bytes = [], 0


class Buckets:
    """The members of the buckets of a part, and the sketches that tell which may be alike."""

    def __init__(self, index: Index, members: Numbers, agreement: int, digests: bool) -> None:
        """digests: whether there is a bucket to split."""
        self._members = members
        self._most_different = PERMUTATIONS - agreement
        distinct, inverse = np.unique(members, return_inverse=True)
        if len(distinct):
            self._bits = index.gather(distinct, "sketches")[inverse]
        if digests:
            self._digests = index.gather(distinct, "documents")["digest"][inverse, 0]

    def pairs(self, places: NDArray[np.int64]) -> Iterator[Words]:
        """All pairs within the groups [n, size] whose sketches are similar."""
        left, right = np.triu_indices(places.shape[1], 1)
        for rows, columns in _blocks(len(places), len(left)):
            a = places[rows, left[columns]].ravel()
            b = places[rows, right[columns]].ravel()
            different = np.bitwise_count(self._bits[a] ^ self._bits[b]).sum(axis=1)
            alike = different <= self._most_different
            yield pack(self._members[a[alike]], self._members[b[alike]])

    def split(self, bucket: NDArray[np.int64], salt: int, size: int) -> Iterator[NDArray[np.int64]]:
        """The bucket in pieces of up to `size`, in each of ROUNDS orders; depends only on content.

        An order sorts by the sketches with their bits permuted at random: similar documents are
        near each other in most orders.  Another salt, that is band, gives other orders, so that
        pairs separated here are together there.
        """
        bits = np.unpackbits(self._bits[bucket].view(np.uint8), axis=1)
        for number in range(ROUNDS):
            random = np.random.default_rng([salt, number])
            shuffled = np.ascontiguousarray(bits[:, random.permutation(PERMUTATIONS)])
            words = np.packbits(shuffled, axis=1).view(">u8")
            ties = mix(self._digests[bucket] ^ random.integers(1 << 63, dtype=np.uint64))
            order = np.lexsort((ties, words[:, 1], words[:, 0]))
            for start in range(0, len(order), size):
                if len(piece := order[start : start + size]) > 1:
                    yield bucket[piece]


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of up to AT_ONCE cells of a table."""
    height = max(1, AT_ONCE // columns)
    for row in range(0, rows, height):
        for column in range(0, columns, AT_ONCE):
            yield slice(row, row + height), slice(column, column + AT_ONCE)


def bounds_of(files: Sequence[Path], pairs: int, most: int) -> list[int]:
    """First documents of ranges in which about `most` pairs begin, and the end of all ranges.

    pairs: number in all files.  A document's pairs are never in two ranges.
    """
    ranges = max(1, -(-pairs // max(1, most)))
    stride = max(1, most // 64)
    sample = [mapped(file)[::stride] for file in files]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *sample])) >> HALF
    cuts = ordered[[len(ordered) * k // ranges for k in range(1, ranges)]] if pairs else []
    return [0, *sorted({int(cut) for cut in cuts} - {0}), 1 << 32]


def merge_pairs(folder: Path, name: str, files: Sequence[Path], first: int, last: int) -> int:
    """Write the pairs that begin in [first, last), each once, and the documents in them."""
    parts = [np.empty(0, np.uint64)]
    edges = np.array([first, last - 1], np.uint64) << HALF | np.array([0, LOW], np.uint64)
    for file in files:
        pairs = mapped(file)
        start = np.searchsorted(pairs, edges[0])
        parts.append(pairs[start : np.searchsorted(pairs, edges[1], "right")])
    pairs = np.unique(np.concatenate(parts))
    save(folder / f"{name}.npy", pairs)
    save(folder / f"{name}.needed.npy", np.unique(np.concatenate(unpack(pairs))))
    return len(pairs)
