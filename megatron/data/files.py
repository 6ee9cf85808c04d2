"""Files of a data set: names, writing that survives a crash, and files kept beside them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Pieces of a file that are read to identify it: 128 KiB, and few enough seeks for a slow disk.
PIECES, PIECE = 8, 16 << 10
SAMPLE = "; sample "  # in `content` of a data set, before the part that older programs lack


def with_suffix(prefix: str, suffix: str) -> Path:
    """P.bin for P and .bin, even if P contains dots."""
    return Path(prefix + suffix)


def tokenizer_folder(prefix: str) -> Path:
    """Folder beside the data set with the files of the tokenizer that made it."""
    return with_suffix(prefix, ".tokenizer")


def temporary(file: Path) -> Path:
    """This process's temporary name in the file's folder, to write under and then rename."""
    return file.with_name(f"{file.name}.tmp{os.getpid()}")


def write_atomically(file: Path, content: bytes) -> None:
    """Put the file with its whole content on disk, or leave what was there.

    If the disk is full, the OSError says how many bytes are needed and how many are free.
    """
    staged = temporary(file)
    try:
        with staged.open("wb") as stream:
            stream.write(content)
            flush_to_disk(stream)
        staged.replace(file)
        flush_directory(file.parent)
    except OSError as error:
        staged.unlink(missing_ok=True)
        if error.errno in NO_SPACE:
            raise OSError(f"{file}: {error.strerror}; {disk_space(file, len(content))}") from error
        raise


def disk_space(file: Path, needed: int) -> str:
    """For messages: the bytes that a file needs, and those that are free in its folder."""
    free = shutil.disk_usage(file.parent).free
    return f"it needs {needed:,} bytes, {free:,} are free there"


def flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def flush_directory(directory: Path) -> None:
    """Make the renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(file: Path) -> str:
    """SHA-256 of the file in hex, as sha256sum prints it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled_sha256(file: Path) -> str:
    """SHA-256, in hex, of the file's length and of pieces at offsets that depend on the length. It
    tells files apart in milliseconds. A short file is read whole."""
    with file.open("rb", buffering=0) as stream:
        length = os.fstat(stream.fileno()).st_size
        digest, last = hashlib.sha256(str(length).encode()), max(0, length - PIECE)
        pieces = min(PIECES, -(-length // PIECE))
        places = [last * number // max(1, pieces - 1) for number in range(pieces)]
        if sys.platform == "linux":
            for place in places:
                os.posix_fadvise(stream.fileno(), place, PIECE, os.POSIX_FADV_WILLNEED)
        for place in places:
            digest.update(os.pread(stream.fileno(), PIECE, place))
    return digest.hexdigest()


class DataError(ValueError):
    """Data of a run that cannot be read, have changed, or teach nothing. The user gets one line
    that names the flag or the file."""


def find_or_make(file: Path, find: Callable[[], T | None], make: Callable[[], T]) -> T:
    """Returns the result of `find`, which reads a file kept beside data; if it has none, that of
    `make`, which writes the file.

    One process of a host makes the file; the others wait for it, unless the folder allows no locks.
    """
    if (found := find()) is not None:
        return found
    from filelock import FileLock

    lock = FileLock(file.with_name(f"{file.name}.lock"), fallback_to_soft=False)
    with suppress(OSError, NotImplementedError):  # the folder, or its file system, allows none
        lock.acquire()
    try:
        return made if (made := find()) is not None else make()
    finally:
        if lock.is_locked:
            with suppress(OSError):
                Path(lock.lock_file).unlink()
            lock.release()


class ScanCache:
    """Result of one pass over files, kept beside them and valid while they do not change.

    It is a hidden file, because `datasets` takes every other file of a folder for data. If it
    cannot be written, every process makes the pass.
    """

    def __init__(self, beside: Path, files: Sequence[Path], *selection: str) -> None:
        """files: all files that are read; selection: the part of them that is used."""
        beside = beside.resolve()
        self._file = beside.with_name(f".{beside.name}.kept.npz")
        self._files, self._selection = files, selection
        self._key = self._stamp()

    def _stamp(self) -> str:
        """Names, sizes and modification times of the files, and the selection."""
        found = [(each.name, (s := each.stat()).st_size, s.st_mtime_ns) for each in self._files]
        return json.dumps([found, self._selection])

    @property
    def holds(self) -> bool:
        """Whether the files are unchanged since this object was made."""
        return self._stamp() == self._key

    def find(self, scan: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The cached arrays, by name; without a cache those of `scan`, which are then cached."""

        def make() -> Mapping[str, Any]:
            self._write(arrays := scan())
            return arrays

        return find_or_make(self._file, self._read, make)

    def _read(self) -> Mapping[str, Any] | None:
        """The cached arrays; None without a cache, or if it is of other files."""
        import numpy as np  # not above: checkpoint/format.py needs this file, but no numpy

        damage = OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile
        with suppress(*damage), np.load(self._file, allow_pickle=False) as arrays:
            if str(arrays["key"]) == self._key:
                return {name: arrays[name] for name in arrays.files}
        return None

    def _write(self, arrays: Mapping[str, Any]) -> None:
        import numpy as np

        content = BytesIO()
        np.savez(content, key=self._key, **arrays)
        with suppress(OSError):
            write_atomically(self._file, content.getvalue())
