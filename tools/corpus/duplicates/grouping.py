"""Rows with equal keys: one column of the index and one range of its keys at a time."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.corpus.duplicates.index import ID, PREFIXES, Index, Numbers, id_key, mapped, save
from tools.corpus.shingles import Words

ROW_BYTES = 64  # memory of a row while it is grouped: key, number, order, gathered data
NAME_BYTES = 700  # memory of a row whose id is read


class Part(NamedTuple):
    """A column's keys whose first byte is in [first, last)."""

    column: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.column:02}-{self.first:03}"


def parts_of(columns: range, rows: int, memory: int, row_bytes: int = ROW_BYTES) -> list[Part]:
    """One part per column, or more so that a part's rows fit the memory."""
    count = 1
    while count < PREFIXES and rows * row_bytes > memory * count:
        count *= 2
    step = PREFIXES // count
    return [Part(c, first, first + step) for c in columns for first in range(0, PREFIXES, step)]


def read_part(index: Index, part: Part) -> tuple[Words, Numbers]:
    """The keys of all blocks in the part's range, and the numbers of their documents."""
    keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for block, first in enumerate(index.firsts[:-1].tolist()):
        bounds = index.array(block, "bounds")[part.column]
        where = slice(int(bounds[part.first]), int(bounds[part.last]))
        keys.append(index.read(block, "keys", part.column, where))
        numbers.append(index.read(block, "order", part.column, where) + np.int64(first))
    return np.concatenate(keys), np.concatenate(numbers)


def group(keys: Words, numbers: Numbers) -> tuple[Numbers, NDArray[np.int64]]:
    """Documents whose key others have too: (members, starts), groups one after the other.

    Groups are sorted by key, members of a group by number; starts has the index of each group's
    first member, and the end.
    """
    if len(keys) < 2:
        return numbers[:0], np.zeros(1, np.int64)
    order = np.argsort(keys)
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    member = np.append(same, False) | np.append(False, same)
    first = member & ~np.append(False, same)
    members = numbers[order[member]]
    starts = np.append(np.flatnonzero(first[member]), len(members))
    labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return members[np.lexsort((members, labels))], starts


def by_size(starts: NDArray[np.int64], least: int = 2) -> Iterator[NDArray[np.int64]]:
    """Indices of all members: one matrix [groups, size] for each size of groups."""
    sizes = np.diff(starts)
    for size in np.unique(sizes).tolist():
        if size >= least:
            yield starts[:-1][sizes == size][:, None] + np.arange(size)


STAND_IN = np.dtype([("number", "<i8"), ("other", "<i8")])


def find_copies(folder: Path, index: Index, part: Part) -> int:
    """Write (number, first document of the same normalised text) for all but the first.

    Rows are sorted by number.  Returns how many there are.
    """
    members, _ = group(*read_part(index, part))
    found = [np.empty(0, STAND_IN)]
    if len(members):
        distinct, inverse = np.unique(members, return_inverse=True)
        digests = index.gather(distinct, "documents")["digest"][inverse]
        order = np.lexsort((members, digests[:, 1], digests[:, 0]))
        same = np.all(digests[order][1:] == digests[order][:-1], axis=1)
        heads = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(order))))
        later = np.append(False, same)
        copies = np.empty(int(later.sum()), STAND_IN)
        copies["number"], copies["other"] = members[order[later]], members[order[heads[later]]]
        found.append(copies)
    return _save_sorted(folder, part, np.concatenate(found))


def find_equal_ids(folder: Path, index: Index, part: Part) -> int:
    """Write (number, k) of the documents whose id a previous one has; it becomes ID-k.

    Documents of an id are sorted by the digest of their normalised text, then in the order of the
    input.  k is 1, 2, ..., without those for which some document has the id ID-k of its own.
    """
    members, starts = group(*read_part(index, part))
    if not len(members):
        return _save_sorted(folder, part, np.empty(0, STAND_IN))
    distinct, inverse = np.unique(members, return_inverse=True)
    digests = index.gather(distinct, "documents")["digest"][inverse].tolist()
    ids = [name for name, _ in index.names(distinct)]
    again: list[tuple[int, str, int, int]] = []  # number, id, k, how many have the id
    for start, end in itertools.pairwise(starts.tolist()):
        same: dict[str, list[int]] = defaultdict(list)
        for place in range(start, end):
            same[ids[inverse[place]]].append(place)
        for name, places in same.items():
            places.sort(key=lambda place: (digests[place], members[place]))
            numbered = enumerate(places[1:], start=1)
            again += [(int(members[place]), name, k, len(places)) for place, k in
                      ((place, k) for k, place in numbered)]  # fmt: skip
    renamed = _numbered(index, again)
    return _save_sorted(folder, part, np.array(renamed, STAND_IN))


def _numbered(index: Index, again: list[tuple[int, str, int, int]]) -> list[tuple[int, int]]:
    """[(number, k)]: k is larger where some document has the id ID-k of its own."""
    done: list[tuple[int, int]] = []
    while again:
        taken = ids_there(index, [f"{name}-{k}" for _, name, k, _ in again])
        done += [(each[0], each[2]) for each, is_there in zip(again, taken, strict=True)
                 if not is_there]  # fmt: skip
        again = [
            (number, name, k + count, count)
            for (number, name, k, count), is_there in zip(again, taken, strict=True)
            if is_there
        ]
    return done


def ids_there(index: Index, names: Sequence[str]) -> NDArray[np.bool_]:
    """Whether some record has each of these ids; compares hashes."""
    wanted = np.array([id_key(name) for name in names], np.uint64)
    found = np.zeros(len(wanted), bool)
    for block in range(len(index.blocks)):
        keys = index.array(block, "keys")[ID]
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found |= keys[places] == wanted
    return found


def _save_sorted(folder: Path, part: Part, rows: NDArray[Any]) -> int:
    save(folder / f"{part.name}.npy", rows[np.argsort(rows["number"])])
    return len(rows)


def look_up(files: Sequence[Path], numbers: Numbers, missing: Numbers) -> Numbers:
    """Values of "other" in STAND_IN files for these numbers; `missing` if a number is not there."""
    found = missing.copy()
    for file in files:
        rows = mapped(file)
        if not len(rows) or not len(numbers):
            continue
        places = np.minimum(np.searchsorted(rows["number"], numbers), len(rows) - 1)
        inside = rows["number"][places] == numbers
        found[inside] = rows["other"][places[inside]]
    return found
