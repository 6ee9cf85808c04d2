"""Equal keys among more rows than fit into memory: sorted runs on disk, read one range at a time.

A run is a .npy file of sorted keys, uint64 [n] or [columns, n], with each column sorted by itself
or by the first.  Tasks write runs of as many rows as fit; later tasks read one range of the keys
(a part) from all runs, where equal keys are then side by side.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
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


# Repeats among 128-bit hashes.  Each unit of work writes the hashes of its items in sorted runs;
# each part is read from all units, which shows its repeats; each unit reads back which of its
# items, by their number in it (their place), are repeats.

ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
RUN = 1 << 19  # hashes sorted at a time while a unit writes them
BLOCK = 1 << 10  # places read at a time from each part


def write_rows(folder: Path, unit: str, parts: int, hashes: Iterable[bytes]) -> None:
    """Write a unit's hashes, 16 bytes each, in the order of its items.

    Files: the rows, only the first of equal ones in a run; their bounds by run and part, int64
    [runs + 1, parts + 1], an empty run first; the places of the other rows, so that no part grows
    with hashes that repeat often.
    """
    hashes, place, bounds = iter(hashes), 0, [np.zeros(parts + 1, np.int64)]
    edges = np.array([KEYS * part // parts for part in range(1, parts)], np.uint64)
    with (
        scratch_writer(folder / f"{unit}.rows") as rows,
        scratch_writer(folder / f"{unit}.repeats") as repeats,
    ):
        while run := list(itertools.islice(hashes, RUN)):
            found = np.empty(len(run), ROW)
            found["high"], found["low"] = np.frombuffer(b"".join(run), "<u8").reshape(-1, 2).T
            found["place"] = np.arange(place, place + len(run))
            found = found[np.lexsort((found["low"], found["high"]))]
            first = is_first(found)
            rows.write(found[first].tobytes())
            repeats.write(np.sort(found["place"][~first]).tobytes())
            cuts = np.searchsorted(found["high"][first], edges)
            bounds.append(bounds[-1][-1] + np.array([0, *cuts, first.sum()], np.int64))
            place += len(run)
    save(folder / f"{unit}.bounds.npy", np.array(bounds))


def is_first(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row, sorted by hash, differs from the previous one: [n]."""
    first = np.ones(len(rows), bool)
    first[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
    return first


def find_repeats(folder: Path, part: int, units: Sequence[str]) -> None:
    """Write the places of a part's repeats, all but the first of equal items, unit by unit."""
    pieces = [_read_rows(folder, unit, part) for unit in units]
    owners = np.repeat(np.arange(len(units), dtype=np.uint32), [len(rows) for rows in pieces])
    rows = np.concatenate(pieces)
    del pieces
    order = np.lexsort((rows["low"], rows["high"]))  # stable: units, runs and places stay in order
    repeated = np.sort(order[~is_first(rows[order])])  # so that the owners are sorted
    places, owners = rows["place"][repeated], owners[repeated]
    with scratch_writer(folder / f"part-{part:05}.repeats") as file:
        file.write(places[np.lexsort((places, owners))].tobytes())
    bounds = np.searchsorted(owners, np.arange(len(units) + 1))
    save(folder / f"part-{part:05}.bounds.npy", bounds)


def _read_rows(folder: Path, unit: str, part: int) -> NDArray[Any]:
    """The rows of a unit that are in the part, run after run."""
    bounds = mapped(folder / f"{unit}.bounds.npy")[:, part : part + 2].tolist()
    file = folder / f"{unit}.rows"
    return np.concatenate(
        [
            np.fromfile(file, ROW, stop - start, offset=start * ROW.itemsize)
            for start, stop in bounds
        ]
    )


def repeats_of(folder: Path, unit: str, number: int, parts: int) -> Iterator[int]:
    """Places of the unit's items that are repeats, in order.

    number: index of the unit among those that find_repeats was given.
    """
    own = folder / f"{unit}.repeats"
    streams = [_read_places(own, 0, own.stat().st_size // 8)]
    for part in range(parts):
        start, stop = mapped(folder / f"part-{part:05}.bounds.npy")[number : number + 2].tolist()
        streams.append(_read_places(folder / f"part-{part:05}.repeats", start, stop))
    return heapq.merge(*streams)


def _read_places(file: Path, start: int, stop: int) -> Iterator[int]:
    """The file's numbers from `start` to before `stop`; one block is in memory at a time."""
    for at in range(start, stop, BLOCK):
        yield from np.fromfile(file, "<u8", min(BLOCK, stop - at), offset=8 * at).tolist()
