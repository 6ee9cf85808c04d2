"""One run writes to a --save directory at a time, and what cannot be written to is found first."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron.parallel.mesh import Mesh
from megatron.train.agree import refuse_alike

# What a file system says that has no locks, or none for folders.
_NO_LOCKS = (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def claim(directory: str | None, mesh: Mesh) -> Iterator[None]:
    """Hold a --save directory for this run: the first rank makes it, writes there and locks it.

    None claims nothing. The lock ends with the process, however it ends. Raises OSError, the same
    on every rank, where another run holds the directory or nothing can be written to it; then
    nothing is left of the attempt. Every rank calls this.
    """
    with ExitStack() as held:

        def take() -> None:
            if directory is not None and mesh.is_first:
                held.enter_context(_taken(directory))

        refuse_alike(mesh, take)
        yield


@contextmanager
def _taken(directory: str) -> Iterator[None]:
    path, missing = Path(directory), list[Path]()
    with ExitStack() as held:
        try:
            missing += [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY)
            held.callback(os.close, descriptor)
            _lock(descriptor, directory)
            _write_once(path)
        except BlockingIOError as error:
            raise OSError(
                f"--save {directory}: another run is writing there; another directory would work, "
                "or this one when that run has ended"
            ) from error
        except OSError as error:
            _remove(missing)
            raise OSError(
                f"--save {directory}: {error.strerror or error}; a directory that can be written "
                "to would work"
            ) from error
        yield


def _lock(descriptor: int, directory: str) -> None:
    """Raises BlockingIOError where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"--save {directory}: this file system has no locks, so that another run that writes "
            "there would not be noticed",
            stacklevel=2,
        )


def _write_once(path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path, prefix=".claim-") as file:
        file.write(b"something\n")
        file.flush()
        os.fsync(file.fileno())


def _remove(folders: list[Path]) -> None:
    """Of the folders that were made, those that are there, the innermost first."""
    for folder in folders:
        with suppress(OSError):  # never made, or another process has written there since
            folder.rmdir()
