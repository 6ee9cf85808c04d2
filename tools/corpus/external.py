"""Equal keys among more rows than fit into memory: sorted runs on disk, read one range at a time.

A run is a .npy file of sorted keys, uint64 [n] or [columns, n], with each column sorted by itself
or by the first.  Tasks write runs of as many rows as fit; later tasks read one range of the keys
(a part) from all runs, where equal keys are then side by side.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.files import scratch_writer

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]

KEYS = 1 << 64
MOST_PARTS = 1 << 12


def save(path: Path, array: NDArray[Any]) -> None:
    with scratch_writer(path) as file:
        np.save(file, array, allow_pickle=False)


def mapped(path: Path) -> NDArray[Any]:
    """The array of a file, memory-mapped unless it is small: an empty one cannot be mapped."""
    return np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None)


def span(keys: NDArray[Any], start: int, stop: int) -> slice:
    """Where sorted keys are from `start` to `stop` - 1."""
    number = keys.dtype.type  # of another type, the whole array would be converted
    first = np.searchsorted(keys, number(start))
    return slice(int(first), int(np.searchsorted(keys, number(stop - 1), "right")))


def read(run: NDArray[Any], where: slice, column: int = 0) -> NDArray[Any]:
    """A range of a column of a `mapped` array, read from its file: mapped pages would count as
    memory held."""
    if not isinstance(run, np.memmap):
        return np.atleast_2d(run)[column, where]
    offset = run.offset + (column * run.shape[-1] + where.start) * run.itemsize
    return np.fromfile(str(run.filename), run.dtype, where.stop - where.start, offset=offset)


def count_parts(rows: int, memory: int, row_bytes: int = 80) -> int:
    """Number of parts, a power of 2, so that the rows of each fit into about `memory` bytes."""
    parts = 1
    while parts < MOST_PARTS and rows * row_bytes > memory * parts:
        parts *= 2
    return parts


def write_sorted(folder: Path, keys: Words) -> None:
    """Write keys [columns, n]: keys.npy, each column sorted, and order.npy, the row of each key."""
    order = np.argsort(keys, axis=1, kind="stable")
    save(folder / "keys.npy", np.take_along_axis(keys, order, axis=1))
    save(folder / "order.npy", order.astype(np.uint32))


def read_sorted(folder: Path, column: int, part: int, parts: int) -> tuple[Words, Numbers]:
    """(keys, their rows) of a part of a column that write_sorted wrote."""
    start, stop = (KEYS * at // parts for at in (part, part + 1))
    keys = mapped(folder / "keys.npy")
    where = span(keys[column], start, stop)
    rows = read(mapped(folder / "order.npy"), where, column).astype(np.int64)
    return read(keys, where, column), rows


def group(keys: Words, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """The rows whose key others have too: (members, starts), groups one after the other.

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
