"""The files of a data set: their names, and writing that survives a crash."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO


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
