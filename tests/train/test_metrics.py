"""The record of a run: monotonic across resumes, complete after kills, and loud when it fails."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.train.metrics import LONGEST, Metrics, read_metrics
from tests.checkpoint.saving import failing
from tests.refusals import field_of, refusal


class Recorder:
    """A sink that keeps what it gets, and fails from its `fails_at`-th line on."""

    name, destination = "recorder", "nowhere"

    def __init__(self, fails_at: int | None = None, *, closes: bool = True) -> None:
        self.lines: list[Mapping[str, float | str]] = []
        self.fails_at = fails_at
        self.closes = closes
        self.exit_codes: list[int] = []

    def write(self, line: Mapping[str, float | str]) -> None:
        self.lines.append(line)
        if len(self.lines) == self.fails_at:
            raise ConnectionResetError("connection\n lost")

    def close(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if not self.closes:
            raise TimeoutError("still sending")


def metrics(
    path: Path | None, start: int = 0, *, is_first: bool = True, sinks: Sequence[Recorder] = ()
) -> Metrics:
    control = SimpleNamespace(gather=lambda value: [value])
    mesh = SimpleNamespace(is_first=is_first, control=control)
    return Metrics(path, mesh, start=start, steps=9, sinks=sinks)


def write_steps(path: Path, start: int, *steps: int) -> None:
    with metrics(path, start) as file:
        for step in steps:
            file.write({"step": step, "loss": 1 / step})


def every_line(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_that_stand(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_a_resume_from_an_earlier_step_marks_what_it_takes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2, 3, 4)
    before = every_line(path)
    write_steps(path, 2, 3, 4, 5)
    assert [line for line in every_line(path) if line.get("rewound")] == [
        {**line, "rewound": True} for line in before if line["step"] > 2
    ]
    assert len(every_line(path)) == 7
    assert steps_that_stand(path) == [1, 2, 3, 4, 5]
    write_steps(path, 4, 5)
    write_steps(path, 3, 4)
    assert steps_that_stand(path) == [1, 2, 3, 4], "marks stay"
    assert len(every_line(path)) == 9


def test_a_resume_where_the_last_process_ended_leaves_the_lines_alone(tmp_path: Path) -> None:
    """Also where a kill cut off the end of the last line alone."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2)
    before = path.stat()
    with metrics(path, 2):
        after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(path, 2, 3)
    assert [line.get("rewound") for line in every_line(path)] == [None, None, None]


def test_a_run_from_scratch_keeps_no_line_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics(path) as file:
        file.write({"step": 0, "ended": "SIGTERM", "exit_code": 75})
    write_steps(path, 0, 1)
    assert steps_that_stand(path) == [1]
    assert len(every_line(path)) == 2


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"3", b"\x00\x00\xff", b'{"step": "\xc3'])
def test_a_line_cut_short_by_a_kill_is_kept_and_does_not_stand(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2)
    with path.open("ab") as file:
        file.write(torn)
    assert steps_that_stand(path) == [1, 2]  # as seen while a run writes
    write_steps(path, 2, 3)
    assert steps_that_stand(path) == [1, 2, 3]
    kept = torn.decode(errors="backslashreplace")
    assert every_line(path)[2] == {"torn": kept, "rewound": True}


def test_a_kill_while_marking_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2, 3)
    before = path.read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", die)
        with pytest.raises(KeyboardInterrupt):
            metrics(path, 1)
    assert path.read_bytes() == before
    write_steps(path, 1, 2)
    assert steps_that_stand(path) == [1, 2]


def fill(folder: Path) -> Path:
    """A file that takes all the room there is, or that a file may take."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


@pytest.mark.parametrize("broken", [(), ("os.stat",), ("os.truncate", "os.ftruncate")])
def test_lines_are_written_after_a_full_disk(
    small_disk: Path, capsys: pytest.CaptureFixture[str], broken: tuple[str, ...]
) -> None:
    """broken: calls of the system that fail, too, while the disk is full."""
    path, steps = small_disk / "metrics.jsonl", list(range(1, 5000))
    with metrics(path) as file:
        filler = fill(small_disk)
        with ExitStack() as stack:
            for call in broken:
                stack.enter_context(failing(call))
            for step in steps[:4000]:
                file.write({"step": step})
        assert len(read_metrics(path)) < 4000
        filler.unlink()
        for step in steps[4000:]:
            file.write({"step": step})
    assert [line["step"] for line in every_line(path)] == steps
    assert capsys.readouterr().out.count(str(path)) == 1


def test_a_full_disk_keeps_no_facts_and_the_run_goes_on(small_disk: Path) -> None:
    with metrics(small_disk / "metrics.jsonl") as file:
        file.describe({"device": "cpu"})
        filler = fill(small_disk)
        file.describe({"devices": ["cpu"] * 20_000})
        filler.unlink()
    assert json.loads((small_disk / "run.json").read_text()) == {"device": "cpu"}


def test_lines_that_are_lost_in_the_end_are_an_error(small_disk: Path) -> None:
    fill(small_disk)
    file = small_disk / "metrics.jsonl"
    assert field_of(refusal(lambda: write_steps(file, 0, *range(1, 5000)))) == str(file)


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics(tmp_path / "metrics.jsonl", is_first=False) as file:
        file.write({"step": 1})
        file.log("a word")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Recorder()
    line = {"step": 1, "lr": 0.5, "checkpoint": "a"}
    with metrics(path, sinks=[sink]) as file:
        file.write({**line, "loss": nan, "grad_norm": inf, "spread": [1, 2]})
        file.write({"step": 2, "ended": "x" * (LONGEST + 1)})
    assert every_line(path)[0] == {**line, "loss": None, "grad_norm": None, "spread": [1, 2]}
    assert sink.lines == [line, {"step": 2}]


def test_a_failing_sink_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    failing, stuck, sound = Recorder(fails_at=2, closes=False), Recorder(closes=False), Recorder()
    with metrics(path, sinks=[failing, stuck, sound]) as file:
        for step in (1, 2, 3, 4):
            file.write({"step": step})
    said = capsys.readouterr().out
    assert (said.count("ConnectionResetError"), said.count("TimeoutError")) == (1, 1)
    assert [len(sink.lines) for sink in (failing, stuck, sound)] == [2, 4, 4]
    assert [sink.exit_codes for sink in (failing, stuck, sound)] == [[1], [0], [0]]
    assert steps_that_stand(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "code", "ended"),
    [
        (ValueError("bad"), 1, "ValueError"),
        (SystemExit(75), 75, "SystemExit"),
        (SystemExit(), 0, None),
        (SystemExit("word"), 1, "SystemExit"),
    ],
)
def test_an_error_is_the_last_line(
    tmp_path: Path, error: BaseException, code: int, ended: str | None
) -> None:
    path, sink = tmp_path / "metrics.jsonl", Recorder()

    def fail() -> None:
        with metrics(path, sinks=[sink]) as file:
            file.write({"step": 4})
            file.advance()  # and the step after it fails
            raise error

    with pytest.raises(type(error)):
        fail()
    assert sink.exit_codes == [code]
    last = {"step": 5, "ended": ended, "exit_code": code} if ended else {"step": 4}
    assert every_line(path)[-1] == last


def test_sinks_get_the_exit_code_of_the_last_line() -> None:
    sink = Recorder()
    with metrics(None, sinks=[sink]) as file:
        file.write({"step": 3, "ended": "SIGTERM", "exit_code": 75})
    assert sink.exit_codes == [75]
