"""Starts the command, injects the faults, and starts it again, as a cluster's scheduler does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.files import write_atomically
from tools.chaos.faults import KINDS, NotInjected, Start, Target, patterns
from tools.chaos.schedule import TIMED, Fault

TICK = 0.01  # seconds between two looks at the events
LOOK = 0.5  # seconds between two looks at all processes, which take 2 to 5 ms of a core
STARTS = 10  # in a row, without a step or a fault, after which the run is given up
TAIL = 30  # lines of a failed run's text that are shown
LONGEST = 200  # characters of a cause
ASKED = ("drop", "flip_weight")  # kinds that the probe does
FOLDER = "CHAOS_EVENTS"

# Fields of events beside "time".
FIELDS: dict[str, dict[str, Any]] = {
    "loaded": {"step": int},
    "step": {"step": int},
    "evaluation": {"step": int, "at": str},
    "save": {"step": int, "at": str},
    "fault": {"number": int},
}
Event = dict[str, Any]
Launch = Callable[[Sequence[str], Mapping[str, str], Path], Start]
"""(command, variables to add to the environment, folder for what it prints) -> its start."""


class RunFailed(Exception):  # noqa: N818
    """The run ended without a fault, or hangs; the message has the end of what it printed."""


class Command:
    """A start of a command in a session of its own; its processes are those that have its
    variables in their environment."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._events = Path(environ[FOLDER])
        self._log = folder / "output.log"
        self._looked, self._pids, self._ranks, self._size = 0.0, list[int](), dict[int, int](), 1
        self._known = set[int]()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self) -> int | None:
        return self._process.poll()

    def launcher(self) -> int | None:
        is_rank = self._process.pid in self.ranks().values()
        return None if is_rank or self.status() is not None else self._process.pid

    def ranks(self) -> Mapping[int, int]:
        self._look()
        return {rank: pid for rank, pid in self._ranks.items() if _lives(pid)}

    def size(self) -> int:
        self._look()
        return self._size

    def _look(self, longest: float = LOOK) -> None:
        """Finds its processes if the last look was `longest` seconds ago, or a fifth of that while
        there is no rank: a short run could end before."""
        if time.monotonic() < self._looked + (longest if self._ranks else longest / 5):
            return
        mark = f"{FOLDER}={self._events}".encode()
        parents, ranks, size = dict[int, int](), dict[int, int](), 1  # by process
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                pid = int(entry.name)
                if mark in (environ := _environ(pid)):
                    rank = [x[5:] for x in environ if x.startswith(b"RANK=")]
                    sizes = [x[11:] for x in environ if x.startswith(b"WORLD_SIZE=")]
                    parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if rank:
                        ranks[pid] = int(rank[0])
                        size = max([size, *map(int, sizes)])
        self._known |= {
            *(outer := outermost(parents, ranks, self._process.pid, self._known)).values()
        }
        if not outer and self._process.pid in parents and self._writes_events():
            outer = {0: self._process.pid}
        self._pids, self._ranks, self._looked = [*parents], outer, time.monotonic()
        self._size = size

    def _writes_events(self) -> bool:
        """Whether the command itself is a rank, the only one, without a launcher."""
        with suppress(OSError), (self._events / "rank_0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            return f'"pid": {self._process.pid},'.encode() in file.read()
        return False

    def kill(self) -> None:
        while True:
            self._look(0.0)
            if not self._pids:
                break
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()  # reaps it
            time.sleep(TICK)
        self._process.wait()

    def text(self) -> str:
        return self._log.read_text(errors="replace")


def outermost(
    parents: Mapping[int, int], ranks: Mapping[int, int], command: int, known: Set[int]
) -> dict[int, int]:
    """The outermost process of each rank: loaders and compilers below it have its variables. One
    that has outlived its rank is no longer below the command.

    parents: of each process. ranks: of the processes that have one. command: its process. known:
    those found before, which stay ranks when their launcher is killed.
    """
    outer = {}
    for pid, rank in ranks.items():
        above = pid
        while above != command and above in parents:
            above = parents[above]
        if pid in known or (
            above == command and (pid == command or ranks.get(parents[pid]) != rank)
        ):
            outer[rank] = pid
    return outer


def _environ(pid: int) -> list[bytes]:
    """The environment of a process; empty if it has ended."""
    with suppress(OSError):
        return list(filter(None, Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")))
    return []


def _lives(pid: int) -> bool:
    """Whether the process has an environment yet; a third of the time of reading it."""
    with suppress(OSError), Path(f"/proc/{pid}/environ").open("rb", buffering=0) as file:
        return bool(file.read(1))
    return False


@dataclass
class Row:
    """The outcome of a fault. Times are those of time.monotonic().

    begin, until: of the injection; over: when the ranks that it hit had ended, or the run had
    gone on. ended: whether the ranks ended. facts: what the cause has to name, see
    tools.chaos.faults.patterns. cause: the line of the run that names it. is_named: False where
    nobody is left to name it, or no start reads the damaged file.
    """

    number: int
    kind: str
    label: str
    rank: int | None
    begin: float
    until: float = 0.0
    over: float = 0.0
    ended: bool = False
    cause: str | None = None
    is_named: bool = True
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ranks:
    """The ranks from one start to their end. fault: when the fault came that ended them."""

    begin: float
    end: float = 0.0
    fault: float | None = None


@dataclass
class History:
    """All that an account needs, in order of time."""

    generations: list[Ranks] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Those of rank 0."""
    not_injected: list[str] = field(default_factory=list)

    def write(self, file: Path) -> None:
        write_atomically(file, (json.dumps(asdict(self)) + "\n").encode())


class Events:
    """The lines of the probes, read as they are written. steps, saves: done by rank 0. starts: of
    rank 0 since its last step. count: of all ranks' events, without those of a start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of_first: list[Event] = []
        self.answers: dict[int, Event] = {}
        self.count = self.steps = self.saves = self.starts = 0
        self._ends: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}

    def read(self) -> None:
        """Raises RunFailed for a line that is no event."""
        for file in self.folder.glob("rank_*.jsonl"):
            end = self._ends.get(file, 0)
            if file.stat().st_size == end:
                continue
            with file.open("rb") as opened:
                opened.seek(end)
                lines, newline, _ = opened.read().rpartition(b"\n")
            self._ends[file] = end + len(lines) + len(newline)
            for line in lines.splitlines():
                self._lines[file] = number = self._lines.get(file, 0) + 1
                event = _checked(line, file, number)
                self.count += event["event"] not in ("start", "loaded", "started")
                if event["event"] == "fault":
                    self.answers[event["number"]] = event
                if file.name == "rank_0.jsonl":
                    self.of_first.append(event)
                    self.steps += event["event"] == "step"
                    is_step, is_start = event["event"] == "step", event["event"] == "start"
                    self.starts = 0 if is_step else self.starts + is_start
                    self.saves += event["event"] == "save" and event["at"] == "end"

    def phase(self, since: float) -> str:
        """The phase of rank 0; "start" if it has written no line since this moment."""
        last = self.of_first[-1] if self.of_first else None
        return phase_of(None if last is None or last["time"] < since else last)


def _checked(line: bytes, file: Path, number: int) -> Event:
    try:
        event: Event = json.loads(line)
        types: dict[str, Any] = {"time": (int, float), **FIELDS.get(event["event"], {})}
        if all(isinstance(event[name], kind) for name, kind in types.items()):
            return event
        reason = f"wrong value of one of {', '.join(types)}"
    except (ValueError, TypeError, KeyError) as error:
        reason = repr(error)
    raise RunFailed(f"{file}, line {number} is no event of tools/chaos/probe.py: {reason}")


def phase_of(event: Event | None) -> str:
    """The phase of a rank after its last event: start, train, evaluation, save or end."""
    if event is None or event["event"] == "start":
        return "start"
    if event["event"] in ("evaluation", "save") and event["at"] == "begin":
        return str(event["event"])
    return "end" if event["event"] == "end" else "train"


class Supervisor:
    """Runs commands, those of the starts in turn, until one ends with status 0.

    folder: of events and logs. save: of checkpoints. every_steps: whether the faults' gaps are
    steps. restart_seconds: waited before each start but the first, as in a queue. patience: seconds
    without a step, an evaluation or a save after which the run hangs. orphan_seconds: the time
    that ranks may outlive their launcher; a scheduler kills them, too.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        launch: Launch,
        folder: Path,
        save: Path,
        faults: Sequence[Fault] = (),
        *,
        every_steps: bool = False,
        restart_seconds: float = 0.0,
        patience: float = 600.0,
        orphan_seconds: float = 10.0,
        log: Callable[[str], object] = print,
    ) -> None:
        self._commands, self._launch, self._folder, self._save = commands, launch, folder, save
        self._every_steps, self._log = every_steps, log
        self._restart_seconds, self._patience = restart_seconds, patience
        self._orphan_seconds = orphan_seconds
        self._events = Events(folder / "events")
        self._events.folder.mkdir(parents=True)
        self.history = History(events=self._events.of_first)
        self._coming, self._pending = [*faults], list[Fault]()
        self._absent = set[int]()  # numbers of faults whose rank was not there
        self._mark = 0.0  # of the last fault that was due, in seconds or steps
        # The fault in progress: its row, what it still does, the ranks when it came, and the steps
        # and saves when its injection was over; its row while its ranks' launcher still lives.
        self._row: Row | None = None
        self._injection: Generator[None] | None = None
        self._hit: set[int] = set()
        self._progress = (0, 0)
        self._said = ""  # what the start had printed before
        self._ending: Row | None = None
        self._unnamed: list[Row] = []  # whose cause the next start prints

    def run(self) -> History:
        """Raises RunFailed."""
        number, status = 0, -1
        while status:
            words = self._commands[number % len(self._commands)]
            number += 1
            if number > 1:
                time.sleep(self._restart_seconds)
            logs = self._folder / "logs" / f"start_{number:04d}"
            logs.mkdir(parents=True)
            status = self._run_once(words, logs)
        for fault in (*self._pending, *self._coming):
            reason = f"no {fault.config.during} came" if fault in self._pending else "the run ended"
            if fault.number in self._absent:
                reason = f"no rank {fault.config.rank}"
            self.history.not_injected.append(f"{fault.number} {fault.label}: {reason}")
        return self.history

    def _run_once(self, words: Sequence[str], logs: Path) -> int:
        """Runs one start to its end; returns its status."""
        generations = self.history.generations
        now = time.monotonic()
        if not generations and not self._every_steps:
            self._mark = now
        generations.append(Ranks(generations[-1].end if generations else now))
        start = self._launch(words, {FOLDER: str(self._events.folder)}, logs)
        moved, before, alone = now, (0, 0), float("inf")
        try:
            while True:
                status = start.status()
                ranks = {*start.ranks().values()}
                if status is not None and ranks:
                    alone = min(alone, time.monotonic())
                    if time.monotonic() > alone + self._orphan_seconds:
                        self._kill_ranks(start)
                        continue
                self._events.read()
                if self._row is not None:
                    self._follow(start, ranks)
                elif self._ending is not None and ranks:  # the launcher started them again
                    self._name(self._ending, start.text())
                    generations.append(Ranks(self._ending.over))
                    self._ending = None
                elif self._ending is None and status is None:
                    self._inject(start)
                if status is not None and not ranks:
                    return self._end(start, status)
                is_held = self._injection is not None and self._row and self._row.kind in TIMED
                if before != (before := (self._events.count, len(generations))) or is_held:
                    moved = time.monotonic()
                if self._events.starts >= STARTS:
                    raise RunFailed(
                        f"the ranks have started {STARTS} times in a row without a step or a fault"
                        f"{self._after()}\n{tail(start.text())}"
                    )
                if time.monotonic() > moved + self._patience:
                    raise RunFailed(
                        f"the run hangs: nothing has happened for {self._patience:g} s"
                        f"{self._after()}\n{tail(start.text())}"
                    )
                time.sleep(TICK)
        finally:
            start.kill()
            self._close()
            generations[-1].end = generations[-1].end or time.monotonic()

    def _kill_ranks(self, start: Start) -> None:
        """The launcher has ended, and its ranks have not noticed it: they name no cause either."""
        start.kill()
        what = f"the ranks outlived their launcher by {self._orphan_seconds:g} s"
        if self._row is None:
            raise RunFailed(f"{what}{self._after()}\n{tail(start.text())}")
        self._row.note = "; ".join(filter(None, (self._row.note, f"{what}, and were killed")))
        self._log(self._row.note)

    def _close(self) -> None:
        if self._injection is not None:
            self._injection.close()
            self._injection = None

    def _inject(self, start: Start) -> None:
        """The first fault that is due and whose phase is there."""
        while self._coming:
            now = float(self._events.steps) if self._every_steps else time.monotonic()
            if now < self._mark + self._coming[0].gap:
                break
            self._mark = now
            self._pending.append(self._coming.pop(0))
        phase = self._events.phase(self.history.generations[-1].begin)
        fitting = [each for each in self._pending if each.config.during in ("any", phase)]
        if phase == "end" or not fitting:
            return
        ranks = dict(start.ranks())
        if not ranks or len(ranks) < start.size():
            return  # torchrun starts the ranks one after another
        absent = [each for each in fitting if isinstance(each.config.rank, int)]
        absent = [each for each in absent if each.config.rank not in ranks]
        self._absent |= {each.number for each in absent}
        fitting = [each for each in fitting if each not in absent]
        if not fitting:
            return
        fault, rank = fitting[0], None
        config, kind = fault.config, KINDS[fault.config.kind]
        if config.kind in ASKED and phase == "start":
            return  # the probe cannot answer yet
        if not kind.to_all and config.rank not in ("all", "launcher"):
            rank = int(config.rank) if config.rank != "random" else None
            rank = fault.random().choice([*ranks]) if rank is None else rank
        self._pending.remove(fault)
        row = Row(fault.number, config.kind, fault.label, rank, time.monotonic())
        target = Target(start, ranks, rank, self._save, self._events.folder, row.facts)
        row.facts |= {"target": config.rank, "save": str(self._save), "pids": target.pids()}
        has_none = start.launcher() is None
        in_start = config.kind == "terminate" and phase == "start" and has_none
        is_silent = config.kind == "kill" or in_start
        hits_all = config.rank == "all" or (len(ranks) == 1 and has_none)
        if is_silent and hits_all:
            row.is_named, row.note = False, "nobody is left to name it"
        said = start.text()
        self._injection = kind.inject(target, fault)
        try:
            next(self._injection)
        except (NotInjected, OSError) as error:
            self._injection = None
            self.history.not_injected.append(f"{fault.number} {fault.label}: {error}")
            return
        row.note = row.facts.get("file", row.note)
        self._said, self._events.starts = said, 0
        self._row, self._hit, row.until = row, {*ranks.values()}, time.monotonic()
        self._progress = self._events.steps, self._events.saves
        self.history.rows.append(row)
        of_rank = "" if rank is None else f" of rank {rank}"
        self._log(f"fault {fault.number}: {fault.label}{of_rank}, in {phase}")

    def _follow(self, start: Start, ranks: set[int]) -> None:
        """Goes on with the fault, until its ranks have ended or the run has gone on."""
        row = self._row
        assert row is not None
        kind, answer = KINDS[row.kind], self._events.answers.get(row.number, {})
        row.note = row.note or answer.get("what", "") or answer.get("refused", "")
        if "key" in answer:
            row.facts["key"] = answer["key"]
        if self._injection is not None:
            row.until = time.monotonic()
            if next(self._injection, self) is self:
                self._injection = None
            if not kind.saves:
                self._progress = self._events.steps, self._events.saves
        steps, saves = self._progress
        if not self._hit & ranks:
            self._end_fault(has_ended=True)
        elif kind.has_to_end:
            return
        elif kind.saves:
            if "refused" in answer or self._events.saves >= saves + kind.saves:
                self._end_fault(has_ended=False)
        elif self._injection is None and self._events.steps > steps:
            self._end_fault(has_ended=False)

    def _end_fault(self, *, has_ended: bool) -> None:
        row, generation = self._row, self.history.generations[-1]
        assert row is not None
        row.over, row.ended, self._row = time.monotonic(), has_ended, None
        is_taken = self._injection is None or row.number in self._events.answers
        self._close()
        if row.kind in ASKED and not has_ended and not is_taken:
            self.history.rows.remove(row)
            self.history.not_injected.append(
                f"{row.number} {row.label}: rank {row.rank} did not take the request"
            )
        if has_ended:
            generation.end, generation.fault, self._ending = row.over, row.begin, row

    def _end(self, start: Start, status: int) -> int:
        """Closes the account of a start; returns its status, which is not 0 after a fault alone."""
        text, generation = start.text(), self.history.generations[-1]
        for row in self._unnamed:
            row.cause = cause_of(row, text)
            if row.cause is None and is_passed_by(text, row.facts.get("file", "")):
                row.is_named = False
                row.note += ": not read, as the run resumed from memory"
        loaded = [each["time"] for each in self._events.of_first if each["event"] == "loaded"]
        self._unnamed = [
            row
            for row in self._unnamed
            if row.cause is None and row.is_named and not any(time > row.over for time in loaded)
        ]
        if self._row is not None:
            self._end_fault(has_ended=status != 0)
        if self._ending is not None and not status:  # the ranks had ended by themselves
            self._ending.ended, generation.fault, self._ending = False, None, None
        if self._ending is None:
            generation.end = time.monotonic()
            if status:
                raise RunFailed(
                    f"the run ended with status {status} without a fault{self._after()}\n"
                    f"{tail(text)}"
                )
        else:
            self._name(self._ending, text)
            self._ending = None
        return status

    def _name(self, row: Row, text: str) -> None:
        if KINDS[row.kind].of_next:
            self._unnamed.append(row)
        else:
            # Where one log has several starts of the ranks, an earlier one named another cause.
            row.cause = cause_of(row, text.removeprefix(self._said))

    def _after(self) -> str:
        rows = self.history.rows
        return f" (the last fault: {rows[-1].number} {rows[-1].label})" if rows else ""


def cause_of(row: Row, text: str) -> str | None:
    """The first line that names the cause, or the first ones that do it together."""
    wanted = patterns(row.kind, row.rank, row.facts)
    by_pattern = [
        [line.strip()[:LONGEST] for line in text.splitlines() if re.search(pattern, line)]
        for pattern in wanted
    ]
    if not all(by_pattern):
        return None
    whole = (line for line in by_pattern[0] if all(line in lines for lines in by_pattern))
    return next(whole, "; ".join(lines[0] for lines in by_pattern))


def is_passed_by(text: str, file: str) -> bool:
    """Whether a start has resumed from a step in memory that is newer than this file of SAVE, and
    so has not read the file."""
    step = re.match(r"\D*(\d+)/", file)
    found = re.search(r"step (\d+) was in memory, now ", text)
    return step is not None and found is not None and int(step[1]) < int(found[1])


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL:])
