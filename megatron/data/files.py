"""The files of a data set: their names, writing that survives a crash, what is kept beside them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is read of a file to tell it from another: 128 KiB, and few enough seeks for a slow disk.
PIECES, PIECE = 8, 16 << 10
SAMPLE = "; sample "  # in the content of a data set, before what older programs did not record


def with_suffix(prefix: str, suffix: str) -> Path:
    """P and .bin to P.bin, dots in P or not."""
    return Path(prefix + suffix)


def tokenizer_folder(prefix: str) -> Path:
    """Where the files of the tokenizer that made the data set are kept, beside it."""
    return with_suffix(prefix, ".tokenizer")


def temporary(file: Path) -> Path:
    """A name beside that of the file, this process's own, to write under and then rename."""
    return file.with_name(f"{file.name}.tmp{os.getpid()}")


def write_atomically(file: Path, content: bytes) -> None:
    """Put the file in place with all of the content, on disk, or leave what was there.

    Where the disk is full, the OSError says how many bytes are needed and how many are free.
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(f"{file}: {error.strerror}; {disk_space(file, len(content))}") from error
        raise


def disk_space(file: Path, needed: int) -> str:
    """For a message: the bytes that a file needs, and those that are free where it would lie."""
    free = shutil.disk_usage(file.parent).free
    return f"it needs {needed:,} bytes, {free:,} are free there"


def flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def flush_directory(directory: Path) -> None:
    """Make the renames in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(file: Path) -> str:
    """In hex, as sha256sum prints it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled_sha256(file: Path) -> str:
    """In hex, of the file's length and of pieces of it at places that the length decides: in
    milliseconds, another file is told from this one. A short file is read whole."""
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


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """One process of a host at a time makes this file, but for folders that allow no locks."""
    from filelock import FileLock

    lock = FileLock(file.with_name(f"{file.name}.lock"), fallback_to_soft=False)
    try:
        lock.acquire()
    except (OSError, NotImplementedError):  # the folder, or its file system, allows none
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


class DataError(ValueError):
    """Data of a run that cannot be read, are no longer what they were, or teach nothing: the user
    is told of it in one line, naming the flag or the file."""


class ScanCache:
    """What one pass over files has found, kept beside them for as long as they do not change.

    It is a hidden file: `datasets` takes every other file of a folder for data. Where it cannot be
    written, every process makes the pass.
    """

    def __init__(self, beside: Path, files: Sequence[Path], *selection: str) -> None:
        """files: all that are read; selection: what of them is taken."""
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
        """Whether the files are still what they were when this was made."""
        return self._stamp() == self._key

    def find(self, scan: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The arrays that are kept, by name, or else those that `scan` returns, which are kept.

        One process of a host scans, and the others wait for what it keeps.
        """
        if (found := self._read()) is not None:
            return found
        with alone(self._file):
            if (found := self._read()) is None:
                self._write(scanned := scan())
                return scanned
        return found

    def _read(self) -> dict[str, NDArray[Any]] | None:
        """None where there is none, or of other files."""
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
