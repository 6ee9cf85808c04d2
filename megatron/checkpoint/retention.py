"""The folders of a --save directory: which run may write there, what is removed, and what is kept.

One run writes to a directory at a time. The newest checkpoints that can be read back and the best
one are kept; folders that may still be wanted are renamed, not removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from math import inf
from pathlib import Path

from megatron.checkpoint.format import step_folders, step_of
from megatron.checkpoint.load import verify
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import Mesh

# Errors of a file system that has no locks, or none for folders.
_NO_LOCKS = (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS)
# Leftovers of killed saves.
_LEFTOVERS = (".step_*.partial", ".step_*.removed", "latest.tmp*")


@contextmanager
def claim(directory: str | None, mesh: Mesh) -> Iterator[None]:
    """Hold a --save directory for this run: the first rank makes it, locks it and writes there.

    A `directory` of None claims nothing. The lock ends with the process, however it ends. Raises
    OSError, the same on every rank, if another run holds the directory or it cannot be written to.
    Folders that it made and that are still empty at the end are removed. Every rank calls this.
    """
    path, held = Path(directory or ""), ExitStack()
    missing = list[Path]()  # the folders to make, the innermost first

    def take() -> None:
        if directory is None or not mesh.is_first:
            return
        try:
            missing.extend(folder for folder in (path, *path.parents) if not folder.exists())
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                text = f"--save {path}: this file system has no locks: keep other runs away"
                warnings.warn(text, stacklevel=2)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".claim-") as file:
                file.write(b"something\n")
                file.flush()
                os.fsync(file.fileno())
        except BlockingIOError as error:
            missing.clear()  # they are the other run's
            busy = f"--save {path}: another run is writing there; wait for its end"
            raise OSError(busy) from error
        except OSError as error:
            cause = error.strerror or error
            raise OSError(f"--save {path}: {cause}; must be a directory to write to") from error

    with held:
        try:
            on_all_ranks(mesh, take)
            yield
        finally:
            for folder in missing:
                with suppress(OSError):  # never made, or something has been written there since
                    folder.rmdir()


def remove_leftovers(directory: Path) -> tuple[str, ...]:
    """Remove the leftovers of killed saves; returns a line for each that cannot be removed."""
    failures = []
    for leftover in (path for pattern in _LEFTOVERS for path in directory.glob(pattern)):
        try:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        except OSError as error:
            failures.append(f"{leftover}, of a former save, is not removed: {error}")
    return tuple(failures)


def set_aside(final: Path, went_back_to: float) -> tuple[str, ...]:
    """Rename the checkpoints beyond the step that the run went back to, so that no later run
    resumes from them, and a folder with the new one's name; returns a line for each."""
    reasons = dict[Path, str]()
    if went_back_to < inf:
        for folder in step_folders(final.parent):
            if step_of(folder) > went_back_to:
                reasons[folder] = f"this run went on from step {went_back_to}"
    if final.exists():
        reasons.setdefault(final, "this run saved that step again")
    notes = []
    for folder, reason in reasons.items():
        names = (f"{folder.name}.abandoned{'' if n == 1 else f'-{n}'}" for n in count(1))
        aside = folder.rename(
            next(path for path in map(folder.with_name, names) if not path.exists())
        )
        notes.append(f"{folder} is now {aside.name}: {reason}")
    return tuple(notes)


def remove(folder: Path) -> None:
    """Remove a checkpoint, after a rename that hides it from searches for whole checkpoints."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.removed")))


class Retention:
    """Keeps the newest `keep` whole checkpoints of `run` and the one with the lowest validation
    loss; keeps all if `keep` is None.

    Each checkpoint is read back once before it counts. A damaged one and one of another run do not
    count and are not removed.
    """

    def __init__(self, keep: int | None, mesh: Mesh, run: str | None) -> None:
        self._keep, self._mesh, self._run = keep, mesh, run
        self._whole = dict[str, float | None]()  # validation losses, by name of the folder
        self._not_counted = set[str]()

    def apply(self, saved: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(names removed, notes for the user), the same on every rank; every rank calls this.

        saved: the checkpoint just saved. A failure is a note and does not end the run: that
        checkpoint is on disk.
        """
        directory, mesh, notes = saved.parent, self._mesh, list[str]()
        if self._keep is None:
            return (), ()
        # It is read back, too, where it has the name of an earlier one.
        self._whole.pop(saved.name, None)
        self._not_counted.discard(saved.name)

        def newest_first() -> list[str]:
            return [path.name for path in step_folders(directory)] if mesh.is_first else []

        def remove_surplus() -> dict[str, str]:
            """{name: why it could not be removed}"""
            failures = {}
            for name in surplus if mesh.is_first else ():
                try:
                    remove(directory / name)
                except OSError as error:
                    failures[name] = f"{directory / name} is not removed: {error}"
            return failures

        try:
            # Only the first rank lists: over a network the others may see a folder later.
            names = agree(mesh, newest_first, f"listing {directory}")[0]
            for name in names:
                if name in self._whole or name in self._not_counted:
                    continue
                try:
                    manifest = verify(directory / name, mesh).manifest
                    if manifest.get("run") != self._run:
                        raise ValueError(f"{directory / name} is of another run")
                    self._whole[name] = manifest.get("validation_loss")
                except ValueError as error:  # the same on every rank
                    self._not_counted.add(name)
                    notes.append(f"{error}; it is kept, and does not count as one")
            whole = [name for name in names if name in self._whole]
            measured = [(loss, name) for name in whole if (loss := self._whole[name]) is not None]
            best = min(measured, key=lambda pair: pair[0])[1] if measured else None
            surplus = [name for name in whole[self._keep :] if name != best]
            failures = agree(mesh, remove_surplus, "removing")[0]
        except OSError as error:  # the same on every rank
            return (), (f"no older checkpoint is removed: {error}",)
        removed = tuple(name for name in surplus if name not in failures)
        return removed, (*notes, *failures.values())
