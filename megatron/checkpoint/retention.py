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
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import read_manifest, step_folders, step_of
from megatron.checkpoint.load import verify
from megatron.errors import UsageError
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.compare import listed
from megatron.parallel.mesh import Mesh

# Errors of a file system that has no locks, or none for folders.
_NO_LOCKS = (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS)
# Seconds after which NFS no longer says from memory that a new folder is missing.
_APPEARS = 60
# Leftovers of killed starts and saves; the last is of earlier versions.
_LEFTOVERS = (".claim-*", ".step_*.partial", ".step_*.removed", "latest.tmp*")


@contextmanager
def claim(directory: str | None, mesh: Mesh) -> Iterator[None]:
    """Hold a --save directory for this run: the first rank makes it, locks it and writes there.

    A `directory` of None claims nothing. The lock ends with the process, however it ends. Raises
    OSError, the same on every rank, if another run holds the directory or it cannot be written to;
    warns of ranks that do not see it. Folders that it made and that are still empty at the end are
    removed. Every rank calls this.
    """
    path, held, marked = Path(directory or ""), ExitStack(), ExitStack()
    missing = list[Path]()  # the folders to make, the innermost first

    def take() -> str:
        """The name of a file in it, which is there until `marked` is closed."""
        if directory is None or not mesh.is_first:
            return ""
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
            file = tempfile.NamedTemporaryFile(dir=path, prefix=".claim-")  # noqa: SIM115
            marked.enter_context(file)
            file.write(b"something\n")
            file.flush()
            os.fsync(file.fileno())
        except BlockingIOError as error:
            missing.clear()  # they are the other run's
            allowed = "a directory that no other run writes to: wait for its end"
            raise UsageError("--save", path, allowed) from error
        except OSError as error:
            cause = error.strerror or error
            raise UsageError("--save", path, f"a directory to write to ({cause})") from error
        return Path(file.name).name

    def is_seen(name: str) -> bool:
        end = time.monotonic() + _APPEARS
        while True:
            with suppress(OSError):  # such as a mount that is dead
                if (path / name).exists():
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.5)

    with held:
        try:
            with marked:
                name = mesh.control.gather(on_all_ranks(mesh, take))[0]
                seen = mesh.control.gather(not name or is_seen(name))
            if mesh.is_first and not all(seen):
                ranks = listed([str(rank) for rank, sees in enumerate(seen) if not sees])
                text = f"--save {path}: not seen by rank {ranks}: hosts have to share this folder"
                warnings.warn(text, stacklevel=2)
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
    reasons: dict[Path, str] = {}
    for folder in step_folders(final.parent) if went_back_to < inf else ():
        if step_of(folder) > went_back_to:
            reasons[folder] = f"this run went on from step {went_back_to}"
    if final.exists():
        reasons.setdefault(final, "this run saved that step again")
    notes = []
    for folder, reason in reasons.items():
        aside, number = folder.with_name(f"{folder.name}.abandoned"), 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}.abandoned-{number}")
        folder.rename(aside)
        notes.append(f"{folder} is now {aside.name}: {reason}")
    return tuple(notes)


def remove(folder: Path) -> None:
    """Remove a checkpoint, after a rename that hides it from searches for whole checkpoints."""
    removed = folder.with_name(f".{folder.name}.removed")
    folder.rename(removed)
    shutil.rmtree(removed)


class Retention:
    """Keeps the newest `keep` whole checkpoints of `run` and the one with the lowest validation
    loss; keeps all if `keep` is None.

    Each checkpoint is read back once before it counts. A damaged one and one of another run do not
    count and are not removed.
    """

    def __init__(self, keep: int | None, mesh: Mesh, run: str | None) -> None:
        self._keep = keep
        self._mesh = mesh
        self._run = run
        # Keys: (folder's name, manifest's checksum), so a step that is saved again is read again.
        self._faults: dict[tuple[str, str | None], str] = {}

    def apply(self, directory: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(names removed, notes for the user), the same on every rank; every rank calls this.

        A failure is a note and does not end the run: the checkpoint just saved is on disk.
        """
        mesh = self._mesh
        if self._keep is None:
            return (), ()

        def look() -> list[tuple[str, str | None, float | None, str]]:
            """(name, checksum, validation loss, why it does not count), newest first."""
            rows = []
            for folder in step_folders(directory):
                manifest: dict[str, Any] = {}
                try:
                    manifest, fault = read_manifest(folder), ""
                    if manifest.get("run") != self._run:
                        fault = f"{folder} is of another run"
                except (ValueError, OSError) as error:
                    fault = str(error)
                loss = manifest.get("validation_loss")
                rows.append((folder.name, manifest.get("checksum"), loss, fault))
            return rows

        def remove_surplus() -> dict[str, str]:
            """{name: why it could not be removed}"""
            failures = {}
            for name in surplus:
                try:
                    remove(directory / name)
                except OSError as error:
                    failures[name] = f"{directory / name} is not removed: {error}"
            return failures

        whole, notes = [], []
        try:
            # Only the first rank looks: over a network the others may see a folder later.
            rows = agree(mesh, lambda: look() if mesh.is_first else [], f"listing {directory}")[0]
            for name, checksum, loss, fault in rows:
                key = (name, checksum)
                if key not in self._faults:
                    try:
                        if not fault:
                            verify(directory / name, mesh)
                    except ValueError as error:  # the same on every rank
                        fault = str(error)
                    self._faults[key] = fault
                    notes += [f"{fault}; it is kept, and does not count as one"] if fault else []
                if not self._faults[key]:
                    whole.append((name, loss))
            measured = [(loss, name) for name, loss in whole if loss is not None]
            best = min(measured, key=lambda pair: pair[0])[1] if measured else None
            surplus = [name for name, _ in whole[self._keep :] if name != best]
            failures = agree(mesh, lambda: remove_surplus() if mesh.is_first else {}, "removing")[0]
        except OSError as error:  # the same on every rank
            return (), (f"no older checkpoint is removed: {error}",)
        removed = tuple(name for name in surplus if name not in failures)
        return removed, (*notes, *failures.values())
