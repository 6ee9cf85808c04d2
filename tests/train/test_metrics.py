"""The record of a run: monotonic across resumes, complete after kills, and loud when it fails; and
what TensorBoard and wandb get of it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.training import LoggingConfig
from megatron.train.callbacks import Callback
from megatron.train.loggers import LONGEST, Logger, TensorBoard, open_loggers
from megatron.train.metrics import Metrics, read_metrics
from tests.config.test_checks import settings
from tests.files import before_calls, failing
from tests.refusals import field_of, refusal


class Recorder(Logger):
    """Keeps what it gets, and fails from its `fails_at`-th line on."""

    def __init__(self, fails_at: int | None = None, *, closes: bool = True) -> None:
        super().__init__()
        self.lines: list[Mapping[str, float | str]] = []
        self.fails_at = fails_at
        self.closes = closes
        self.exit_codes: list[int] = []

    def show(self, line: Mapping[str, float | str]) -> None:
        self.lines.append(line)
        if len(self.lines) == self.fails_at:
            raise ConnectionResetError("connection\n lost")

    def show_text(self, step: int, name: str, text: str) -> None:
        self.lines.append({"step": step, name: text})

    def close(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if not self.closes:
            raise TimeoutError("still sending")


def metrics(
    path: Path | None, start: int = 0, *, is_first: bool = True, callbacks: Sequence[Callback] = ()
) -> Metrics:
    control = SimpleNamespace(gather=lambda value: [value])
    mesh = SimpleNamespace(is_first=is_first, control=control)
    return Metrics(path, mesh, start=start, callbacks=callbacks)


def write_steps(path: Path, start: int, *steps: int) -> None:
    with metrics(path, start) as file:
        for step in steps:
            file.write({"step": step, "loss": 1 / step})


def every_line(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_that_stand(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_resume_marks_rewound_lines(tmp_path: Path) -> None:
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
    with metrics(path) as file:  # from scratch
        file.write({"step": 0, "ended": "SIGTERM", "exit_code": 75})
    write_steps(path, 0, 1)
    assert steps_that_stand(path) == [1]


def test_resume_at_the_last_line(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", ["vm\n", '{"text": "a"}\n', '{\n "a": 1\n}'])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    refusal(partial(metrics, path), field=str(path))
    assert path.read_text() == content


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"3", b"\x00\x00\xff", b'{"step": "\xc3'])
def test_torn_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2)
    with path.open("ab") as file:
        file.write(torn)
    assert steps_that_stand(path) == [1, 2]  # as seen while a run writes
    write_steps(path, 2, 3)
    assert steps_that_stand(path) == [1, 2, 3]
    kept = torn.decode(errors="backslashreplace")
    assert every_line(path)[2] == {"torn": kept, "rewound": True}


def test_a_kill_while_marking_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2, 3)
    before = path.read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with before_calls(die, "os.fsync"), pytest.raises(KeyboardInterrupt):
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
        file.write({"step": steps[0]})
        filler = fill(small_disk)
        with ExitStack() as stack:
            for call in broken:
                stack.enter_context(failing(call))
            for step in steps[1:4000]:
                file.write({"step": step})
        assert len(read_metrics(path)) < 4000
        assert broken or path.read_bytes().endswith(b"\n"), "no line is partial"
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


def test_the_console_is_not_behind(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream, metrics(None) as file:
        file.stream = stream
        file.log("step 1")
        assert (tmp_path / "out").read_text() == "step 1\n"


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path, logger = tmp_path / "metrics.jsonl", Recorder()
    line = {"step": 1, "lr": 0.5, "checkpoint": "a"}
    with metrics(path, callbacks=[logger]) as file:
        file.write({**line, "loss": nan, "grad_norm": inf, "spread": [1, 2]})
        file.write({"step": 2, "ended": "x" * (LONGEST + 1)})
        file.write({"step": 3, "sample": 2, "prompt": "a", "text": "x" * LONGEST})
    assert every_line(path)[0] == {**line, "loss": None, "grad_norm": None, "spread": [1, 2]}
    assert logger.lines == [line, {"step": 2}, {"step": 3, "sample_2": "a" + "x" * LONGEST}]


def test_a_failing_logger_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    failing, stuck, sound = Recorder(fails_at=2, closes=False), Recorder(closes=False), Recorder()
    with metrics(path, callbacks=[failing, stuck, sound]) as file:
        for step in (1, 2, 3, 4):
            file.write({"step": step})
    said = capsys.readouterr().out
    assert (said.count("ConnectionResetError"), said.count("TimeoutError")) == (1, 1)
    assert [len(logger.lines) for logger in (failing, stuck, sound)] == [2, 4, 4]
    assert [logger.exit_codes for logger in (failing, stuck, sound)] == [[1], [0], [0]]
    assert steps_that_stand(path) == [1, 2, 3, 4]


def test_an_end_without_an_error_waits_for_a_slow_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.train.metrics.GRACE", 0.0)
    logger = Recorder()
    logger.close, close = (lambda code: [time.sleep(0.2), close(code)]), logger.close
    with metrics(None, callbacks=[logger]):
        pass
    assert logger.exit_codes == [0]


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
    path, logger = tmp_path / "metrics.jsonl", Recorder()

    def fail() -> None:
        with metrics(path, callbacks=[logger]) as file:
            file.write({"step": 4})
            file.advance()  # and the step after it fails
            raise error

    with pytest.raises(type(error)):
        fail()
    assert logger.exit_codes == [code]
    last = {"step": 5, "ended": ended, "exit_code": code} if ended else {"step": 4}
    assert every_line(path)[-1] == last


def test_loggers_get_the_exit_code_of_the_last_line(tmp_path: Path) -> None:
    logger, path = Recorder(), tmp_path / "metrics.jsonl"
    with suppress(SystemExit), metrics(path, callbacks=[logger]) as file:
        file.write({"step": 3, "ended": "SIGTERM", "exit_code": 75})
        raise SystemExit(75)
    assert logger.exit_codes == [75]
    assert len(every_line(path)) == 1, "its end is said once"


@pytest.mark.parametrize(("place", "is_first"), [("file", True), ("events", False)])
def test_a_logger_that_cannot_open_is_left_out(tmp_path: Path, place: str, is_first: bool) -> None:
    (tmp_path / "file").touch()
    logging, mesh = LoggingConfig(tensorboard_dir=f"{tmp_path}/{place}"), SimpleNamespace()
    mesh.is_first = is_first
    assert open_loggers(logging, None, {}, 0, {}, mesh, print) == []
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("flag", ["--wandb-project", "--tensorboard-dir"])
def test_a_missing_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    library, field = flag[2:].partition("-")[0], flag[2:].replace("-", "_")
    (tmp_path / library).mkdir()  # such as wandb's own, in the folder of an earlier run
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, library, None)  # and what is imported here does not stay
    monkeypatch.delitem(sys.modules, library)
    config = settings(**{field: "x"}, metrics_file="m.jsonl")
    assert field_of(refusal(lambda: config.check(1))) == flag


def test_wandb_asks_for_a_folder() -> None:
    error = refusal(lambda: settings(wandb_project="a").check(1))
    assert error.works == ("--wandb-project", "a", "--save", "checkpoints")
    settings(wandb_project="a", metrics_file="m.jsonl").check(1)


@pytest.mark.parametrize(("start", "kept"), [(2, [(1, 1.0), (2, 1.0)]), (0, [])])
def test_tensorboard(tmp_path: Path, start: int, kept: list[tuple[int, float]]) -> None:
    """The numbers of each line by key and step; those of steps that are rewound vanish."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = [{"step": step, "loss": 1.0, "checkpoint": f"step_{step}"} for step in (1, 2, 3, 4)]
    now = [{"step": start + 1, "loss": 0.5}, {"step": start + 1, "validation_loss": 3.0}]
    for first, lines in ((0, before), (start, now)):
        logger = TensorBoard(tmp_path, first)
        for line in lines:
            logger.log_metrics(line)
        logger.close(0)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    last = start + 1
    assert found == {"loss": [*kept, (last, 0.5)], "validation_loss": [(last, 3.0)]}


