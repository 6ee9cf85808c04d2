"""Results computed from files of a data set, in a hidden file beside them: `datasets` takes every
other file of a folder for data."""

import json
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import DataError, flush_to_disk, read_whole, temporary

Entries = Iterable[tuple[str, Any]]
"""(name, value) in turn: an array, or a part of it, followed by the others of the same name; or a
value for JSON."""


class Cache:
    """Reads such a file; safe in any thread.

    start     uint64   byte at which the footer starts
    arrays    one after another
    footer    JSON     {"key": str, "values": {name: value}, "arrays": {name: [dtype, byte, n]}}
    """

    def __init__(self, file: Path, key: str) -> None:
        """key: what it was computed from. Raises OSError without the file, DataError if it is
        damaged or has another key."""
        self._file = file
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        start = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        size = os.fstat(self._descriptor).st_size
        try:
            footer = json.loads(os.pread(self._descriptor, size - start, start)) if start else {}
            self.arrays, self.values = footer["arrays"], footer["values"]
            is_current = footer["key"] == key
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            is_current = False
        if not is_current:
            raise DataError(f"{file} is damaged, or of other data; it is made anew without it")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements [start, stop) of an array, in a new array; DataError if the file was cut."""
        dtype, byte, length = self.arrays[name]
        elements = np.empty((length if stop is None else stop) - start, dtype)
        byte += start * elements.itemsize
        read_whole(self._descriptor, elements.view(np.uint8).data, byte, self._file)
        return elements


def open_or_make(file: Path, key: str, make: Callable[[], Entries]) -> Cache:
    """The cache in this file, if its key is `key`; else it is made, in bounded memory.

    One process of a host makes it; the others wait for it, unless the folder allows no locks. The
    file is in place whole, or not at all. Raises OSError if the folder takes no file.
    """
    from filelock import FileLock

    with suppress(OSError, DataError):
        return Cache(file, key)
    lock = FileLock(file.with_name(f"{file.name}.lock"), fallback_to_soft=False)
    with suppress(OSError, NotImplementedError):  # the folder, or its file system, allows none
        lock.acquire()
    staged = temporary(file)
    try:
        with suppress(OSError, DataError):  # made by another process in the meantime
            return Cache(file, key)
        with staged.open("wb") as stream:
            arrays: dict[str, list[Any]] = {}
            values: dict[str, Any] = {}
            stream.write(bytes(8))
            for name, value in make():
                if isinstance(value, np.ndarray):
                    array = arrays.setdefault(name, [value.dtype.str, stream.tell(), 0])
                    array[2] += len(value)
                    stream.write(value.tobytes())
                else:
                    values[name] = value
            start = stream.tell()
            stream.write(json.dumps({"key": key, "values": values, "arrays": arrays}).encode())
            stream.seek(0)
            stream.write(start.to_bytes(8, "little"))
            flush_to_disk(stream)
        cache = Cache(staged, key)
        staged.replace(file)
        return cache
    finally:
        staged.unlink(missing_ok=True)
        if lock.is_locked:
            with suppress(OSError):
                Path(lock.lock_file).unlink()
            lock.release()


def scan_once(
    beside: Path, files: Sequence[Path], selection: Sequence[str], scan: Callable[[], Entries]
) -> dict[str, Any]:
    """Result of one pass over files, cached next to the path `beside`, and valid while names, sizes
    and modification times of the files stay the same.

    selection: the part of the files that is read. If no cache can be written, every process makes
    the pass. Raises DataError if the files change meanwhile.
    """

    def stamp() -> str:
        facts = [(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
        return json.dumps([facts, selection])

    beside, before = beside.resolve(), stamp()
    try:
        cache = open_or_make(beside.with_name(f".{beside.name}.scan"), before, scan)
        result = cache.values | {name: cache.read(name) for name in cache.arrays}
    except OSError:
        result = dict(scan())
    if stamp() != before:
        raise DataError(f"--data-path: {beside} changes while it is read; finished files work")
    return result
