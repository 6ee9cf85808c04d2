"""The failure watch: one rank prints the first failure of the run, and all ranks end.

A thread of each rank writes a report (step, phase, the collective it waits in) once a second to the
store in which the ranks met. It never uses the process groups. It ends its process as soon as the
store holds a *verdict*, which one rank writes:

    a rank raised     It prints its traceback, or only the message of an error that `status_of`
                      knows. An error that another rank's death may have caused waits 5 s for a
                      better cause; then ranks whose reports have stopped are named. One whose
                      process on this host is gone is named at once.
    a rank died       The process of the next rank on this host is gone, and no error shows it, for
                      example while process groups are made.
    a rank left       This rank waits in a collective for one that has left.
    a stall           A rank made no progress for the time limit: it reads all reports twice, 5 s
                      apart. The lowest living rank prints a table that marks ranks that are behind.

Keys of the store: report/R of rank R, verdict; counters left, checks, dumped, leaving.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist

from megatron.config.launch import RankInfo, write_error_file
from megatron.config.parse import user_errors
from megatron.data.files import DataError
from megatron.errors import OutOfMemoryError
from megatron.parallel.agree import AgreedError
from megatron.parallel.mesh import CALLS, Mesh

BEAT = 1.0  # seconds between two reports
ECHO = 5.0  # seconds without a report after which a rank is silent
ENDING = 10.0  # seconds that ranks wait for each other while they end
ROUNDS = 6  # time limits that a rank may work while others wait for it
_YIELD = 4.0  # seconds by which the rank that prints the cause ends first, for torchrun's summary


class Progress:
    """The step and phase of this rank, for the table; `note` changes them."""

    step = 0
    phase = "imports"
    has_limit = True
    began: float | None = None
    """When the phase began; None: with the process."""
    seconds: ClassVar[dict[str, float]] = {}
    """How long the phases before it lasted."""


@contextmanager
def without_limit(phase: str) -> Iterator[None]:
    """Sets the phase, in which no stall is found: a first pass over data may take hours, and ranks
    that wait for its file sleep."""
    note(phase)
    Progress.has_limit = False
    try:
        yield
    finally:
        Progress.has_limit = True


def note(phase: str, step: int | None = None) -> None:
    """Set the phase (and step) of this rank from here on; counts as progress."""
    now, last = time.monotonic(), Progress.phase
    began = now - _age() if Progress.began is None else Progress.began
    Progress.seconds[last] = Progress.seconds.get(last, 0.0) + now - began
    Progress.phase, Progress.began = phase, now
    Progress.step = Progress.step if step is None else step


def start_seconds() -> dict[str, float]:
    """{phase: seconds} since this process began, to be read once. "imports" has the parsing of
    arguments, too."""
    note(Progress.phase)
    return {phase: round(seconds, 3) for phase, seconds in Progress.seconds.items()}


@dataclass(frozen=True)
class Wait:
    """A rank waits in the `number`-th collective of an axis; ranks: the members of its group."""

    axis: str
    number: int
    what: str
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"{self.axis}: {self.what}, number {self.number}"


@dataclass(frozen=True)
class Report:
    """The status of a rank.

    who: the rank, its coordinates and host. started: number of collectives started, by axis. idle:
    seconds without progress. number: counts this rank's reports. left: the exit status of a rank
    that waits for the others' end.
    """

    who: str
    step: int
    phase: str
    started: Mapping[str, int]
    waits: Sequence[Wait]
    idle: float
    number: int = 0
    left: int | None = None

    def describe(self) -> str:
        waits = "".join(f", in {wait}" for wait in self.waits)
        return f"step {self.step}, {self.phase}{waits}"


@dataclass(frozen=True)
class Arrival:
    """A process, as it describes itself to the other ranks.

    size: the number of ranks that it was given. namespace: the boot of its host and the
    namespace in which `pid` is valid; empty if the system does not say. began: see `began_at`.
    """

    host: str
    size: int
    gpus: int
    namespace: str = ""
    pid: int = 0
    began: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. printer: the rank that prints the text, or the headline; -1: none does.
    status: of every process. absent: ranks that cannot end by themselves. dumps: all ranks dump
    their stacks."""

    headline: str
    printer: int
    text: str = ""
    status: int = 1
    absent: int = 0
    dumps: bool = False


