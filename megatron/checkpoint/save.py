"""Writes checkpoints, in the training loop or in a thread beside it.

    training    step | copy | step | step | step |
    writer            | write, fsync, rename | read back, remove |

A checkpoint is staged beside its final name, the manifest last, and renamed when all is on disk. A
save that fails does so on every rank and leaves nothing. With --async-save the loop waits only for
a copy to host memory: a thread writes it, and talks to the other ranks over its own group.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.format import FORMAT, FORMAT_OF_PARTS, check_tiling, seal
from megatron.checkpoint.retention import Retention, remove_leftovers, set_aside
from megatron.config.checkpoint import CheckpointConfig
from megatron.data.files import disk_space, flush_path, sha256, write_atomically
from megatron.parallel.agree import agree
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import TensorSlice

NOTHING: Mapping[str, bytes] = MappingProxyType({})
GRACE = 5.0  # seconds that an error in training waits for a save to finish


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One finished save.

    stall_seconds: how long this rank's loop waited. save_seconds: from the call until the
    checkpoint was on disk under its name. bytes: of all its files except the manifest. removed:
    names of older checkpoints. notes: further lines for the user, about checkpoints found damaged
    (and kept), or set aside.
    """

    step: int
    path: Path
    stall_seconds: float = 0.0
    save_seconds: float
    bytes: int
    removed: tuple[str, ...] = ()
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


def save_checkpoint(
    directory: str | Path,
    step: int,
    slices: Iterable[TensorSlice],
    facts: Mapping[str, Any],
    mesh: Mesh,
    attached: Mapping[str, bytes] = NOTHING,
    *,
    went_back_to: float = inf,
    is_writer: bool | None = None,
) -> SaveReport:
    """Write SAVE/step_XXXXXXXX with every tensor, `facts` (JSON) and the files {name: content} that
    are attached on the first rank.

    went_back_to: checkpoints beyond this step are set aside. is_writer: whether this rank makes the
    folder and writes the manifest: by default the first rank does, and every rank must see the same
    directory; where each host has one of its own, one rank of each host. Every rank calls this.
    Raises OSError on every rank if one fails; then nothing of this checkpoint is left, unless it
    was already whole.
    """
    if is_writer is None:
        is_writer = mesh.is_first
    start, slices = time.monotonic(), list(slices)
    final = Path(directory) / f"step_{step:08d}"
    if wrong := {"format", "files", "tensors", "checksum"} & facts.keys():
        raise ValueError(f"facts: {min(wrong)} is a key of the manifest itself")
    keys = Counter(each.key for each in slices)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise ValueError(f"slices: two of {twice[0]}; model_slices takes another prefix")
    local_slices = own_slices(slices, mesh)

    def commit() -> tuple[int, tuple[str, ...]]:
        if not is_writer:
            return 0, ()
        # Everything that needs disk space comes before the rename.
        files: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for rank_files, rank_tensors in shares:
            files |= rank_files
            for key, entry in rank_tensors.items():
                tensors.setdefault(key, {**entry, "slices": []})["slices"] += entry["slices"]
        if not tensors:
            raise OSError(f"{final} would hold no tensor")
        check_tiling(tensors, files)
        has_parts = any("tensor" in one for each in tensors.values() for one in each["slices"])
        number = FORMAT_OF_PARTS if has_parts else FORMAT
        manifest = seal({"format": number, **facts, "files": files, "tensors": tensors})
        notes = publish(staging, final, manifest, went_back_to)
        return sum(file["bytes"] for file in files.values()), notes

    with staged(final, mesh, is_writer) as (staging, leftovers):
        extra = attached if mesh.is_first else NOTHING
        shares = agree(mesh, lambda: _write_files(staging, local_slices, extra, mesh.control.rank))
        size, notes = agree(mesh, commit)[0]
    seconds, notes = time.monotonic() - start, (*leftovers, *notes)
    return SaveReport(step=step, path=final, save_seconds=seconds, bytes=size, notes=notes)


@contextmanager
def staged(
    final: Path, mesh: Mesh, is_writer: bool, what: str = "saving"
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Context with (a new folder beside `final`, which an error removes; notes about leftovers that
    could not be removed). is_writer, errors: see save_checkpoint. what: for these, see agree."""
    staging = final.with_name(f".{final.name}.partial")

    def prepare() -> tuple[str, ...]:
        if not is_writer:
            return ()
        notes = remove_leftovers(staging.parent)
        staging.mkdir(parents=True)
        return notes

    try:
        yield staging, agree(mesh, prepare, what)[0]
    except BaseException:
        if is_writer:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def publish(
    staging: Path, final: Path, manifest: Mapping[str, Any], went_back_to: float = inf
) -> tuple[str, ...]:
    """Give a folder that holds all other files its manifest and its name; returns the notes of
    `set_aside`."""
    write_atomically(staging / "manifest.json", json.dumps(manifest, indent=1).encode())
    write_atomically(staging / "latest", f"{final.name}\n".encode())
    notes = set_aside(final, went_back_to)
    staging.rename(final)
    flush_path(final.parent)
    (final / "latest").replace(final.with_name("latest"))
    flush_path(final.parent)
    return notes


def own_slices(slices: Iterable[TensorSlice], mesh: Mesh) -> list[TensorSlice]:
    """The slices that this rank writes: each slice is written once, by its owner."""
    return [s for s in slices if s.spec.is_owner(*mesh.axes) and any(s.spec.boxes(s.local))]


def _write_files(
    staging: Path, slices: Sequence[TensorSlice], attached: Mapping[str, bytes], rank: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write this rank's files; returns the manifest's entries for them and for their tensors."""
    files = {}
    for name, content in attached.items():
        write_atomically(staging / name, content)
        files[name] = {"bytes": len(content), "sha256": sha256(staging / name)}
    if not slices:
        return files, {}
    shard = staging / f"shard_{rank:05d}.safetensors"
    entries: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for each in slices:
        boxes = []
        for number, (part, where) in enumerate(each.spec.boxes(each.local)):
            name = each.key if number == 0 else f"{each.key}#{number}"
            tensors[name] = part.contiguous()
            offset = [cut.start for cut in where]
            box = {"file": shard.name, "offset": offset, "shape": list(part.shape)}
            boxes.append(box if number == 0 else {**box, "tensor": name})
        dtype = str(each.local.dtype).removeprefix("torch.")
        entries[each.key] = {"dtype": dtype, "shape": list(each.spec.shape), "slices": boxes}
    try:
        save_file(tensors, shard)
        shard.chmod(0o644)  # like every other file: safetensors lets only the owner read
        files[shard.name] = {"bytes": shard.stat().st_size, "sha256": sha256(shard)}
        with shard.open("rb") as stream:
            os.fsync(stream.fileno())
            if hasattr(os, "posix_fadvise"):  # a read-back then reads the disk, not memory
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, SafetensorError) as error:
        shard.unlink(missing_ok=True)  # frees its disk space
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise OSError(f"{shard}: {reason(error)}; {disk_space(shard, needed)}") from error
    return files, entries


