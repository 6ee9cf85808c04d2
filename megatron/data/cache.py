"""Results computed from files of a data set, in a hidden file beside them: `datasets` takes every
other file of a folder for data."""

import json
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import DataError, atomic_writer, read_whole

T = TypeVar("T")

Entries = Iterable[tuple[str, Any]]
"""(name, value) in turn: an array, or a part of it, followed by the others of the same name; or a
value for JSON."""

HEAD = 16  # bytes before the arrays


class Cache:
    """Reads such a file; safe in any thread.

    start     uint64  byte at which the footer starts
    checksum  uint64  CRC-32 of the footer
    arrays    one after another
    footer    JSON    {"key": str, "values": {name: value}, "arrays": {name: [dtype, byte, n, CRC]}}
    """

    def __init__(self, file: Path, key: str | None, name: str = "") -> None:
        """key: what it was computed from; None takes any. name: the file in messages, after a flag.
        Raises OSError without the file, DataError if it is damaged or has another key."""
        self.damage = f"{name or file} is damaged; without this file it is made anew"
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        try:
            head = np.frombuffer(os.pread(self._descriptor, HEAD, 0), np.uint64)
            start, checksum = head.tolist()
            content = os.pread(self._descriptor, size - start, start) if start else b""
            footer = json.loads(content)
            self.arrays, self.values = footer["arrays"], footer["values"]
            is_current = key in (None, footer["key"]) and zlib.crc32(content) == checksum
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            is_current = False
        if not is_current:
            raise DataError(self.damage)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements [start, stop) of an array, in a new array.

        Raises DataError if the file was cut, or if the array is read as a whole and is damaged.
        """
        dtype, byte, length, checksum = self.arrays[name]
        elements = np.empty((length if stop is None else stop) - start, dtype)
        byte += start * elements.itemsize
        with suppress(DataError):
            content = elements.view(np.uint8).data
            read_whole(self._descriptor, content, byte, self.damage)
            if len(elements) < length or zlib.crc32(content) == checksum:
                return elements
        raise DataError(self.damage)


def write(file: Path, key: str, entries: Entries) -> None:
    """Writes a cache in bounded memory. The file is in place whole, or not at all; raises OSError
    if the folder does not take it."""
    with atomic_writer(file) as stream:
        arrays: dict[str, list[Any]] = {}
        values: dict[str, Any] = {}
        stream.write(bytes(HEAD))
        for name, value in entries:
            if isinstance(value, np.ndarray):
                array = arrays.setdefault(name, [value.dtype.str, stream.tell(), 0, 0])
                content = value.tobytes()
                array[2:] = array[2] + len(value), zlib.crc32(content, array[3])
                stream.write(content)
            else:
                values[name] = value
        start = stream.tell()
        footer = json.dumps({"key": key, "values": values, "arrays": arrays}).encode()
        stream.write(footer)
        stream.seek(0)
        stream.write(np.array([start, zlib.crc32(footer)], np.uint64).tobytes())


def find_or_make(file: Path, find: Callable[[], T], make: Callable[[], T]) -> T:
    """Result of `find`, which reads a cache; where that raises OSError or DataError, of `make`,
    which writes it.

    One process of a host makes it; the others wait for it, unless the folder allows no locks.
    """
    from filelock import FileLock

    with suppress(OSError, DataError):
        return find()
    lock = FileLock(file.with_name(f"{file.name}.lock"), fallback_to_soft=False)
    with suppress(OSError, NotImplementedError):  # the folder, or its file system, allows none
        lock.acquire()
    try:
        with suppress(OSError, DataError):  # made by another process in the meantime
            return find()
        return make()
    finally:
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
    the pass.
    """
    beside = beside.resolve()
    file = beside.with_name(f".{beside.name}.scan")
    facts = [(each.name, (s := each.stat()).st_size, s.st_mtime_ns) for each in files]
    key = json.dumps([facts, selection])

    def find() -> dict[str, Any]:
        cache = Cache(file, key)
        return cache.values | {name: cache.read(name) for name in cache.arrays}

    def make() -> dict[str, Any]:
        result = dict(scan())
        with suppress(OSError):
            write(file, key, result.items())
        return result

    return find_or_make(file, find, make)
