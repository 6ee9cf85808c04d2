"""How each fault is injected, and the patterns of the cause that the run prints for it.

An injection is a generator: its first part injects, the rest goes on at each tick of the
supervisor until the fault is over; closing it undoes what a run would not survive.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tools.chaos.schedule import Fault

SMALL = 2**30  # bytes of the largest file system that a fault fills
PULSE = 0.1  # seconds for which a slow rank is stopped, and then works
FILL = ".chaos_full_disk"


class Start(Protocol):
    """One start of the command; a launcher may start its ranks several times."""

    def status(self) -> int | None:
        """The exit status of the command; None while it runs."""

    def launcher(self) -> int | None:
        """The process that started the ranks; None if there is none, or it is a rank."""

    def ranks(self) -> Mapping[int, int]:
        """The processes of the ranks that live now, by rank."""

    def size(self) -> int:
        """How many ranks it has, as far as their environment says it."""

    def kill(self) -> None:
        """Kill all processes of the start and wait for their end."""

    def text(self) -> str:
        """The text that it has printed."""


class NotInjected(Exception):  # noqa: N818
    """The reason why a fault cannot be injected now."""


@dataclass(frozen=True)
class Target:
    """The target of a fault. rank: the drawn one; None if the fault is done to all. facts: what the
    cause has to name; the injection adds to them."""

    start: Start
    ranks: Mapping[int, int]
    rank: int | None
    save: Path
    events: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def pids(self) -> list[int]:
        return [*self.ranks.values()] if self.rank is None else [self.ranks[self.rank]]

    def others_live(self) -> bool:
        """Whether a rank lives that the fault does not hit."""
        living, hit = {*self.start.ranks().values()}, {*self.pids()}
        return bool(living - hit) or not {*self.ranks.values()} - hit


Injection = Callable[[Target, Fault], Generator[None]]


def _signal(number: int) -> Injection:
    def inject(target: Target, fault: Fault) -> Generator[None]:
        launcher = target.start.launcher()
        pids = target.pids() if fault.config.rank != "launcher" else []
        if fault.config.rank == "launcher" and launcher is None:
            raise NotInjected("the command has no launcher")
        if fault.config.rank == "launcher" or (fault.config.rank == "all" and number == 9):
            pids = [*([] if launcher is None else [launcher]), *pids]
        target.facts["pids"] = pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        yield

    return inject


def stop(target: Target, fault: Fault) -> Generator[None]:
    """A rank that is still stopped when the others have ended is killed, as its job would be."""
    end = time.monotonic() + fault.config.seconds
    try:
        for pid in target.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        while time.monotonic() < end and target.others_live():
            yield
    finally:
        is_alone = not target.others_live()
        for pid in target.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_alone else signal.SIGCONT)


def slow(target: Target, fault: Fault) -> Generator[None]:
    (pid,), begin = target.pids(), time.monotonic()
    try:
        while (passed := time.monotonic() - begin) < fault.config.seconds and target.others_live():
            is_stopped = int(passed / PULSE) % 2 == 0
            os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
            yield
    except ProcessLookupError:  # it has ended by itself
        return
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def memory(target: Target, fault: Fault) -> Generator[None]:
    """The rank may have no more address space than it has now."""
    (pid,) = target.pids()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), limits[1]))
    try:
        while True:
            yield
    finally:
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_AS, limits)


def full_disk(target: Target, fault: Fault) -> Generator[None]:
    if why := why_not_filled(target.save, target.events):
        raise NotInjected(why)
    file = target.save / FILL
    try:
        with file.open("wb", buffering=0) as opened:
            for size in (2**20, 2**12, 1):
                with suppress(OSError):
                    while opened.write(bytes(size)):
                        pass
        while True:
            yield
    finally:
        file.unlink(missing_ok=True)


def why_not_filled(save: Path, events: Path) -> str:
    """Why this folder's file system may not be filled; empty if it may."""
    size = shutil.disk_usage(save).total
    if size > SMALL:
        return f"{save} is on a file system of {size:,} bytes, more than {SMALL:,}"
    if save.stat().st_dev == events.stat().st_dev:
        return f"{save} has no file system of its own: {events} is on it, too"
    return ""


def newest_folders(save: Path) -> list[Path]:
    """The checkpoints, newest first, of any trainer that makes a folder of each."""
    folders = dict[Path, float]()
    for each in save.iterdir():
        if not each.name.startswith(".") and each.suffix != ".abandoned":
            with suppress(FileNotFoundError):  # the run removes old ones
                if each.is_dir():
                    folders[each] = each.stat().st_mtime
    return sorted(folders, key=folders.__getitem__, reverse=True)


def _damage(hurt: Callable[[Path, Fault], None]) -> Injection:
    def inject(target: Target, fault: Fault) -> Generator[None]:
        if len(newest_folders(target.save)) < 2:
            raise NotInjected("there are fewer than two checkpoints")
        launcher = target.start.launcher()
        for pid in ([] if launcher is None else [launcher]) + target.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10  # until they write and remove nothing more
        while {*target.start.ranks().values()} & {*target.pids()} and time.monotonic() < deadline:
            time.sleep(0.01)
        # One that they were removing may have lost its files.
        for folder in newest_folders(target.save):
            if files := sorted(e for e in folder.rglob("*") if e.is_file() and e.stat().st_size):
                file = fault.random().choice(files)
                target.facts["file"] = str(file.relative_to(target.save))
                hurt(file, fault)
                break
        yield

    return inject