def reason(error: OSError | SafetensorError) -> str:
    """The system's reason, without the context that the message puts first."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).rpartition(": ")[2]


class Saver:
    """Writes the checkpoints of one run; every rank has one, and calls it at the same steps.

    config: names the folder, `save`. facts: for every manifest; the id "run" marks
    older checkpoints as this run's own, which may be removed. attached: {name: content} of files
    that every checkpoint holds beside the tensors. start_step: of the checkpoint that this run
    resumed from; checkpoints beyond it are renamed at the first save. A failed save raises its
    OSError on every rank, in the next call of save(), reports() or close().
    """

    def __init__(
        self,
        mesh: Mesh,
        config: CheckpointConfig,
        facts: Mapping[str, Any],
        *,
        attached: Mapping[str, bytes] = NOTHING,
        start_step: int = 0,
    ) -> None:
        self._config = config
        self._facts = facts
        self._attached = attached
        self._mesh = replace(mesh, control=mesh.control.another())
        self._retention = Retention(config.keep_checkpoints, self._mesh, facts.get("run"))
        self._went_back_to: float = start_step
        self._host: dict[str, Tensor] = {}  # kept, so that only the first save allocates
        self._pending: tuple[Future[SaveReport], float] | None = None
        self._finished: list[SaveReport] = []
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if config.async_save:
            # One thread for all saves: a new one that lacks memory lets its start wait for ever. A
            # daemon, so that a process whose peers are gone can still end.
            Thread(target=self._write_all, name="save", daemon=True).start()

    def _write_all(self) -> None:
        for write in iter(self._writes.get, None):
            write()

    def save(
        self,
        step: int,
        slices: Iterable[TensorSlice],
        facts: Mapping[str, Any],
        validation_loss: float | None,
    ) -> None:
        """Save the tensors as they are now; returns when they may change.

        facts: of this step, for its manifest. validation_loss: of these weights, if it was
        measured. Waits for the previous save.
        """
        start = time.monotonic()
        self.close()
        if self._config.async_save:
            slices = self._copy_to_host(own_slices(slices, self._mesh))
        if validation_loss is not None and not isfinite(validation_loss):
            validation_loss = None  # JSON cannot express it, and it is not the best
        facts = {**facts, "validation_loss": validation_loss, **self._facts}
        assert self._config.save is not None
        directory = Path(self._config.save)
        future: Future[SaveReport] = Future()

        def write() -> None:
            try:
                report = save_checkpoint(
                    directory,
                    step,
                    slices,
                    facts,
                    self._mesh,
                    self._attached,
                    went_back_to=self._went_back_to,
                )
                self._went_back_to = inf
                seconds = time.monotonic() - start
                removed, notes = self._retention.apply(directory)
                notes = (*report.notes, *notes)
                report = replace(report, save_seconds=seconds, removed=removed, notes=notes)
                future.set_result(report)
            except BaseException as error:
                future.set_exception(error)

        if self._config.async_save:
            self._writes.put(write)
            self._pending = future, time.monotonic() - start
        else:
            write()
            self._pending = future, time.monotonic() - start
            self.close()

    def _copy_to_host(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Copies in host memory; those of the previous save are overwritten."""
        for each in slices:
            if each.key not in self._host:
                self._host[each.key] = torch.empty(
                    each.local.shape, dtype=each.local.dtype, pin_memory=each.local.is_cuda
                )
            self._host[each.key].copy_(each.local, non_blocking=True)
        for device in {each.local.device for each in slices if each.local.is_cuda}:
            torch.cuda.synchronize(device)
        return [replace(each, local=self._host[each.key]) for each in slices]

    @property
    def failed(self) -> bool:
        """Whether a save has failed and its error is still to be raised."""
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the last save finish; an error in training waits GRACE seconds for it."""
        try:
            self.close(None if error is None else GRACE)
        except Exception as failure:
            if error is None:
                raise
            is_late = isinstance(failure, TimeoutError)
            fate = "was given up" if is_late else f"failed, too: {failure}"
            error.add_note(f"the save that was being written {fate}")
        finally:
            self._writes.put(None)
