"""The supervisor on a launcher that does what a test says, and the causes that it accepts."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.__main__ import status_of
from tools.chaos.faults import newest_folders
from tools.chaos.schedule import Fault, FaultConfig
from tools.chaos.supervise import STARTS, History, Row, RunFailed, Supervisor, cause_of

LOST = "vanished: its process was killed or crashed"


class FakeStart:
    """A start of processes that sleep. A script goes on whenever the supervisor looks at the
    status, which it yields; the last one stays."""

    def __init__(
        self, environ: Mapping[str, str], script: Callable[["FakeStart"], Iterator[int | None]]
    ) -> None:
        self.events, self.said, self.ranks_expected = Path(environ["CHAOS_EVENTS"]), "", 1
        self.processes = dict[int, subprocess.Popen[bytes]]()
        self._script, self._status = script(self), None

    def begin(self, rank: int) -> None:
        self.processes[rank] = subprocess.Popen(["sleep", "600"])
        self.note("start", rank)

    def note(self, event: str, rank: int = 0, **facts: Any) -> None:
        line = {"time": time.monotonic(), "pid": 1, "event": event, **facts}
        with (self.events / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def status(self) -> int | None:
        self._status = next(self._script, self._status)
        return self._status

    def launcher(self) -> int | None:
        return None

    def ranks(self) -> Mapping[int, int]:
        return {rank: each.pid for rank, each in self.processes.items() if each.poll() is None}

    def size(self) -> int:
        return self.ranks_expected

    def kill(self) -> None:
        for each in self.processes.values():
            each.kill()
            each.wait()

    def text(self) -> str:
        return self.said


Script = Callable[[FakeStart], Iterator[int | None]]


def supervise(folder: Path, faults: Sequence[Mapping[str, Any]], *scripts: Script) -> History:
    """The history of starts with these scripts, and a fault after each step."""
    coming = [
        Fault(number, FaultConfig(**keys), 1.0, number) for number, keys in enumerate(faults, 1)
    ]
    turns = iter(scripts)

    def launch(words: Sequence[str], environ: Mapping[str, str], logs: Path) -> FakeStart:
        return FakeStart(environ, next(turns))

    save = folder / "save"
    save.mkdir(exist_ok=True)
    options: Any = {"every_steps": True, "patience": 60.0, "orphan_seconds": 0.1}
    return Supervisor([["a command"]], launch, folder / "run", save, coming, **options).run()


def steps(start: FakeStart, count: int, first: int = 1) -> Iterator[None]:
    """Steps of rank 0, each saved."""
    for step in range(first, first + count):
        start.note("step", step=step)
        for at in ("begin", "end"):
            start.note("save", step=step, at=at)
        yield


def finish(start: FakeStart) -> Iterator[int | None]:
    """A start without faults."""
    start.begin(0)
    start.note("loaded", step=0)
    yield None
    yield from steps(start, 1)
    start.note("end", step=1)
    start.kill()
    yield 0


def lose(said: str = "", size: int = 1) -> Script:
    """The ranks begin one after another, long after the first step; all end when one is lost."""

    def script(start: FakeStart) -> Iterator[int | None]:
        start.ranks_expected = size
        for rank in range(size):
            start.begin(rank)
            if rank == 0:
                start.note("loaded", step=0)
                yield from steps(start, 2)
            for _ in range(5):
                yield None
                assert rank == size - 1 or len(start.ranks()) == rank + 1
        while len(start.ranks()) == size:
            yield None
        start.said = said
        start.kill()
        yield 1

    return script


def test_a_fault_waits_for_all_ranks(tmp_path: Path) -> None:
    said = f"rank 1 of 3 {LOST}"
    fault = {"kind": "kill", "rank": 1}
    history = supervise(tmp_path, [fault, {"kind": "kill"}], lose(said, 3), lose("", 3), finish)
    one, other = history.rows
    assert (one.rank, one.ended, one.cause) == (1, True, said)
    assert (other.ended, other.cause, other.is_named) == (True, None, True)


def test_a_rank_that_is_not_there_holds_up_no_other_fault(tmp_path: Path) -> None:
    faults = [{"kind": "kill", "rank": 7}, {"kind": "kill", "rank": 0}]
    history = supervise(tmp_path, faults, lose(), finish)
    assert [row.number for row in history.rows] == [2]
    assert not history.rows[0].is_named  # it was the only one
    assert history.not_injected == ["1 kill: no rank 7"]


def test_ranks_that_outlive_their_launcher_are_killed(tmp_path: Path) -> None:
    def outlive(start: FakeStart) -> Iterator[int | None]:
        start.ranks_expected = 2
        for rank in range(2):
            start.begin(rank)
        start.note("loaded", step=0)
        yield from steps(start, 2)
        while len(start.ranks()) == 2:
            yield None
        yield 1

    (row,) = supervise(tmp_path, [{"kind": "kill"}], outlive, finish).rows
    assert (row.ended, row.cause, row.is_named) == (True, None, True)


@pytest.mark.parametrize("has_steps", [False, True])
def test_starts_without_a_step_end(tmp_path: Path, has_steps: bool) -> None:
    """A launcher that starts its ranks again and again."""

    def again(start: FakeStart) -> Iterator[int | None]:
        for number in range(2 * STARTS):
            start.note("start")
            if has_steps:
                yield from steps(start, 1, number)
            yield None
        yield 0

    if has_steps:
        assert not supervise(tmp_path, [], again).rows
        return
    with pytest.raises(RunFailed, match=f"started {STARTS} times"):
        supervise(tmp_path, [], again)


def answering(said: str = "", **answer: Any) -> Script:
    """A rank that takes the request with this answer, or not; then it fails, or goes on."""

    def script(start: FakeStart) -> Iterator[int | None]:
        start.begin(0)
        start.note("loaded", step=0)
        yield from steps(start, 1)
        request = start.events / "request_0.json"
        while not request.exists():
            yield None
        if answer:
            start.note("fault", number=json.loads(request.read_text())["number"], step=1, **answer)
            request.unlink()
        yield from steps(start, 1 if said else 4, 2)
        start.said = said
        start.kill()
        yield 1 if said else 0

    return script


DRIFT = "ReplicaDrift: replica drift at step 3 in model.b.weight, {}; in the first, and 3 more"
ANSWERS: list[tuple[Script, list[tuple[str, bool]], int]] = [
    # (what the rank does, note and whether it has a cause of each row, requests not taken)
    (answering(), [], 1),
    (answering(refused="no replica"), [("no replica", False)], 0),
    (answering(DRIFT.format("model.a"), what="a bit", key="model.a"), [("a bit", True)], 0),
    (answering(DRIFT.format("model.a.b"), what="a bit", key="model.a"), [("a bit", False)], 0),
    (answering(DRIFT.format("x and 2 more"), what="a bit", key="model.a"), [("a bit", True)], 0),
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_a_request_is_taken_refused_or_left(number: int, tmp_path: Path) -> None:
    script, rows, left = ANSWERS[number]
    history = supervise(tmp_path, [{"kind": "flip_weight"}], script, finish)
    assert [(row.note, row.cause is not None) for row in history.rows] == rows
    assert len(history.not_injected) == left
    assert not list((tmp_path / "run" / "events").glob("request*"))


def checkpoints(save: Path, *files: str) -> None:
    """Files of 100 bytes, each newer than the one before, in folders of their own."""
    for age, name in enumerate(files):
        file = save / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file.parent, (age, age))


SHARD = "step_00000004/shard_00000.safetensors"
NEXT = {  # what the next start prints: its part that is the cause, or whether one was to be there
    f"passed over: /s/{SHARD}: 7 bytes, its manifest says 100": True,
    "passed over: /s/step_00000003/manifest.json is damaged: a reason": None,
    "passed over: /s/step_000000041/manifest.json is damaged: a reason": None,
    "step 4 was in memory, now /s/step_00000004": None,
    "step 12 was in memory, now /s/step_00000012": False,
    "step 3 was in memory, now /s/step_00000003": None,
    "": None,
}


@pytest.mark.parametrize("said", NEXT)
def test_a_damaged_file_is_named_by_the_next_start(said: str, tmp_path: Path) -> None:
    def resumes(start: FakeStart) -> Iterator[int | None]:
        start.said = said
        yield from finish(start)

    checkpoints(tmp_path / "save", "step_00000002/a", SHARD)
    (tmp_path / "save" / "step_00000006").mkdir()  # being removed: it has lost its files
    (row,) = supervise(tmp_path, [{"kind": "truncate"}], lose(), resumes).rows
    assert (tmp_path / "save" / SHARD).stat().st_size < 100
    assert row.note.startswith(SHARD)
    assert row.cause == (said if NEXT[said] else None)
    assert row.is_named == (NEXT[said] is not False)


def test_a_folder_that_vanishes_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints(tmp_path, "step_2/a", "step_4/a", "step_6/a")
    is_dir = Path.is_dir

    def look(self: Path) -> bool:
        found = is_dir(self)
        if self.name == "step_4" and found:
            shutil.rmtree(self)
        return found

    monkeypatch.setattr(Path, "is_dir", look)
    assert [each.name for each in newest_folders(tmp_path)] == ["step_6", "step_2"]


OF_RANK = {"pids": [4711], "target": "random", "save": "/s/run"}
OF_ALL, OF_LAUNCHER = OF_RANK | {"target": "all"}, OF_RANK | {"target": "launcher"}
NAMED = [  # (kind, of whom, rank, a line that is the cause, lines that are not)
    (
        "kill", OF_RANK, 1, f"rank 1 of 12 (data 0, tensor 1) on a-host {LOST}",
        [f"rank 11 of 12 {LOST}", f"rank 0 of 2 (data 0, tensor 1) {LOST}", "exitcode  : 1"],
    ),
    (
        "kill", OF_RANK, 1, "  exitcode  : -9 (pid: 4711)  (SIGKILL)",
        ["  exitcode  : -9 (pid: 47110)", "  exitcode  : 1 (pid: 4711)", "  exitcode  : -9"],
    ),
    (
        "kill", OF_RANK, 1, "  traceback : Signal 9 (SIGKILL) received by PID 4711",
        ["  traceback : Signal 9 (SIGKILL) received by PID 4712"],
    ),
    (
        "kill", OF_RANK, 1, "E failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: python",
        ["E failed (exitcode: -9) local_rank: 0 (pid: 4710) of binary: python"],
    ),
    (
        "kill", OF_RANK, 3, "waiting for ranks 1, 3 of 4, for 60 s at most",
        ["waiting for rank 1 of 4, for 60 s at most", "waiting for ranks 1, 13 of 14"],
    ),
    (
        "kill", OF_RANK, 0, f"rank 0 at localhost:29500, where the ranks meet, {LOST}",
        [f"the launcher at localhost:29500, where the ranks meet, {LOST}"],
    ),
    (
        "kill", OF_LAUNCHER, None, f"the launcher at a:29500, where the ranks meet, {LOST}",
        [f"rank 0 of 2 {LOST}"],
    ),
    (
        "terminate", OF_RANK, 1, "step 9 | ended by SIGTERM; the same command goes on",
        ["W Sending process 4711 closing signal SIGTERM", "Signal 15 (SIGTERM) received by PID 4"],
    ),
    (
        "terminate", OF_RANK, 1, "rank 1 of 2 on a left, with exit status 75, before the run began",
        ["rank 0 of 2 on a left, with exit status 75, before the run began"],
    ),
    ("terminate", OF_ALL, None, "step 9 | SIGTERM cut the evaluation short", ["step 9 | cut"]),
    (
        "stop", OF_RANK, 1, "no progress for 6 s: rank 0 of 2 (data 0) on a, rank 1 of 2 (data 1)",
        ["no progress for 6 s: rank 0 of 2 (data 0, tensor 1) on a is behind", f"rank 1 {LOST}"],
    ),
    (
        "stop", OF_RANK, 1, "->  rank 1 of 2 (data 0)  28  train step (does not answer)  -  0",
        ["    rank 1 of 2 (data 0)  28  train step  -  0", "->  rank 0 of 2  28  train step"],
    ),
    ("slow", OF_RANK, 0, "rank 0 of 2 on a has not answered for 9 s", ["rank 1 has not answered"]),
    (
        "drop", OF_RANK, 0, "RuntimeError: pair.cc:553] Connection closed by peer [127.0.0.1]:1",
        ["[W TCPStore.cpp:106] [c10d] sendBytes failed: Broken pipe", f"rank 1 of 2 {LOST}"],
    ),
    (
        "memory", OF_RANK, 1, "error: rank 1 is out of memory in evaluation: a cure",
        ["error: rank 0 is out of memory in evaluation: a cure", "bad_alloc", f"rank 1 {LOST}"],
    ),
    (
        "full_disk", OF_RANK, 1, "OSError: /s/run/.step_2.partial/a: No space left on device; it",
        ["OSError: /tmp/a: No space left on device", "/s/run/a: Permission denied"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NAMED)))
def test_a_cause_names_what_was_done(number: int) -> None:
    kind, facts, rank, line, others = NAMED[number]
    row = Row(1, kind, kind, rank, 0.0, facts=facts)
    for other in others:
        assert cause_of(row, other) is None, other
    assert cause_of(row, "\n".join([*others, f"  {line}", "the end"])) == line.strip()


def test_memory_and_its_rank_may_be_in_two_lines() -> None:
    row, said = Row(1, "memory", "memory", 1, 0.0, facts=OF_RANK), "memory allocation of 8 bytes"
    named = [f"rank 1 of 2 {LOST}", "rank 1 of 2 (data 1) failed:", "exitcode: -6 (pid: 4711)"]
    for line in named:
        assert cause_of(row, f"{line}\n{said}\n") == f"{said}; {line}"
    for line in (f"rank 0 of 2 {LOST}", "rank 0 of 2 (tensor 1) failed:"):
        assert cause_of(row, f"{said}\n{line}") is None


def test_a_cause_that_is_not_named_is_no_success() -> None:
    equal, different = {"equal": True}, {"equal": False}
    assert status_of("", equal, []) == 0
    assert status_of("", equal, [4]) == status_of("", None, []) == 3
    assert status_of("", different, [4]) == status_of("it hangs", None, [4]) == 1