# Parts of runs as in training: without a key; with one of the environment, where no server answers;
# from scratch with one of .netrc; and of another project, online without a key, which ends with 75.
PROGRAM = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import wandb
import megatron.train.loggers
from megatron.config.training import LoggingConfig
from megatron.train.loggers import open_loggers
from megatron.train.metrics import Metrics

mesh = SimpleNamespace(is_first=True, control=SimpleNamespace(gather=lambda value: [value]))
path = Path(sys.argv[1])
megatron.train.loggers.INIT_SECONDS = 3  # of a server that does not answer
hooks, stops, netrc = (sys.exit, sys.excepthook), [], Path(os.environ["NETRC"])
online = {"WANDB_MODE": "online"}
parts = (0, "tiny", {}, 0), (1, "tiny", {}, 0), (0, "tiny", {}, 0), (1, "own", online, 75)
for number, (start, name, environ, code) in enumerate(parts):
    os.environ.pop("WANDB_API_KEY", None)
    os.environ.update({"WANDB_API_KEY": os.environ["KEY"]} if number == 1 else {})
    netrc.write_text(os.environ["LOGIN"] if number == 2 else "")
    config = LoggingConfig(wandb_project=name)
    loggers = open_loggers(config, path, environ, start, {"layers": 2}, mesh, stops.append)
    assert (sys.exit, sys.excepthook) == hooks
    wandb.run.settings.stop_fn()  # as when a person stops it
    with Metrics(path, mesh, start=start, callbacks=loggers) as metrics:
        metrics.write({"step": start + 1, "loss": 0.5, "checkpoint": "the first"})
        if code:
            metrics.write({"step": start + 1, "ended": "SIGTERM", "exit_code": code})