def truncate(file: Path, fault: Fault) -> None:
    os.truncate(file, fault.random().randrange(file.stat().st_size))


def flip_file(file: Path, fault: Fault) -> None:
    draw = fault.random()
    with file.open("r+b") as opened:
        place = draw.randrange(file.stat().st_size)
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << draw.randrange(8)]))


def ask_probe(target: Target, fault: Fault) -> Generator[None]:
    """A request to the probe of a rank, which answers with an event."""
    file = target.events / f"request_{target.rank}.json"
    request = {"kind": fault.config.kind, "number": fault.number, "seed": fault.draw}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(request))
    partial.rename(file)
    try:
        while file.exists():
            yield
    finally:
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Kind:
    """inject: see above. causes: templates of `patterns`; of_next: the next start prints them.
    to_all: it hits every rank. has_to_end: the run cannot go on after it. saves: checkpoints after
    which a fault that has not ended the run is over."""

    inject: Injection
    causes: Sequence[str]
    of_next: bool = False
    to_all: bool = False
    has_to_end: bool = False
    saves: int = 0


ABSENT = r"{who}.*did not arrive|waiting for {who}|did not reach {who}|{who}.*has not answered"
LOST = (
    rf"{{who}}.*vanished: its process was killed|{ABSENT}|Signal \d+ \(SIG\w+\) .*\b{{pid}}\b"
    r"|exitcode\s*: -\d+.*\bpid: {pid}\b"
)
ENDED = (
    r"ended by SIGTERM|SIGTERM cut the|{who}.*(?:exit status 75|SIGTERM)|SIGTERM.*{who}"
    rf"|Process {{pid}} got signal: 15|{LOST}"
)
STALLED = rf"no progress for .*{{who}}|-> +{{who}}|{{who}}.*does not answer|{ABSENT}"
# gloo does not say whose connections they were; those to the store are left alone. A rank that ends
# by its broken connection may be named as vanished first.
BROKEN = (
    r"^(?!.*TCPStore).*(?:[Cc]onnection (?:closed|reset)|Broken pipe)"
    r"|{who}.*vanished: its process was killed"
)
MEMORY = (
    r"out of memory|[Cc]annot allocate memory|memory allocation of \d+ bytes|bad_alloc"
    r"|MemoryError|Unable to allocate|can't start new thread"
)
# An error of a save has the place of its rank in the layout.
OF_RANK = rf"{{who}}.*(?:out of memory|failed)|on {{who}}$|failed on rank [a-z]+ \d|{LOST}"
DAMAGED = r"^(?=.*/{path}(?:/|:|\s|$)).*(?:passed over: |is damaged)"
KINDS = {
    "kill": Kind(_signal(signal.SIGKILL), [LOST], has_to_end=True),
    "terminate": Kind(_signal(signal.SIGTERM), [ENDED], has_to_end=True),
    "stop": Kind(stop, [STALLED]),
    "slow": Kind(slow, [STALLED]),
    "drop": Kind(ask_probe, [BROKEN], saves=2),
    "memory": Kind(memory, [MEMORY, OF_RANK], saves=2),
    "full_disk": Kind(full_disk, [rf"^(?=.*{{path}}/).*{os.strerror(errno.ENOSPC)}"], saves=2),
    "truncate": Kind(_damage(truncate), [DAMAGED], of_next=True, to_all=True, has_to_end=True),
    "flip_file": Kind(_damage(flip_file), [DAMAGED], of_next=True, to_all=True, has_to_end=True),
    # The list of weights ends before the semicolon, and may be cut. A flipped exponent may make the
    # loss infinite before the replicas are compared.
    "flip_weight": Kind(
        ask_probe,
        [r"replica drift[^;]*(?:(?<![\w.]){key}(?![\w.])|and \d+ more)|is not finite"],
        saves=2,
    ),
}


def patterns(kind: str, rank: int | None, facts: Mapping[str, Any]) -> list[str]:
    """Regular expressions of the lines that have to be there; the first one's line is the cause.

    {who} in a template is the rank, or any rank or launcher that was hit; {pid}: one of
    facts["pids"]; {path}: the folder of facts["file"], or the whole of facts["save"]; {key}: the
    weight facts["key"].
    """
    if rank is not None:
        who = rf"\branks? (?:\d+, )*{rank}\b"
    else:
        who = "the launcher" if facts.get("target") == "launcher" else r"\branks? \d"
    file = Path(facts["file"]).parts[0] if "file" in facts else facts.get("save", "")
    words = {
        "who": who,
        "pid": "(?:" + "|".join(map(str, facts.get("pids", ["no pid"]))) + ")",
        "path": re.escape(file),
        "key": re.escape(facts["key"]) if facts.get("key") else r"[\w.]+",
    }
    return [template.format(**words) for template in KINDS[kind].causes]
