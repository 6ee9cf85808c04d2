"""Files of a data set: names, checksums, and writing that survives a crash."""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Pieces of a file that are read to identify it: 128 KiB, and few enough seeks for a slow disk.
PIECES, PIECE = 8, 16 << 10
SAMPLE = "; sample "  # in `content` of a data set, before the part that older programs lack


class DataError(ValueError):
    """Data of a run that cannot be read, have changed, or teach nothing. The user gets one line
    that names the flag or the file."""


def with_suffix(prefix: str, suffix: str) -> Path:
    """P.bin for P and .bin, even if P contains dots."""
    return Path(prefix + suffix)


def tokenizer_folder(prefix: str) -> Path:
    """Folder beside the data set with the files of the tokenizer that made it."""
    return with_suffix(prefix, ".tokenizer")


@contextlib.contextmanager
def atomic_writer(
    file: Path, *, flush_content: bool = True, flush_name: bool = True
) -> Iterator[BinaryIO]:
    """A stream for the content of the file, which appears under its name whole and on disk when
    the block ends. If the block raises, what was there stays. Makes missing folders.

    flush_content, flush_name: whether to wait for the disk; without them the file may be empty, or
    not there, after a power cut. If the disk is full, the OSError names the file and says how many
    bytes are free.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        with staged.open("wb") as stream:
            yield stream
            if flush_content:
                flush_to_disk(stream)
        staged.replace(file)
        if flush_name:
            flush_path(file.parent)
    except OSError as error:
        if error.errno not in NO_SPACE or error.filename is not None:
            raise
        # A failed write names neither its file nor the room there.
        free = shutil.disk_usage(file.parent).free
        so_far = staged.stat().st_size
        reason = f"{error.strerror} ({so_far:,} bytes are written, {free:,} are free there)"
        raise OSError(error.errno, reason, str(file)) from error
    finally:
        staged.unlink(missing_ok=True)


def write_atomically(file: Path, content: bytes) -> None:
    """Put the file with its whole content on disk, or leave what was there.

    If the disk is full, the OSError says how many bytes are needed and how many are free.
    """
    try:
        with atomic_writer(file) as stream:
            stream.write(content)
    except OSError as error:
        if error.errno in NO_SPACE:
            reason = os.strerror(error.errno)
            raise OSError(f"{file}: {reason}; {disk_space(file, len(content))}") from error
        raise


def disk_space(file: Path, needed: int) -> str:
    """For messages: the bytes that a file needs, and those that are free in its folder."""
    free = shutil.disk_usage(file.parent).free
    return f"it needs {needed:,} bytes, {free:,} are free there"


def flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def flush_path(path: Path) -> None:
    """Make the content of a file, or the renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
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
        offsets = [last * number // max(1, pieces - 1) for number in range(pieces)]
        if sys.platform == "linux":
            for offset in offsets:
                os.posix_fadvise(stream.fileno(), offset, PIECE, os.POSIX_FADV_WILLNEED)
        for offset in offsets:
            digest.update(os.pread(stream.fileno(), PIECE, offset))
    return digest.hexdigest()


def read_whole(descriptor: int, content: memoryview, start: int, name: Path | str) -> None:
    """Fills `content`, bytes, from byte `start` of the file on; safe in any thread.

    Raises DataError, with the name of the file, if it ends before.
    """
    while content:
        count = os.preadv(descriptor, [content], start)
        if not count:
            raise DataError(
                f"{name} has become shorter since it was opened; a file that stays as it is works"
            )
        content, start = content[count:], start + count
