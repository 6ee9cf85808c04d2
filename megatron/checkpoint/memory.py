"""Checkpoints in the shared memory of the hosts, which outlives the processes of a run.

    SAVE/memory_checkpoints                    id of the start that keeps checkpoints in memory
    /dev/shm/megatron-HASH/step_00000120/      manifest.json; the files of this host's ranks and,
                                               on several hosts, those of the host before

A step in memory consists of the files that it would have on disk, divided over the hosts. The next
start writes the newest step whose files are all whole, each on any host, to SAVE and resumes from
it as from any checkpoint. HASH is of the id and of SAVE's path, and each start draws another id: no
run finds what another one kept, or what it kept itself before an earlier restart.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import copyfile, disk_usage, rmtree
from stat import S_ISDIR
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.format import damage, one_step, read_manifest, seal, step_folders, step_of
from megatron.checkpoint.load import newest_whole
from megatron.checkpoint.retention import remove
from megatron.checkpoint.save import SaveReport, own_slices, publish, save_checkpoint, staged
from megatron.config.checkpoint import CheckpointConfig
from megatron.data.files import flush_to_disk, write_atomically
from megatron.errors import UsageError
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import TensorSlice

SHARED_MEMORY = Path("/dev/shm")
ID_FILE = "memory_checkpoints"  # no dot: `rm -r SAVE/*` removes it, too
FLAG = "--memory-checkpoint-interval"
PIECE = 2**28  # bytes of one message


class MemoryCheckpoints:
    """Checkpoints of one start of a run; every rank calls the methods at the same steps.

    A failure of one rank raises the same OSError on every rank.
    """

    def __init__(self, save: str | Path, mesh: Mesh, start_id: str) -> None:
        """save: the folder of the run's checkpoints on disk. start_id: the first rank's counts."""
        self._save, self._mesh = Path(save), mesh
        name = f"{start_id} {self._save.resolve()}"
        name = mesh.control.gather(hashlib.sha256(name.encode()).hexdigest()[:16])[0]
        self._folder = SHARED_MEMORY / f"megatron-{name}"

        def enter() -> tuple[str, str, int, int]:
            """The identity of this host's shared memory: containers may have their own."""
            self._folder.mkdir(mode=0o700, exist_ok=True)
            about, root, boot = self._folder.lstat(), SHARED_MEMORY.stat(), ""
            if not S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                cure = f"without {self._save / ID_FILE} it is not used"
                raise OSError(f"{self._folder} is no folder of this user; {cure}")
            with suppress(OSError):
                boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            return socket.gethostname(), boot, root.st_dev, root.st_ino

        hosts = agree(mesh, enter, "using shared memory")
        self._hosts = [
            [rank for rank, each in enumerate(hosts) if each == host]
            for host in dict.fromkeys(hosts)
        ]
        rank = mesh.control.rank
        self._host = next(n for n, ranks in enumerate(self._hosts) if rank in ranks)
        self._ranks = self._hosts[self._host]  # of this host
        self._is_writer = rank == self._ranks[0]

    @classmethod
    def begin(
        cls, config: CheckpointConfig, slices: Iterable[TensorSlice], mesh: Mesh
    ) -> MemoryCheckpoints:
        """Checkpoints of this start, under a new id. slices: those of each checkpoint.

        Raises UsageError on every rank if a host has no room for two checkpoints and, on several
        hosts, for those of its partner.
        """
        assert config.save is not None
        start_id, save = secrets.token_hex(16), Path(config.save)
        own = [box for s in own_slices(slices, mesh) for box, _ in s.spec.boxes(s.local)]

        def write() -> None:
            if mesh.is_first:
                write_atomically(save / ID_FILE, start_id.encode())

        agree(mesh, write, "beginning checkpoints in memory")
        memory = cls(save, mesh, start_id)
        sizes = mesh.control.gather(sum(part.nbytes for part in own))
        by_host = [sum(sizes[rank] for rank in ranks) for ranks in memory._hosts]
        partner = by_host[memory._host - 1] if len(by_host) > 1 else 0

        def check() -> None:
            needed, free = 2 * (by_host[memory._host] + partner), disk_usage(SHARED_MEMORY).free
            if needed > free:
                has = f"{SHARED_MEMORY} of {socket.gethostname()} has {free / 1e9:,.1f} GB free"
                allowed = f"left out: it needs {needed / 1e9:,.1f} GB, and {has}"
                raise UsageError(FLAG, config.memory_checkpoint_interval, allowed)

        try:
            on_all_ranks(mesh, check)
        except UsageError:
            memory.remove()
            raise
        return memory

    def save(
        self,
        step: int,
        slices: Iterable[TensorSlice],
        facts: Mapping[str, Any],
        attached: Mapping[str, bytes],
    ) -> SaveReport:
        """Keep this step beside the newest one before it, and copy it to the partner hosts; returns
        when it is whole on all. facts: those of the first rank count, so that all hosts have one
        manifest. Other arguments: see save_checkpoint. After an error nothing of it is left."""
        mesh = self._mesh
        facts = mesh.control.gather(dict(facts) if mesh.is_first else None)[0]

        def make_room() -> None:
            if self._is_writer:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                for folder in step_folders(self._folder)[1:]:
                    remove(folder)

        agree(mesh, make_room, "making room in memory")
        try:
            report = save_checkpoint(
                self._folder, step, slices, facts, mesh, attached, is_writer=self._is_writer
            )
            if len(self._hosts) > 1:
                self._copy_to_partners(report.path)
        except OSError:  # the same on every rank; a host may have its files already
            if self._is_writer:
                rmtree(self._path(step), ignore_errors=True)
            raise
        return report

    def _copy_to_partners(self, folder: Path) -> None:
        """Send the files of each host's ranks to the next host, from rank to rank."""
        mesh, rank, number = self._mesh, self._mesh.control.rank, len(self._hosts)
        transfers: list[tuple[Any, torch.Tensor, int]] = []  # (isend or irecv, piece, other rank)

        def open_files() -> None:
            for name, facts in read_manifest(folder, alone=True)["files"].items():
                # Files of the model and the tokenizer are the first rank's.
                of_rank = name.startswith("shard_")
                sender = int(name.removeprefix("shard_").partition(".")[0]) if of_rank else 0
                host = next(n for n, ranks in enumerate(self._hosts) if sender in ranks)
                partners = self._hosts[(host + 1) % number]
                receiver = partners[self._hosts[host].index(sender) % len(partners)]
                file, size = folder / name, facts["bytes"]
                if rank == receiver:
                    with file.open("xb") as stream:
                        if size:  # a mapped page without memory behind it would kill the process
                            os.posix_fallocate(stream.fileno(), 0, size)
                if rank in (sender, receiver) and size:
                    mapped = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
                    is_sender = rank == sender
                    start, other = (dist.isend, receiver) if is_sender else (dist.irecv, sender)
                    transfers.extend((start, piece, other) for piece in mapped.split(PIECE))

        def exchange() -> None:
            group, calls = mesh.control.group, mesh.control.calls
            works = [start(piece, other, group=group) for start, piece, other in transfers]
            call = calls.start("copy to the partner host", len(works))
            calls.wait_for(call, lambda: [work.wait() for work in works if work is not None])

        agree(mesh, open_files, "copying memory to the partner host")
        agree(mesh, exchange, "copying memory to the partner host")

    def remove(self) -> None:
        """Remove all of it."""

        def remove_folder() -> None:
            if self._mesh.is_first:
                (self._save / ID_FILE).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # somebody else has removed it
                if self._is_writer:
                    rmtree(self._folder)

        agree(self._mesh, remove_folder, "removing checkpoints in memory")

    def write_newest(self) -> list[str]:
        """Write the newest whole step to SAVE if it is beyond the newest one there that is whole;
        returns messages."""
        control = self._mesh.control
        found = control.gather([step_of(folder) for folder in step_folders(self._folder)])
        steps = sorted({step for each in found for step in each}, reverse=True)
        messages = [] if steps else ["no checkpoint of this run is in the memory of these hosts"]
        on_disk, newest = control.gather(step_folders(self._save))[0], -1
        if on_disk and steps and steps[0] > step_of(on_disk[0]):
            newest = step_of(on_disk[0])  # whole or not
        elif on_disk and steps:
            try:
                whole_one, reasons = newest_whole(on_disk, self._mesh, any_loop=True)
                newest = step_of(whole_one.path)
            except ValueError as error:  # all are damaged
                reasons = [line.strip() for line in str(error).splitlines()[1:]]
            messages += [f"passed over: {reason}" for reason in reasons]
        for step in steps:
            if step <= newest:
                break
            manifest, whole, damaged = self._look_at(step)
            looks = control.gather((manifest, whole, damaged))
            reasons = [line for *_, lines in looks for line in lines]
            holders: dict[str, int] = {}
            for rank, (_, names, _) in enumerate(looks):
                holders = dict.fromkeys(names, rank) | holders
            # All that can be read are equal: they are sealed, and have the facts of one rank.
            for chosen in [each for each, *_ in looks if each is not None][:1]:
                missing = [name for name in chosen["files"] if name not in holders]
                if not missing:
                    notes = self._write(step, chosen, holders)
                    passed = [f"passed over: {reason}" for reason in reasons]
                    final = self._save / self._path(step).name
                    return [*messages, *passed, *notes, f"step {step} was in memory, now {final}"]
                reasons.append(f"{missing[0]} of step {step} in memory is whole on no host")
            messages += [f"passed over: {reason}" for reason in reasons]
        return messages

    def _look_at(self, step: int) -> tuple[dict[str, Any] | None, list[str], list[str]]:
        """(this host's manifest of a step, the whole files among this rank's share of those in its
        folder, a line for each that is damaged)."""
        folder = self._path(step)
        if not folder.is_dir():
            return None, [], []
        try:
            manifest = read_manifest(folder, alone=True)
        except (ValueError, OSError) as error:
            return None, [], [str(error)] if self._is_writer else []
        share = [*manifest["files"].items()][self._ranks.index(self._rank) :: len(self._ranks)]
        # The other files are on other hosts.
        lines = dict(damage(folder, {name: f for name, f in share if (folder / name).exists()}))
        whole = [name for name, line in lines.items() if not line]
        return manifest, whole, [*filter(None, lines.values())]

    def _write(
        self, step: int, manifest: Mapping[str, Any], holders: Mapping[str, int]
    ) -> tuple[str, ...]:
        """Write SAVE/step_XXXXXXXX of files in memory; returns notes. holders: the rank that copies
        each file."""
        mesh, source = self._mesh, self._path(step)
        final, what = self._save / source.name, f"writing step {step}, which is in memory, to disk"

        def copy() -> None:
            for name, rank in holders.items():
                if rank == self._rank and name in manifest["files"]:
                    copyfile(source / name, staging / name)
                    with (staging / name).open("rb") as stream:
                        flush_to_disk(stream)

        def commit() -> tuple[str, ...]:
            return publish(staging, final, seal(manifest)) if mesh.is_first else ()

        with staged(final, mesh, mesh.is_first, what) as (staging, leftovers):
            agree(mesh, copy, what)
            return (*leftovers, *agree(mesh, commit, what)[0])

    @property
    def _rank(self) -> int:
        return self._mesh.control.rank

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"