def status_of(error: BaseException) -> int | None:
    """The exit status of an error whose message is all that a user needs; None for any other."""
    if isinstance(error, DataError | OutOfMemoryError):
        return 2
    return 1 if isinstance(error, AgreedError) else None


@contextmanager
def one_message(environ: Mapping[str, str]) -> Iterator[None]:
    """Ends a program of one process, which is not watched, as `Watch` ends several."""
    try:
        yield
    except Exception as error:
        if (status := status_of(error)) is None:
            raise
        with suppress(SystemExit), user_errors(environ, kinds=(type(error),)):
            raise
        raise SystemExit(status) from error


class Watch:
    """Watches a rank from its meeting with the others to its end.

    store: a client of its own, whose calls here never wait for a key. limit: seconds without
    progress. error_file: torchrun's, or None. dump_prefix: path of the flight recorder's dump,
    without the rank. The `with` ends only when all ranks have left; an exception inside ends the
    process.
    """

    def __init__(
        self,
        store: dist.Store,
        info: RankInfo,
        limit: float,
        error_file: str | None,
        dump_prefix: str,
    ) -> None:
        self._store, self._limit, self._info = store, limit, info
        self._rank, self._size = info.rank, info.size
        self._error_file, self._dump_prefix = error_file, dump_prefix
        self._who = f"rank {self._rank} of {self._size} on {socket.gethostname()}"
        self._has_met = False
        self._has_mesh = False
        self._near: Mapping[int, Arrival] = {}  # the ranks in the same namespace
        self._left: int | None = None  # this rank's exit status, once it waits for the others' end
        self._number = self._checks = 0
        self._progress: tuple[object, ...] = ()
        # Seconds, counted in beats, so that no time passes while all ranks are stopped (Ctrl-Z).
        self._idle = self._unchecked = 0.0
        # The last report of the rank that keeps the store; the next rank says it if that one ends.
        self._last_of_keeper: Report | None = None
        self._closed = threading.Event()
        self._ends = threading.Lock()  # is never released
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "watch"), (self._guard, "guard of the watch"))
        ]

    def all_arrived(self, arrivals: Sequence[Arrival]) -> None:
        """From here on, a rank that waits for another is stalled. arrivals: of all ranks."""
        local = arrivals[self._rank]
        if local.namespace:
            near = enumerate(arrivals)
            self._near = {n: each for n, each in near if each.namespace == local.namespace}
        self._has_met = True

    def add_mesh(self, mesh: Mesh) -> None:
        """From here on, errors are failures of the run, and the rank has coordinates. Every rank
        calls this."""
        rank = f"rank {self._rank} of {self._size} ({mesh.describe_rank()})"
        self._who, self._has_mesh = f"{rank} on {socket.gethostname()}", True
        self._publish()
        reports = mesh.control.gather(self._report())  # all have coordinates
        if self._info.is_host and self._rank == 1:
            self._last_of_keeper = reports[0]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None or isinstance(error, SystemExit):
                self._leave(error)
            elif isinstance(error, KeyboardInterrupt):
                self._end(Verdict(f"{self._who} was interrupted", self._rank, status=130))
            elif isinstance(error, ValueError | OSError) and not self._has_mesh:
                # The user's mistake. The first rank that meets it raises it.
                self._close()
                if not self._decide(Verdict(f"{self._who}: {error}", printer=-1, status=2)):
                    self.follow()
                self._wait_to_exit(self._size)
            elif (known := status_of(error)) is not None:
                notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                self._end(Verdict(f"error: {error}{notes}", self._rank, status=known))
            else:
                traceback_text = "".join(traceback.format_exception(error)).rstrip()
                if isinstance(error, RuntimeError):  # e.g. a broken connection: who is the cause?
                    self._name_dead(f":\n{traceback_text}")
                summary = f"{type(error).__name__}: {error}".splitlines()[0]
                text = f"{self._who} failed:\n{traceback_text}"
                self._end(Verdict(f"{self._who} failed: {summary}", self._rank, text))
        except dist.DistError:
            self._threads[0].join()  # the store is gone; the thread sees this, too, and ends us

    # Run by the main thread.

    def _leave(self, stop: SystemExit | None) -> None:
        """Wait until all have left, so that nobody waits for a rank that is gone."""
        code = None if stop is None else stop.code
        status = code if isinstance(code, int) else int(code is not None)
        if not self._has_mesh:
            headline = f"{self._who} left, with exit status {status}, before the run began"
            self._end(Verdict(headline, self._rank, status=status or 1))
        self._left = status
        note(f"left with exit status {status}")
        self._publish()
        self._store.add("left", 1)
        pause = 0.01
        while self._store.add("left", 0) < self._size:
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)
        self._close()
        self._wait_to_exit(self._size)

    def _close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _name_dead(self, trace: str = "") -> None:
        """End the run if there are ranks whose reports have stopped."""
        reports, dead = self._read_twice()
        if not dead:
            return
        headline = f"{name_ranks(reports, dead)} vanished: its process was killed or crashed"
        last = [f"  {reports[rank].who} was last at {reports[rank].describe()}" for rank in dead]
        echo = f"  {self._who} was at {self._report().describe()}{trace}"
        text = "\n".join([headline, *last, echo])
        self._end(Verdict(headline, self._rank, text, absent=len(dead)))

    # How a run ends.

    def _end(self, verdict: Verdict) -> NoReturn:
        """End the run with this verdict, unless another rank has written one before."""
        self._decide(verdict)
        self.follow()
        raise AssertionError("a verdict ends the process")

    def _decide(self, verdict: Verdict) -> bool:
        """Write the verdict unless the run has one; return whether the run now has this one."""
        content = json.dumps(asdict(verdict))
        return self._store.compare_set("verdict", "", content).decode() == content

    def follow(self) -> None:
        """End this process if a rank has written the verdict."""
        if not self._store.check(["verdict"]):
            return
        verdict = Verdict(**json.loads(self._store.get("verdict")))
        self._prepare_exit()
        is_printer, living = verdict.printer == self._rank, self._size - verdict.absent
        try:
            write_error_file(self._error_file, verdict.headline)
            if verdict.dumps:  # before any rank ends, which breaks the others' connections
                self._dump()
                self._count("dumped", living)
            if is_printer:
                print(verdict.text or verdict.headline, file=sys.stderr, flush=True)
            self._wait_to_exit(living)
            if self._error_file is not None and not is_printer:
                time.sleep(_YIELD)
        finally:
            _exit_now(verdict.status)

    def _prepare_exit(self) -> None:
        self._ends.acquire()  # only one of two threads ends the process
        with suppress(RuntimeError):  # out of memory, it cannot start its thread
            faulthandler.dump_traceback_later(30, exit=True)  # in case the end hangs, too

    def _wait_to_exit(self, count: int) -> None:
        """Return once `count` ranks have read how the run ends: the store may end with rank 0, or
        with the launcher of any rank, which ends with its ranks."""
        self._count("leaving", count, waits=not self._info.is_host or self._rank == 0)

    def _count(self, key: str, count: int, waits: bool = True) -> None:
        """Count this rank, and wait for the others."""
        deadline = time.monotonic() + ENDING
        with suppress(dist.DistError):  # others have ended already
            self._store.add(key, 1)
            while waits and self._store.add(key, 0) < count and time.monotonic() < deadline:
                time.sleep(0.02)

    def _dump(self) -> None:
        """Print the stacks of this process, and write torch's flight recorder of its collectives.

        No public function writes it at once: torch dumps NCCL's only after its own time limit. The
        private names are those of torch 2.11 to 2.13.
        """
        print(f"{self._who}: stacks", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        path = Path(f"{self._dump_prefix}{self._rank}.json")
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            with suppress(Exception):  # the message matters more
                content = getattr(torch._C._distributed_c10d, name)()
                if json.loads(content).get("entries"):
                    path.write_bytes(content)
                    text = f"{self._who}: torch's flight recorder is in {path}"
                    print(text, file=sys.stderr, flush=True)
                    return

    # Run by the threads.

    def _run(self) -> None:
        """Once a second: report, follow a verdict, and look for ranks that left, died or stall.

        A rank makes progress if it calls `note`, starts a collective, or is elsewhere in Python
        than at the last beat: it computes, evaluates, writes or hashes. A rank inside a single call
        into C makes none. Nor does one that sleeps: a polling loop releases Python's lock only in
        its sleep.
        """
        try:
            while not self._closed.wait(BEAT if self._number else 0):
                has_met = self._has_met  # read first: what was noted by then counts as progress
                progress = (Progress.phase, Progress.step, _started(), _positions())
                is_idle = progress == self._progress and Progress.has_limit
                self._idle = self._idle + BEAT if is_idle else 0.0
                self._progress = progress
                report = self._publish()
                self.follow()
                if self._left is None and has_met:
                    self._find_leaver(report)
                    if self._gone():
                        self._name_dead()
                    self._find_stall()
                if self._last_of_keeper is not None:
                    self._last_of_keeper = self._read(0)
        except dist.DistError:
            if not self._closed.is_set():
                self._lose_store("vanished: its process was killed or crashed")

    def _report(self) -> Report:
        waits = []
        for axis, calls in [*CALLS.items()]:
            if (call := calls.waits) is not None:
                number, name, shape = call
                shown = [*shape] if isinstance(shape, torch.Size) else shape
                waits.append(Wait(axis, number, f"{name} of {shown}", calls.ranks))
        return Report(
            who=self._who,
            step=Progress.step,
            phase=Progress.phase,
            started=_started(),
            waits=waits,
            idle=self._idle,
            number=self._number,
            left=self._left,
        )

    def _publish(self) -> Report:
        self._number += 1
        report = self._report()
        self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
        return report

    def _read(self, rank: int) -> Report:
        """The last report of this rank."""
        if not self._store.check([f"report/{rank}"]):
            return Report(f"rank {rank}", 0, "not started", {}, [], 0.0)
        fields = json.loads(self._store.get(f"report/{rank}"))
        return Report(**fields | {"waits": [Wait(**wait) for wait in fields["waits"]]})

    def _read_twice(self) -> tuple[dict[int, Report], list[int]]:
        """(the last report of each rank, the ranks that are gone or have written none for 5 s)."""
        before = [self._read(rank).number for rank in range(self._size)]
        deadline = time.monotonic() + ECHO
        while not (gone := self._gone()) and time.monotonic() < deadline:
            self._publish()  # the thread that publishes may be this one
            self.follow()
            time.sleep(0.1)
        reports = {rank: self._read(rank) for rank in range(self._size)}
        silent = [rank for rank in reports if reports[rank].number == before[rank]]
        return reports, gone or silent

    def _gone(self) -> list[int]:
        """The ranks of this host whose processes have ended before this rank has left: until then
        none ends by itself."""
        known = [(rank, each) for rank, each in self._near.items() if each.began]
        gone = [rank for rank, each in known if began_at(each.pid) not in (each.began, "")]
        return gone if self._left is None else []  # read last

    def _find_leaver(self, report: Report) -> None:
        """End the run if this rank waits for one that has left and so can never come."""
        if not report.waits or not self._store.add("left", 0):
            return
        for wait in report.waits:
            for other in map(self._read, wait.ranks):
                if other.left is not None and other.started.get(wait.axis, 0) < wait.number:
                    left = f"left the run, with exit status {other.left}, before the others"
                    headline = f"{other.who} {left}"
                    text = f"{headline}\n  {self._who} waits for it in {wait}"
                    self._end(Verdict(headline, self._rank, text, other.left or 1))

    def _find_stall(self) -> None:
        """End the run if this rank has made no progress for the limit and some ranks are behind."""
        checks = self._store.add("checks", 0)
        # A rank that checks for a stall spares the others the check for one limit.
        self._unchecked = 0.0 if checks > self._checks else self._unchecked + BEAT
        self._checks = checks
        if min(self._idle, self._unchecked) <= self._limit:
            return
        if self._store.add("checks", 1) > checks + 1:
            return
        reports, silent = self._read_twice()
        living = [rank for rank in reports if rank not in silent]
        working = [rank for rank in living if reports[rank].idle < self._limit]
        if max(reports[rank].idle for rank in living) > ROUNDS * self._limit:
            working = []
        behind, what = find_behind(reports, silent, working)
        if behind:
            names = f"{name_ranks(reports, behind)} {'is' if len(behind) == 1 else 'are'} {what}"
            headline = f"no progress for {self._limit:g} s: {names}"
            cure = "if one save, load or evaluation takes so long: --distributed-timeout-minutes N"
            cure += f", with N above {self._limit / 60:g}"
            text = f"{headline}\n{table(reports, behind, silent)}\n{cure}"
            self._end(Verdict(headline, living[0], text, absent=len(silent), dumps=True))

    def _guard(self) -> None:
        """Ends the rank if the store of a stopped keeper does not answer; `_run` waits for it."""
        number, silence = 0, 0.0
        while not self._closed.wait(BEAT):
            silence = 0.0 if self._number > number else silence + BEAT
            number = self._number
            if silence > self._limit + 2 * ECHO:
                self._lose_store(
                    f"has not answered for {silence:.0f} s: its process is stopped, or its host "
                    "is gone"
                )

    def _lose_store(self, fate: str) -> NoReturn:
        """Without the store the ranks cannot agree; the lowest one left prints what it knows."""
        self._prepare_exit()
        if self._rank == int(self._info.is_host):
            headline = f"{self._info.keeper}, where the ranks meet, {fate}"
            lines = [f"  {self._who} was at {self._report().describe()}"]
            if (keeper := self._last_of_keeper) is not None:
                headline = f"{keeper.who} {fate}"
                lines.insert(0, f"  it was last at {keeper.describe()}")
            print("\n".join([headline, *lines]), file=sys.stderr, flush=True)
            write_error_file(self._error_file, headline)
        _exit_now(1)


def _exit_now(status: int) -> NoReturn:
    """Ends the process even if its main thread is stuck in a collective; no exception would."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def began_at(pid: int) -> str | None:
    """When a process here began, in ticks since the boot; None if it has ended, "" if that cannot
    be read, such as without file descriptors."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""
    return None if state in (b"Z", b"X") else fields[18].decode()


def _age() -> float:
    """Seconds since this process began; 0.0 if the system does not say."""
    if not (ticks := began_at(os.getpid())):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def _started() -> dict[str, int]:
    """The number of collectives that this rank has started, by axis."""
    return {axis: calls.started for axis, calls in [*CALLS.items()]}


def _positions() -> tuple[tuple[int, int], ...]:
    """(code, instruction) of every call on the stacks of the main thread and of a saving one."""
    threads = [threading.main_thread(), *(t for t in threading.enumerate() if t.name == "save")]
    frames, positions = sys._current_frames(), []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            positions.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return tuple(positions)


def find_behind(
    reports: Mapping[int, Report], silent: Collection[int], working: Collection[int]
) -> tuple[list[int], str]:
    """(ranks that hold up a stalled run, what they are); no ranks if these are working.

    silent: ranks that no longer report. working: ranks that make progress. A rank is behind if
    others wait for it and it waits for no other, or if it is silent. A rank that skipped a
    collective of a step closes a circle of waits as soon as it waits in a collective of all ranks:
    then waits of the control groups are ignored.
    """
    circle: set[int] = set()
    for ignored in ((), ("control", "save")):
        edges = {
            (rank, other)
            for rank, report in reports.items()
            for wait in report.waits
            if wait.axis not in ignored and rank not in silent
            for other in wait.ranks
            if reports[other].started.get(wait.axis, 0) < wait.number
        }
        waiting, awaited = {rank for rank, _ in edges}, {other for _, other in edges}
        if behind := (awaited - waiting) | {*silent}:
            return sorted(behind - {*working}), "behind"
        circle = circle or waiting & awaited
    if circle:
        behind, what = circle, "waiting for each other"
    else:  # No rank is known to wait, as on GPUs, whose collectives do not block Python.
        done = {rank: (each.step, sum(each.started.values())) for rank, each in reports.items()}
        behind, what = {rank for rank in reports if done[rank] == min(done.values())}, "behind"
        if len(behind) == len(reports):
            behind = {rank for rank in reports if not reports[rank].waits} or behind
            what = "not waiting for another rank"
    return ([], "") if behind & {*working} else (sorted(behind), what)


def table(reports: Mapping[int, Report], behind: Collection[int], silent: Collection[int]) -> str:
    """The status of each rank, one per line; ranks that are behind are marked."""
    rows = [("", "rank", "step", "phase", "waits in (axis: collective)", "idle, s")]
    for rank, each in reports.items():
        mark, step, idle = "->" if rank in behind else "", str(each.step), f"{each.idle:.0f}"
        phase = f"{each.phase} (does not answer)" if rank in silent else each.phase
        waits = "; ".join(map(str, each.waits)) or "-"
        rows.append((mark, each.who, step, phase, waits, idle))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def name_ranks(reports: Mapping[int, Report], ranks: Sequence[int]) -> str:
    names = ", ".join(reports[rank].who for rank in ranks[:4])
    return names + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
