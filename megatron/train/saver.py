"""Saving while training goes on, and which checkpoints are kept.

    training    step | copy | step | step | step |
    writer            | write, fsync, rename | read back, remove |

The loop waits for the copy to host memory alone; a thread writes it, and talks to the other ranks
over a group of its own. Without `asynchronous` the loop waits for all of it and nothing is copied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.mesh import Mesh
from megatron.train.checkpoint import NOTHING, Part, own_parts, write
from megatron.train.retention import Retention
from megatron.train.start import environment
from megatron.train.state import DTYPES, TrainState
from megatron.train.watch import note

GRACE = 5.0  # seconds that an error waits for a save to finish


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One finished save.

    stall_seconds: that this rank's loop waited. save_seconds: from the call until the checkpoint
    was on disk under its name. bytes: of all its files. removed: names of older checkpoints.
    notes: what else the user has to know: checkpoints found damaged (and kept), or set aside.
    """

    step: int
    path: Path
    stall_seconds: float
    save_seconds: float
    bytes: int
    removed: tuple[str, ...]
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON, for a line of metrics."""
        return {
            "checkpoint": str(self.path),
            "checkpoint_bytes": self.bytes,
            "stall_seconds": self.stall_seconds,
            "save_seconds": self.save_seconds,
            "removed": list(self.removed),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        removed = f", removed {', '.join(self.removed)}" if self.removed else ""
        return (
            f"saved {self.path} | {self.bytes / 1e6:,.1f} MB in {self.save_seconds:.1f} s, "
            f"training waited {self.stall_seconds:.2f} s{removed}"
        ) + "".join(f"\nwarning: {note}" for note in self.notes)


@dataclass(frozen=True)
class Job:
    """One save, for the thread that writes it; start: when it was asked for."""

    directory: Path
    step: int
    parts: Sequence[Part]
    facts: Mapping[str, Any]
    start: float


class Saver:
    """Writes the checkpoints of one run; every rank has one, and calls it at the same steps.

    section: without its `save` nothing is saved. facts: for every manifest, beside counters,
    validation loss and environment; "run" is the id by which older checkpoints are known to be
    this run's own, and may be removed. attached: {name: content} of files that every checkpoint
    holds beside the tensors. start_step: of the checkpoint this run went on from; those
    beyond it are renamed at the first save. A save that failed raises its OSError on every rank,
    in whichever of save(), reports() and close() comes next.
    """

    def __init__(
        self,
        mesh: Mesh,
        section: CheckpointConfig,
        facts: Mapping[str, Any],
        *,
        attached: Mapping[str, bytes] = NOTHING,
        start_step: int = 0,
    ) -> None:
        self._section = section
        self._facts = facts
        self._attached = attached
        self._mesh = replace(mesh, control=mesh.control.another())
        self._retention = Retention(section.keep_checkpoints, self._mesh, facts.get("run"))
        self._went_back_to: int | None = start_step
        self._host = HostCopies()
        self._pending: tuple[Future[SaveReport], float] | None = None
        self._finished: list[SaveReport] = []

    def save(self, state: TrainState, validation_loss: float | None) -> None:
        """Save the state as it is now; returns when the state may change.

        validation_loss: of these weights, if it was measured. Waits for the save before.
        """
        if self._section.save is None:
            return
        note("save")
        start = time.monotonic()
        self.close()
        parts = own_parts(state.pieces(), self._mesh)
        facts = {**_state_facts(state), "validation_loss": _finite(validation_loss), **self._facts}
        job = Job(Path(self._section.save), state.step, parts, facts, start)
        future: Future[SaveReport] = Future()
        if self._section.async_save:
            job = replace(job, parts=self._host.take(parts))
            # A daemon, so that a process whose peers are gone can still end.
            Thread(target=self._fulfil, args=(future, job), name="save", daemon=True).start()
        else:
            self._fulfil(future, job)
        self._pending = future, time.monotonic() - start
        if not self._section.async_save:
            self.close()

    @property
    def failed(self) -> bool:
        """Whether a save has failed whose error is still to be raised."""
        future = self._pending and self._pending[0]
        return bool(future and future.done() and future.exception())

    def reports(self) -> list[SaveReport]:
        """The saves that have finished since the last call."""
        if self._pending and self._pending[0].done():
            self.close()
        finished, self._finished = self._finished, []
        return finished

    def close(self, timeout: float | None = None) -> None:
        """Wait for the save that is being written, if there is one; `timeout` in seconds."""
        if self._pending is None:
            return
        (future, stall), self._pending = self._pending, None
        self._finished.append(replace(future.result(timeout), stall_seconds=stall))

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the last save finish. An error in training is told soon: it waits but GRACE."""
        if error is None:
            self.close()
            return
        try:
            self.close(GRACE)
        except TimeoutError:
            error.add_note("the save that was being written was given up")
        except Exception as failure:
            error.add_note(f"the save that was being written failed, too: {failure}")

    def _fulfil(self, future: Future[SaveReport], job: Job) -> None:
        try:
            future.set_result(self._write(job))
        except BaseException as error:
            future.set_exception(error)

    def _write(self, job: Job) -> SaveReport:
        written = write(
            job.directory,
            job.step,
            job.parts,
            job.facts,
            self._mesh,
            attached=self._attached,
            went_back_to=self._went_back_to,
        )
        self._went_back_to = None
        seconds = time.monotonic() - job.start
        removed, notes = self._retention.apply(job.directory)
        return SaveReport(
            step=job.step,
            path=written.path,
            stall_seconds=0.0,  # known to the caller alone
            save_seconds=seconds,
            bytes=written.bytes,
            removed=tuple(removed),
            notes=(*written.notes, *notes),
        )


def _state_facts(state: TrainState) -> dict[str, Any]:
    dtype = next(state.model.parameters()).dtype
    names = {wide: name for name, wide in DTYPES.items()}
    return {
        "counters": state.counters(),
        "precision": names.get(dtype, str(dtype).removeprefix("torch.")),
        "environment": environment(state.mesh),
    }


def _finite(loss: float | None) -> float | None:
    """JSON knows neither infinity nor NaN, and neither is the best."""
    return loss if loss is not None and isfinite(loss) else None


class HostCopies:
    """Copies of parts in host memory; the memory is kept, so that only the first save allocates."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """The parts as they are now; those taken before are overwritten."""
        copies = [replace(part, tensor=self._buffer(part)) for part in parts]
        for part, copy in zip(parts, copies, strict=True):
            copy.tensor.copy_(part.tensor, non_blocking=True)
        for device in {part.tensor.device for part in parts if part.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def _buffer(self, part: Part) -> Tensor:
        if part.key not in self._buffers:
            self._buffers[part.key] = torch.empty(
                part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda
            )
        return self._buffers[part.key]
