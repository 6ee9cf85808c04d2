"""The folders of checkpoints on disk: staged, renamed, set aside, removed.

A name without a dot is a whole checkpoint, at every moment. What is being written or removed has
a dotfile's name, which nobody reads, and which the next save cleans up:

    .step_00000100.partial     is being written, or its writer was killed
    .step_00000100.removed     is being removed
    step_00000100.abandoned    is whole, of a run that was given up; kept, and never gone on from
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from megatron.config.checkpoints import step_folders, step_of

# What killed saves leave behind.
LEFTOVERS = (".step_*.partial", ".step_*.removed")


def prepare(staging: Path) -> tuple[str, ...]:
    """Make the folder to write into, and remove what is left of saves that were killed; returns a
    line for each that cannot be removed."""
    failures = []
    for leftover in (path for each in LEFTOVERS for path in staging.parent.glob(each)):
        try:
            shutil.rmtree(leftover)
        except OSError as error:
            failures.append(f"{leftover}, of a former save, is not removed: {error}")
    staging.mkdir(parents=True)
    return tuple(failures)


def set_aside(final: Path, step: int | None) -> tuple[str, ...]:
    """Rename the checkpoints beyond `step`, so that no later run goes on from them, and whatever
    has the name that is to be written; a line for each."""
    folders = step_folders(final.parent) if step is not None else []
    notes = [
        f"{_abandon(folder)}: this run went on from step {step}"
        for folder in folders
        if step is not None and step_of(folder) > step
    ]
    if final.exists():
        notes.append(f"{_abandon(final)}: this run saved that step again")
    return tuple(notes)


def _abandon(folder: Path) -> str:
    names = (f"{folder.name}.abandoned{number}" for number in _numbers())
    aside = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(aside)
    return f"{folder} is now {aside.name}"


def _numbers() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in count(2))


def write_file(path: Path, content: bytes) -> None:
    """Raises an OSError that says what is needed and what is free; then no file is left."""
    try:
        path.write_bytes(content)
        sync(path)
    except OSError as error:
        message = f"{path}: {reason(error)}; {space(path, len(content))}"
        path.unlink(missing_ok=True)
        raise OSError(message) from error


def sync(path: Path, *, forget: bool = False) -> None:
    """Wait until the disk has it; forget: whoever reads it next reads the disk, not the memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if forget and hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def reason(error: OSError | SafetensorError) -> str:
    """Why the system refused, without what led there."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).rpartition(": ")[2]


def space(file: Path, needed: int) -> str:
    """For a message: the bytes that the file needs, and those that were free before it."""
    taken = file.stat().st_size if file.exists() else 0
    free = shutil.disk_usage(file.parent).free + taken
    return f"it needs {needed:,} bytes, {free:,} are free there"


def remove(folder: Path) -> None:
    """Remove a checkpoint, which is gone at once for whoever looks for whole ones."""
    removed = folder.with_name(f".{folder.name}.removed")
    folder.rename(removed)
    shutil.rmtree(removed)