assert stops == ["wandb"] * 4
"""
KEYS = "k" * 40, "n" * 40  # of the environment and of .netrc
NO_SERVER = "http://127.0.0.1:9"  # nothing listens there


def test_wandb_out_of_reach(tmp_path: Path) -> None:
    """With the library itself: it does not print the key, and keeps runs in the folder; the second
    part alone continues the one before it."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as records

    home, save = tmp_path / "home", tmp_path / "save"
    home.mkdir()
    (home / ".netrc").touch(mode=0o600)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environ |= {"HOME": str(home), "NETRC": str(home / ".netrc"), "WANDB_BASE_URL": NO_SERVER}
    command = [sys.executable, "-c", PROGRAM, str(save / "metrics.jsonl")]
    environ |= {"KEY": KEYS[0], "LOGIN": f"machine 127.0.0.1:9 login user password {KEYS[1]}"}
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    said = process.stdout + process.stderr
    assert (process.returncode, said.count("because of")) == (0, 3), said
    assert not any(key in said for key in KEYS)
    assert [each.name for each in home.iterdir()] == [".netrc"]
    assert {each.name for each in save.iterdir()} == {"metrics.jsonl", "wandb", "wandb.json"}
    kept = [*save.glob("wandb/offline-run-*/run-*.wandb")]
    last = json.loads((save / "wandb.json").read_text())["id"]
    ids = [each.stem.removeprefix("run-") for each in kept]
    assert (len(kept), len({*ids}), ids.count(last)) == (4, 3, 1)
    tag = records.Record(exit=records.RunExitRecord()).SerializeToString()[:-1]  # but its length
    for each, run_id in zip(kept, ids, strict=True):
        content, is_last = each.read_bytes(), run_id == last
        for record in (
            records.MetricRecord(glob_name="*", step_metric="step"),
            records.ConfigItem(key="layers", value_json="2"),
            records.RunRecord(project="own" if is_last else "tiny"),
        ):
            assert record.SerializeToString() in content
        code = records.RunExitRecord(exit_code=75 * is_last).SerializeToString()
        assert re.search(re.escape(tag) + b"." + re.escape(code), content, re.DOTALL)
        assert b"the first" in content
        assert not any(key.encode() in content for key in KEYS)
