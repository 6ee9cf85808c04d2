"""Finds repeats among many hashes, in bounded memory.

Each unit of work writes the hashes of its items, 128 bits each, in sorted runs.  A range of hashes
(a part) is then read from all units and sorted, which shows its repeats.  Each unit reads back
which of its items, by their number in it (their place), are repeats.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.data.files import atomic_writer

ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
RUN = 1 << 19  # hashes sorted at a time while a unit writes them
BLOCK = 1 << 10  # places read at a time from each part
ROW_MEMORY = 80  # bytes for each row of a part, in find_repeats
MOST_PARTS = 1 << 12


def count_parts(hashes: int, memory: int) -> int:
    """Number of parts, a power of 2, so that each of them fits into about `memory` bytes."""
    parts = 1
    while parts < MOST_PARTS and hashes * ROW_MEMORY > memory * parts:
        parts *= 2
    return parts


def write_rows(folder: Path, unit: str, parts: int, hashes: Iterable[bytes]) -> None:
    """Write a unit's hashes, 16 bytes each, in the order of its items.

    Files: the rows, only the first of equal ones in a run; their bounds by run and part, int64
    [runs + 1, parts + 1], an empty run first; the places of the other rows, so that no part grows
    with hashes that repeat often.
    """
    hashes, place, bounds = iter(hashes), 0, [np.zeros(parts + 1, np.int64)]
    with (
        atomic_writer(folder / f"{unit}.rows") as rows,
        atomic_writer(folder / f"{unit}.repeats") as repeats,
    ):
        while run := list(itertools.islice(hashes, RUN)):
            first, others = sort_run(b"".join(run), place)
            rows.write(first.tobytes())
            repeats.write(others.tobytes())
            bounds.append(bounds[-1][-1] + part_bounds(first["high"], parts))
            place += len(run)
    save(folder / f"{unit}.bounds.npy", np.array(bounds))


def sort_run(hashes: bytes, place: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows [n] sorted by hash, only the first of equal ones; sorted places of the others).

    place: that of the first hash.
    """
    pairs = np.frombuffer(hashes, "<u8").reshape(-1, 2)
    rows = np.empty(len(pairs), ROW)
    rows["high"], rows["low"] = pairs[:, 0], pairs[:, 1]
    rows["place"] = np.arange(place, place + len(pairs))
    rows = rows[np.lexsort((rows["low"], rows["high"]))]
    first = is_first(rows)
    return rows[first], np.sort(rows["place"][~first])


def is_first(rows: np.ndarray) -> np.ndarray:
    """Whether each row, sorted by hash, differs from the previous one: bool [n]."""
    first = np.ones(len(rows), bool)
    first[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
    return first


def part_bounds(high: np.ndarray, parts: int) -> np.ndarray:
    """Where in sorted hashes each part begins, and the end: int64 [parts + 1]."""
    starts = np.array([(k << 64) // parts for k in range(parts)], np.uint64)
    return np.append(np.searchsorted(high, starts), len(high)).astype(np.int64)


def find_repeats(folder: Path, part: int, units: Sequence[str]) -> None:
    """Write the places of a part's repeats, all but the first of equal items, unit by unit."""
    pieces = [_read_rows(folder, unit, part) for unit in units]
    owners = np.repeat(np.arange(len(units), dtype=np.uint32), [len(rows) for rows in pieces])
    rows = np.concatenate(pieces)
    del pieces
    order = np.lexsort((rows["low"], rows["high"]))  # stable: units, runs and places stay in order
    repeated = np.sort(order[~is_first(rows[order])])  # so that the owners are sorted
    places, owners = rows["place"][repeated], owners[repeated]
    with atomic_writer(folder / f"part-{part:05}.repeats") as file:
        file.write(places[np.lexsort((places, owners))].tobytes())
    bounds = np.searchsorted(owners, np.arange(len(units) + 1))
    save(folder / f"part-{part:05}.bounds.npy", bounds)


def _read_rows(folder: Path, unit: str, part: int) -> np.ndarray:
    """The rows of a unit that are in the part, run after run."""
    bounds = np.load(folder / f"{unit}.bounds.npy", mmap_mode="r")
    with (folder / f"{unit}.rows").open("rb") as file:
        runs = [
            np.fromfile(file, ROW, stop - start, offset=start * ROW.itemsize - file.tell())
            for start, stop in bounds[:, part : part + 2].tolist()
        ]
    return np.concatenate(runs)


def repeats_of(folder: Path, unit: str, number: int, parts: int) -> Iterator[int]:
    """Places of the unit's items that are repeats, in order.

    number: index of the unit among those that find_repeats was given.
    """
    own = folder / f"{unit}.repeats"
    streams = [_read_places(own, 0, own.stat().st_size // 8)]
    for part in range(parts):
        bounds = np.load(folder / f"part-{part:05}.bounds.npy", mmap_mode="r")
        start, stop = bounds[number : number + 2].tolist()
        streams.append(_read_places(folder / f"part-{part:05}.repeats", start, stop))
    return heapq.merge(*streams)


def _read_places(file: Path, start: int, stop: int) -> Iterator[int]:
    """The file's numbers from `start` to before `stop`; one block is in memory at a time."""
    for at in range(start, stop, BLOCK):
        yield from np.fromfile(file, "<u8", min(BLOCK, stop - at), offset=8 * at).tolist()


def save(path: Path, array: np.ndarray) -> None:
    with atomic_writer(path) as file:
        np.save(file, array)