def recover(config: CheckpointConfig, mesh: Mesh) -> list[str]:
    """Write the newest checkpoint that the last start of this run left in memory to --save, if it
    is beyond those there, and remove what is in memory; returns messages to the user.

    Without --load, and with --load SAVE/step_N, which goes back on purpose, none is written. Every
    rank calls this. Raises UsageError on every rank if a host has no shared memory, OSError if a
    step cannot be written; then it stays in memory.
    """
    if config.save is None:
        return []
    save, interval = Path(config.save), config.memory_checkpoint_interval

    def look() -> str | None:
        """The id of the last start with memory, of the first rank."""
        if interval is not None and not SHARED_MEMORY.is_dir():
            allowed = f"left out: {socket.gethostname()} has no {SHARED_MEMORY}"
            raise UsageError(FLAG, interval, allowed)
        file = save / ID_FILE
        is_there = mesh.is_first and file.is_file() and SHARED_MEMORY.is_dir()
        return file.read_text() if is_there else None

    start_id = mesh.control.gather(on_all_ranks(mesh, look))[0]
    if start_id is None:
        return []
    memory, messages = MemoryCheckpoints(save, mesh, start_id), list[str]()
    if config.load is not None:
        one = one_step(config.load)
        if one is None or one.resolve().parent != save.resolve():
            messages = memory.write_newest()
    memory.remove()
    return messages
