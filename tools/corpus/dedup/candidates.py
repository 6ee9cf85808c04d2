"""Rows of the index with equal keys: equal texts, equal ids, and candidate pairs.

Each task looks at one part, a column of the index and a range of its keys.  A candidate is a pair
of documents that share a bucket of a band and have similar sketches.  A pair is one uint64, the
smaller number in its upper half.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus import external
from tools.corpus.compiled import mix
from tools.corpus.dedup.index import Index, Part
from tools.corpus.dedup.signatures import PERMUTATIONS
from tools.corpus.external import Numbers, Words

ROW_BYTES = 64  # memory of a row while it is grouped: key, number, order, gathered data
NAME_BYTES = 700  # memory of a row whose id is read
STAND_IN = np.dtype([("number", "<i8"), ("other", "<i8")])

AT_ONCE = 1 << 20  # pairs examined at a time
HALF = np.uint64(32)
LOW = np.uint64((1 << 32) - 1)
PIECE, ROUNDS = 128, 4  # documents in a piece of a split bucket; orders that it is split in
LEEWAY = 4.5  # standard deviations by which a pair at the threshold may agree less by chance


def find_copies(folder: Path, index: Index, part: Part) -> int:
    """Write (number, first document of the same normalised text) for all but the first.

    Rows are sorted by number.  Returns how many there are.
    """
    members, _ = external.group(*index.read_part(part))
    copies = np.empty(0, STAND_IN)
    if len(members):
        distinct, inverse = np.unique(members, return_inverse=True)
        digests = index.gather(distinct, "documents")["digest"][inverse]
        order = np.lexsort((members, digests[:, 1], digests[:, 0]))
        members, digests = members[order], digests[order]
        later = np.append(False, np.all(digests[1:] == digests[:-1], axis=1))
        heads = np.maximum.accumulate(np.where(later, 0, np.arange(len(members))))
        copies = np.empty(int(later.sum()), STAND_IN)
        copies["number"], copies["other"] = members[later], members[heads[later]]
    return _save_sorted(folder, part, copies)


def find_equal_ids(folder: Path, index: Index, part: Part) -> int:
    """Write (number, k) of the documents whose id a previous one has; it becomes ID-k.

    Documents of an id are sorted by the digest of their normalised text, then in the order of the
    input.  k is 1, 2, ..., without those for which some document has the id ID-k of its own.
    """
    members, starts = external.group(*index.read_part(part))
    renamed: list[tuple[int, int]] = []
    again: list[tuple[int, str, int, int]] = []  # number, id, k, how many have the id
    if len(members):
        distinct, inverse = np.unique(members, return_inverse=True)
        digests = index.gather(distinct, "documents")["digest"][inverse].tolist()
        ids = [name for name, _ in index.names(distinct)]
        for start, end in itertools.pairwise(starts.tolist()):
            same: dict[str, list[int]] = defaultdict(list)
            for place in range(start, end):
                same[ids[inverse[place]]].append(place)
            for name, places in same.items():
                places.sort(key=lambda place: (digests[place], members[place]))
                for k, place in enumerate(places[1:], start=1):
                    again.append((int(members[place]), name, k, len(places)))
    while again:
        taken = index.has_ids([f"{name}-{k}" for _, name, k, _ in again])
        further = []
        for (number, name, k, count), is_taken in zip(again, taken, strict=True):
            if is_taken:
                further.append((number, name, k + count, count))
            else:
                renamed.append((number, k))
        again = further
    return _save_sorted(folder, part, np.array(renamed, STAND_IN))


def _save_sorted(folder: Path, part: Part, rows: NDArray[Any]) -> int:
    external.save(folder / f"{part.name}.npy", rows[np.argsort(rows["number"])])
    return len(rows)


def look_up(files: Sequence[Path], numbers: Numbers, missing: Numbers) -> Numbers:
    """Values of "other" in STAND_IN files for these numbers; `missing` if a number is not there."""
    found = missing.copy()
    for file in files:
        rows = external.mapped(file)
        if not len(rows) or not len(numbers):
            continue
        places = np.minimum(np.searchsorted(rows["number"], numbers), len(rows) - 1)
        inside = rows["number"][places] == numbers
        found[inside] = rows["other"][places[inside]]
    return found


def pack(a: Numbers, b: Numbers) -> Words:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return (low.astype(np.uint64) << HALF) | high.astype(np.uint64)


def unpack(pairs: Words) -> tuple[Numbers, Numbers]:
    return (pairs >> HALF).astype(np.int64), (pairs & LOW).astype(np.int64)


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
    keys, numbers = index.read_part(part)
    distinct = look_up(copies, numbers, numbers) == numbers
    members, starts = external.group(keys[distinct], numbers[distinct])
    sizes = np.diff(starts)
    buckets = Buckets(index, members, jaccard)
    found = buckets.all_pairs(starts, limit, part.column)
    files, pairs = write_runs(folder, part.name, found, memory // 8)
    return {
        "pairs": pairs,
        "files": files,
        "split": int((sizes > limit).sum()),
        "largest": int(sizes.max(initial=0)),
    }


def write_runs(folder: Path, name: str, found: Iterator[Words], most: int) -> tuple[list[str], int]:
    """Write pairs in sorted runs of about `most` bytes.  Returns (names of the files, pairs)."""
    files: list[str] = []
    count = 0
    while True:
        parts: list[Words] = []
        size = 0
        for part in found:
            parts.append(part)
            size += part.nbytes
            if size > most:
                break
        if not size:
            return files, count
        pairs = np.unique(np.concatenate(parts))
        files.append(f"{name}-{len(files):04}.npy")
        external.save(folder / files[-1], pairs)
        count += len(pairs)


class Buckets:
    """The members of the buckets of a part, and the sketches that tell which may be alike."""

    def __init__(self, index: Index, members: Numbers, jaccard: float) -> None:
        self._index = index
        self._members = members
        if len(members):
            distinct, inverse = np.unique(members, return_inverse=True)
            self._bits = index.gather(distinct, "sketches")[inverse]
        # Each bit of two documents agrees with probability (1 + J) / 2: always where the values of
        # the signatures do, otherwise half the time.
        p = (1 + jaccard) / 2
        deviation = float(np.sqrt(PERMUTATIONS * p * (1 - p)))
        self._most_different = PERMUTATIONS - int(PERMUTATIONS * p - LEEWAY * deviation)

    def all_pairs(self, starts: Numbers, limit: int, salt: int) -> Iterator[Words]:
        """The pairs of all buckets; a bucket of more than `limit` documents is split."""
        sizes = np.diff(starts)
        for size in np.unique(sizes).tolist():
            same_size = starts[:-1][sizes == size][:, None] + np.arange(size)
            if size <= limit:
                yield from self.pairs(same_size)
                continue
            for bucket in same_size:
                for piece in self.split(bucket, salt, min(PIECE, limit)):
                    yield from self.pairs(piece[None])

    def pairs(self, places: Numbers) -> Iterator[Words]:
        """All pairs within the groups [n, size] whose sketches are similar."""
        left, right = np.triu_indices(places.shape[1], 1)
        height = max(1, AT_ONCE // len(left))
        for row, column in itertools.product(
            range(0, len(places), height), range(0, len(left), AT_ONCE)
        ):
            rows, columns = places[row : row + height], slice(column, column + AT_ONCE)
            a, b = rows[:, left[columns]].ravel(), rows[:, right[columns]].ravel()
            different = np.bitwise_count(self._bits[a] ^ self._bits[b]).sum(axis=1)
            alike = different <= self._most_different
            yield pack(self._members[a[alike]], self._members[b[alike]])

    def split(self, bucket: Numbers, salt: int, size: int) -> Iterator[Numbers]:
        """The bucket in pieces of up to `size`, in each of ROUNDS orders; depends only on content.

        An order sorts by the sketches with their bits permuted at random: similar documents are
        near each other in most orders.  Another salt, that is band, gives other orders, so that
        pairs separated here are together there.
        """
        bits = np.unpackbits(self._bits[bucket].view(np.uint8), axis=1)
        digests = self._index.gather(self._members[bucket], "documents")["digest"][:, 0]
        for number in range(ROUNDS):
            random = np.random.default_rng([salt, number])
            shuffled = np.ascontiguousarray(bits[:, random.permutation(PERMUTATIONS)])
            words = np.packbits(shuffled, axis=1).view(">u8")
            ties = mix(digests ^ random.integers(1 << 63, dtype=np.uint64))
            order = np.lexsort((ties, words[:, 1], words[:, 0]))
            for start in range(0, len(order), size):
                if len(piece := order[start : start + size]) > 1:
                    yield bucket[piece]


def bounds_of(files: Sequence[Path], pairs: int, most: int) -> list[int]:
    """First documents of ranges in which about `most` pairs begin, and the end of all ranges.

    pairs: number in all files.  A document's pairs are never in two ranges.
    """
    ranges = max(1, -(-pairs // max(1, most)))
    stride = max(1, most // 64)
    sample = [external.mapped(file)[::stride] for file in files]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *sample])) >> HALF
    cuts = ordered[[len(ordered) * k // ranges for k in range(1, ranges)]] if pairs else []
    return [0, *sorted({int(cut) for cut in cuts} - {0}), 1 << 32]


def merge_pairs(folder: Path, name: str, files: Sequence[Path], first: int, last: int) -> int:
    """Write the pairs that begin in [first, last), each once, and the documents in them."""
    found = [np.empty(0, np.uint64)]
    for file in files:
        run = external.mapped(file)
        found.append(external.read(run, external.span(run, first << 32, last << 32)))
    pairs = np.unique(np.concatenate(found))
    external.save(folder / f"{name}.npy", pairs)
    external.save(folder / f"{name}.needed.npy", np.unique(np.concatenate(unpack(pairs))))
    return len(pairs)
