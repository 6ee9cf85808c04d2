"""The first failure is the message: one rank prints what happened, and all ranks end.

Beside the main thread of each rank runs a thread that once a second writes a report (step, phase,
the collective it waits in) to the store in which the ranks met. It never uses the process groups.
It ends its process as soon as the store holds a *verdict*, which one rank writes:

    a rank raised     It prints its traceback. An error that may be the echo of another rank's death
                      waits 5 s for a better cause; then ranks whose reports have stopped are named.
    a rank left       while this one waits for it in a collective.
    a stall           A rank made no progress for the time limit: all answer where they stand, and
                      the lowest that answers prints a table that names those who are behind.

Keys of the store: report/R, left/R of rank R; stall/N, answer/N/R of the Nth stall; verdict.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.config.launch import Place, write_error_file
from megatron.parallel.mesh import CALLS, Mesh

BEAT = 1.0  # seconds between two reports
ECHO = 5.0  # seconds for which an error that may be an echo waits for a better cause
ANSWER = 5.0  # a rank that does not answer within these seconds is stopped
ROUNDS = 6  # limits that a rank may work without a collective while others wait for it
_START = 240.0  # seconds before the mesh is built in which waiting for ranks is no stall
_SLACK = 3.0  # ranks that stop together see it within so many seconds
_GATHER = 3.0  # seconds in which the ranks that end dump their stacks, before the table
_YIELD = 4.0  # seconds by which the rank that tells the cause ends first, for torchrun's summary


class Progress:
    """What this rank is doing, for the table; `note` changes it."""

    step = 0
    phase = "start-up"


def note(phase: str, step: int | None = None) -> None:
    """Note what this rank does from here on; counts as progress."""
    Progress.phase = phase
    Progress.step = Progress.step if step is None else step


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
    """Where a rank stands. begun: collectives, by axis. idle: seconds without progress."""

    who: str
    host: str
    step: int
    phase: str
    begun: Mapping[str, int]
    waits: Sequence[Wait]
    idle: float
    is_working: bool = False  # it moves in Python, and has not done so for too long
    number: int = 0  # of this rank's reports
    answered: bool = True

    def place(self) -> str:
        waits = "".join(f", in {wait}" for wait in self.waits)
        return f"step {self.step}, {self.phase}{waits}"


def read_report(text: str | bytes) -> Report:
    fields = json.loads(text)
    return Report(**fields | {"waits": [Wait(**wait) for wait in fields["waits"]]})


def find_behind(reports: Mapping[int, Report]) -> tuple[list[int], str]:
    """(ranks that hold up a stalled run, what they are); no ranks where those are at work.

    A rank in the nth collective of an axis waits for those of the group that have begun fewer. Who
    is waited for and waits for nobody is behind. A rank that skipped a collective of a step closes
    a circle as soon as it waits in one of all ranks: then the control groups' waits are no sign.
    """
    silent = {rank for rank, report in reports.items() if not report.answered}
    circle: set[int] = set()
    for ignored in ((), ("control", "save")):
        edges = {
            (rank, other)
            for rank, report in reports.items()
            for wait in report.waits
            if wait.axis not in ignored and rank not in silent
            for other in wait.ranks
            if reports[other].begun.get(wait.axis, 0) < wait.number
        }
        waiting, awaited = {rank for rank, _ in edges}, {other for _, other in edges}
        if behind := (awaited - waiting) | silent:
            held = sorted(rank for rank in behind if not reports[rank].is_working)
            return held, "behind"
        circle = circle or waiting & awaited
    if circle:
        found, what = sorted(circle), "waiting for each other"
    else:  # Nobody is known to wait, as on a GPU, whose collectives do not block Python.
        done = {rank: (each.step, sum(each.begun.values())) for rank, each in reports.items()}
        found, what = [rank for rank in reports if done[rank] == min(done.values())], "behind"
        if len(found) == len(reports):
            found = [rank for rank in reports if not reports[rank].waits] or found
            what = "not waiting for another rank"
    return ([], "") if any(reports[rank].is_working for rank in found) else (found, what)


def table(reports: Mapping[int, Report], behind: Sequence[int]) -> str:
    """Where each rank stands, a line each, those that are behind marked."""
    rows = [("", "rank", "host", "step", "phase", "waits in (axis: collective)", "idle, s")]
    for rank, report in reports.items():
        waits = "; ".join(map(str, report.waits)) or "-"
        mark = "->" if rank in behind else ""
        state = report.phase if report.answered else f"{report.phase} (does not answer)"
        idle = f"{report.idle:.0f}"
        rows.append((mark, report.who, report.host, str(report.step), state, waits, idle))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def name_ranks(reports: Mapping[int, Report], ranks: Sequence[int]) -> str:
    names = ", ".join(f"{reports[rank].who} on {reports[rank].host}" for rank in ranks[:4])
    return names + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


class Watch:
    """Around all that a rank does between meeting the others and its end.

    store: a client of its own, whose calls here never wait for a key. limit: seconds without
    progress. As a context manager it returns only when all ranks have left; an exception inside
    ends the process.
    """

    def __init__(
        self, store: dist.Store, place: Place, limit: float, error_file: str | None
    ) -> None:
        self._store, self._place, self._limit, self._error_file = store, place, limit, error_file
        self._rank, self._size, self._is_kept = place.rank, place.size, place.is_host
        self._who, self._host = f"rank {place.rank} of {place.size}", socket.gethostname()
        self._is_built = self._left = False
        self._number = self._stalls = self._rounds = 0
        self._seen: tuple[object, ...] = ()
        self._moved = self._asked = self._heard = time.monotonic()
        self._first: Report | None = None  # of rank 0, where it keeps the store
        self._closed = threading.Event()
        self._ends = threading.Lock()  # is never released
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "watch"), (self._guard, "guard of the watch"))
        ]

    def know(self, mesh: Mesh) -> None:
        """From here on errors are failures of the run, and the rank has coordinates."""
        at = ", ".join(f"{axis} {rank}" for axis, rank in mesh.coordinates.items())
        self._who, self._is_built = f"{self._who} ({at})", True
        self._publish()

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        name = f"{self._who} on {self._host}"
        try:
            if error is None or isinstance(error, SystemExit):
                self._leave(error, name)
            elif isinstance(error, KeyboardInterrupt):
                self._end(f"{name} was interrupted", status=130)
            elif isinstance(error, ValueError | OSError) and not self._is_built:
                # The user's mistake. Of the ranks that meet it, one raises it.
                self._claim()
                self._close()
                self._announce(f"{name}: {error}", status=2)
                self._part()
            else:
                self._fail(error, name)
        except dist.DistError:
            self._threads[0].join()  # the store is gone: the thread, which meets the same, ends us

    # What the main thread does.

    def follow(self) -> None:
        """End this process if a rank has written the verdict."""
        if not self._store.check(["verdict"]):
            return
        verdict = json.loads(self._store.get("verdict"))
        self._prepare_exit()
        try:
            if verdict["dumps"]:
                self._dump()
            self._store.add("gone", 1)
            if verdict["dumps"]:  # an end breaks the connections of who has not dumped yet
                self._await_gone(self._size - 1 - verdict["absent"], _GATHER, everywhere=True)
            if self._error_file is not None:
                write_error_file(self._error_file, verdict["headline"])
                time.sleep(_YIELD)
            self._await_gone(self._size - verdict["absent"])
        finally:
            _exit_now(verdict["status"])

    def _leave(self, stop: SystemExit | None, name: str) -> None:
        """Wait until all have left, so that nobody waits for who is gone."""
        status = 0 if stop is None or stop.code is None else stop.code
        if not self._is_built:
            headline = f"{name} left, with exit status {status}, before the run began"
            self._end(headline, status=_as_status(status))
        note(f"left with exit status {status}")
        self._left = True
        self._store.set(f"left/{self._rank}", json.dumps([status, asdict(self._report())]))
        if self._store.add("left", 1) == self._size:
            self._store.set("all left", "")
        pause = 0.01
        while not self._store.check(["all left"]):
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)
        self._close()
        self._part()

    def _close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _part(self) -> None:
        """Go on without the others once all know that they may: the store may end with rank 0, or
        with the launcher of any rank, which ends with its ranks."""
        with suppress(dist.DistError):  # others knew before
            self._store.add("gone", 1)
            self._await_gone(self._size, everywhere=not self._is_kept)

    def _fail(self, error: BaseException, name: str) -> NoReturn:
        """End with this rank's traceback, unless another rank's end is the cause of it."""
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        trace = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, RuntimeError):  # as a broken connection is
            before, deadline = self._reports(), time.monotonic() + ECHO
            while time.monotonic() < deadline:
                self.follow()
                time.sleep(0.1)
            after = self._reports()
            dead = [each for each in after if after[each].number == before[each].number]
            if dead:
                headline = f"{name_ranks(after, dead)} vanished: its process was killed or crashed"
                places = [f"  {after[each].who} was last at {after[each].place()}" for each in dead]
                echo = f"  {name} was at {self._report().place()}:\n{trace}"
                self._end(headline, "\n".join([headline, *places, echo]), absent=len(dead))
        self._end(f"{name} failed: {summary}", f"{name} failed:\n{trace}")

    # How a process ends.

    def _claim(self) -> None:
        """Return on the first rank that comes here; on the others the verdict ends the process."""
        if self._store.add("claims", 1) > 1:
            deadline = time.monotonic() + 2 * ANSWER
            while time.monotonic() < deadline:
                self.follow()
                time.sleep(0.05)

    def _announce(self, headline: str, status: int, dumps: bool = False, absent: int = 0) -> None:
        verdict = {"headline": headline, "status": status, "dumps": dumps, "absent": absent}
        self._store.set("verdict", json.dumps(verdict))

    def _end(
        self,
        headline: str,
        text: str | None = None,
        *,
        status: int = 1,
        absent: int = 0,
        dumps: bool = False,
    ) -> NoReturn:
        """End the run for this reason, unless another rank has told one before.

        text: printed, where it is more than the headline. absent: ranks that cannot end by
        themselves. dumps: every rank dumps its stacks first.
        """
        self._claim()
        self._prepare_exit()
        try:
            write_error_file(self._error_file, headline)
            if not dumps:
                print(text or headline, file=sys.stderr, flush=True)
            self._announce(headline, status, dumps, absent)
            if dumps:
                self._dump()
                self._await_gone(self._size - 1 - absent, _GATHER, everywhere=True)
                print(text or headline, file=sys.stderr, flush=True)
            self._store.add("gone", 1)
            self._await_gone(self._size - absent)
        finally:
            _exit_now(status)

    def _prepare_exit(self) -> None:
        self._ends.acquire()  # of two threads, one ends the process
        faulthandler.dump_traceback_later(30, exit=True)  # in case that ending hangs, too

    def _await_gone(self, count: int, seconds: float = ANSWER, *, everywhere: bool = False) -> None:
        """Who keeps the store lets the others go first."""
        deadline = time.monotonic() + seconds
        if everywhere or (self._is_kept and self._rank == 0):
            while self._store.add("gone", 0) < count and time.monotonic() < deadline:
                time.sleep(0.02)

    def _dump(self) -> None:
        print(f"{self._who} on {self._host}: stacks", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        if path := _dump_flight_recorder(self._rank):
            print(f"{self._who}: torch's flight recorder is in {path}", file=sys.stderr, flush=True)

    # What the thread does.

    def _run(self) -> None:
        try:
            while not self._closed.wait(BEAT if self._number else 0):
                self._beat()
        except dist.DistError:
            if not self._closed.is_set():
                self._lose_store("vanished: its process was killed or crashed")

    def _beat(self) -> None:
        self._number += 1
        self._look()
        report = self._publish()
        self.follow()
        if self._store.check([f"stall/{self._stalls}"]):
            self._answer()
        if not self._left:
            self._find_leaver(report)
            limit = self._limit if self._is_built else max(self._limit, _START)
            if time.monotonic() - max(self._moved, self._asked) > limit:
                self._store.set(f"stall/{self._stalls}", "")
        if self._is_kept and self._rank == 1:
            self._first = self._reports(ranks=[0])[0]
        self._heard = time.monotonic()

    def _publish(self) -> Report:
        report = self._report()
        self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
        return report

    def _look(self) -> None:
        """A rank makes progress when it notes something, begins a collective, or is elsewhere in
        Python than at the last look: it computes, evaluates, writes or hashes. One in a single call
        into C does not, nor one that sleeps: a loop that polls gives Python's lock away nowhere but
        in its sleep.
        """
        begun = {name: calls.begun for name, calls in [*CALLS.items()]}
        seen = (Progress.phase, Progress.step, begun, _positions())
        if seen != self._seen:
            self._moved = time.monotonic()
        if self._seen and begun != self._seen[2]:
            self._rounds = 0
        self._seen = seen

    def _report(self) -> Report:
        waits = []
        for axis, calls in [*CALLS.items()]:
            if (call := calls.waits) is not None:
                number, name, shape = call
                shown = [*shape] if isinstance(shape, torch.Size) else shape
                waits.append(Wait(axis, number, f"{name} of {shown}", calls.ranks))
        idle = time.monotonic() - self._moved
        moves = idle < self._limit - min(_SLACK, self._limit / 2)
        return Report(
            who=self._who,
            host=self._host,
            step=Progress.step,
            phase=Progress.phase,
            begun={axis: calls.begun for axis, calls in [*CALLS.items()]},
            waits=waits,
            idle=idle,
            is_working=moves and self._rounds < ROUNDS,
            number=self._number,
        )

    def _reports(self, prefix: str = "report", ranks: Sequence[int] = ()) -> dict[int, Report]:
        """The last report of these ranks, or all; with a prefix, its answer where there is one."""
        reports = {}
        for rank in ranks or range(self._size):
            for key in (f"{prefix}/{rank}", f"report/{rank}"):
                if self._store.check([key]):
                    answered = key.startswith(prefix)
                    report = replace(read_report(self._store.get(key)), answered=answered)
                    reports[rank] = report if answered else replace(report, is_working=False)
                    break
            else:
                unknown = Report(f"rank {rank}", "?", 0, "not begun", {}, [], 0.0, answered=False)
                reports[rank] = unknown
        return reports

    def _find_leaver(self, report: Report) -> None:
        """End the run where this rank waits for one that has left, and so can never come."""
        if not report.waits or not self._store.add("left", 0):
            return
        for wait in report.waits:
            for rank in wait.ranks:
                if not self._store.check([f"left/{rank}"]):
                    continue
                status, fields = json.loads(self._store.get(f"left/{rank}"))
                if fields["begun"].get(wait.axis, 0) < wait.number:
                    who = f"{fields['who']} on {fields['host']}"
                    headline = f"{who} left the run, with exit status {status}, before the others"
                    text = f"{headline}\n  {self._who} waits for it in {wait}"
                    self._end(headline, text, status=_as_status(status))

    def _answer(self) -> None:
        """Answer where this rank stands; the lowest one that does decides who is behind."""
        number = self._stalls
        self._stalls, self._rounds, self._asked = number + 1, self._rounds + 1, time.monotonic()
        self._store.set(f"answer/{number}/{self._rank}", json.dumps(asdict(self._report())))
        keys, deadline = [f"answer/{number}/{rank}" for rank in range(self._size)], self._asked
        while not self._store.check(keys) and time.monotonic() < deadline + ANSWER:
            self.follow()
            time.sleep(0.1)
        reports = self._reports(f"answer/{number}")
        silent = [rank for rank, report in reports.items() if not report.answered]
        if self._rank != min(set(reports) - set(silent)):
            return
        behind, what = find_behind(reports)
        if behind and self._store.add(f"judges/{number}", 1) == 1:
            names = f"{name_ranks(reports, behind)} {'is' if len(behind) == 1 else 'are'} {what}"
            headline = f"no progress for {self._limit:g} s: {names}"
            cure = "if one save, load or evaluation takes so long: --distributed-timeout-minutes N"
            text = (
                f"{headline}\n{table(reports, behind)}\n{cure}, with N above {self._limit / 60:g}"
            )
            self._end(headline, text, absent=len(silent), dumps=True)

    def _guard(self) -> None:
        """A store whose keeper is stopped does not answer, and the other thread waits for it."""
        while not self._closed.wait(BEAT):
            silence = time.monotonic() - self._heard
            if silence > self._limit + 2 * ANSWER:
                self._lose_store(
                    f"has not answered for {silence:.0f} s: its process is stopped, or its host "
                    "is gone"
                )

    def _lose_store(self, fate: str) -> NoReturn:
        """Nothing can be agreed any more: the lowest rank that is left says what it knows."""
        self._prepare_exit()
        if self._rank == int(self._is_kept):
            headline = f"{self._place.keeper}, where the ranks meet, {fate}"
            if self._first is not None:
                headline = f"{self._first.who} on {self._first.host} {fate}"
                headline += f"\n  it was last at {self._first.place()}"
            echo = f"\n  {self._who} on {self._host} was at {self._report().place()}"
            print(headline + echo, file=sys.stderr, flush=True)
            write_error_file(self._error_file, headline.splitlines()[0])
        _exit_now(1)


def _exit_now(status: int) -> NoReturn:
    """The main thread may be stuck in a collective, so that no exception would end the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _as_status(code: object) -> int:
    """Of a run of which one rank left with `code` before the others: never 0."""
    return code if isinstance(code, int) and code > 0 else 1


def _positions() -> tuple[tuple[int, int], ...]:
    """(code, instruction) of every call on the stacks of the main thread and of one that saves."""
    threads = [threading.main_thread(), *(t for t in threading.enumerate() if t.name == "save")]
    frames, found = sys._current_frames(), []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return tuple(found)


def _dump_flight_recorder(rank: int) -> Path | None:
    """Write what torch's flight recorder knows of this process's collectives, if there is one.

    No public name does it at once: torch itself dumps NCCL's only after its own time limit. The
    private names are those of torch 2.11 to 2.13; the setting for the path is torch's own.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/flight_recorder_")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with suppress(Exception):  # the message matters more
            content = getattr(torch._C._distributed_c10d, name)()
            if json.loads(content).get("entries"):
                path = Path(f"{prefix}{rank}.json")
                path.write_bytes(content)
                return path
    return None
