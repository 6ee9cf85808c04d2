"""Stages: run, reused, run again, in parallel, failed; the commands are small fakes. Processes."""

import errno
import json
import os
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.config.pretrain import PretrainGPT2Config
from megatron.train.diagnose import NonFiniteError
from tests.files import cut_off
from tests.programs import ROOT
from tests.refusals import field_of, refusal
from tests.tools.experiments.test_commands import FIGURE7
from tools.experiments import figure7, runner
from tools.experiments.runner import Command, Machine, Processes, Stage, StageError, run_stages
from tools.layouts.processes import count_gpus

PROGRAM = "this test"
KILLED = """\
W1128 01:16:15.0 21518 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7 \
closing signal SIGTERM
E1128 01:16:15.1 21518 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
pretrain_gpt2.py FAILED
Failures:
[1]:
  time      : 2026-11-28_01:16:15
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 7)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_01:16:15
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 8)  (SIGKILL)
  error_file: <N/A>
"""


def script(text: str, *words: object, label: str = "") -> Command:
    return Command(argv=(sys.executable, "-c", text, *map(str, words)), label=label)


def fake(output: Path, name: str, text: str, inputs: tuple[Path, ...] = ()) -> Stage:
    """A stage that writes `text` to a file and its own name to a diary."""
    program = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]);"
        "open(sys.argv[3], 'a').write(sys.argv[4] + ' ')"
    )
    command = script(program, output / name, text, output / "diary", name)
    return Stage(name=name, commands=(command,), inputs=inputs, outputs=(output / name,))


def ran(stages: list[Stage], output: Path) -> list[str]:
    """The stages that a call runs; it reuses the others."""
    stamps = run_stages(stages, output, PROGRAM)
    assert list(stamps) == [stage.name for stage in stages]
    file = output / "diary"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def failure(stage: Stage, output: Path) -> str:
    with pytest.raises(StageError) as caught:
        run_stages([stage], output, PROGRAM)
    return str(caught.value)


def test_changed_stages_run_again(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("1")
    stages = [fake(out, "a", "x", inputs=(source,)), fake(out, "b", "x"), fake(out, "c", "x")]
    assert ran(stages, out) == ["a", "b", "c"]
    assert ran(stages, out) == []
    changed = [stages[0], fake(out, "b", "y"), stages[2]]
    assert ran(changed, out) == ["b", "c"]
    (out / "b").write_text("cut off")
    assert ran(changed, out) == ["b", "c"]
    source.write_text("2")
    assert ran(changed, out) == ["a", "b", "c"]


def test_independent_stages_are_reused_after_others(tmp_path: Path) -> None:
    stages = [replace(fake(tmp_path, name, "x"), is_independent=True) for name in "abc"]
    assert ran(stages[1:2], tmp_path) == ["b"]
    assert ran(stages, tmp_path) == ["a", "c"]
    (tmp_path / "b").write_text("cut off")
    assert ran(stages, tmp_path) == ["b"]
    assert ran([*stages[:2], fake(tmp_path, "c", "x")], tmp_path) == []
    (tmp_path / "b").write_text("cut off")
    assert ran([*stages[:2], fake(tmp_path, "c", "x")], tmp_path) == ["b", "c"]


def test_interrupted_stage_goes_on(tmp_path: Path) -> None:
    """It fails in each start but the third; its seconds are those of all starts."""
    text = "import pathlib, sys; file = pathlib.Path(sys.argv[1]); file.parent.mkdir(exist_ok=True)"
    text += "; file.open('a').write('x'); sys.exit(len(file.read_text()) < 3)"
    out = tmp_path / "out"
    command = script(text, out / "b" / "steps")
    long = Stage(name="b", commands=(command,), outputs=(out / "b",), goes_on=True)
    stages, mark = [fake(out, "a", "x"), long], out / "stages" / "b.json"

    def interrupt(stage: Stage) -> str:
        with pytest.raises(StageError):
            run_stages([stages[0], stage], out, PROGRAM)
        return (out / "b" / "steps").read_text()

    assert interrupt(replace(long, goes_on=False)) == "x"
    assert interrupt(replace(long, goes_on=False)) == "x"
    assert interrupt(long) == "xx"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"seconds": 3600}))
    os.utime(mark, (0, (out / "b" / "steps").stat().st_mtime - 3600))  # then it was killed
    assert run_stages(stages, out, PROGRAM)["b"]["seconds"] > 7200
    (out / "b" / "steps").write_text("xx")  # it has ended: another file is no interruption
    assert interrupt(long) == "x"
    stages[0] = fake(out, "a", "y")  # it would go on from what it made of another "a"
    assert interrupt(long) == "x"
    assert interrupt(replace(long, commands=[replace(command, argv=(*command.argv, "y"))])) == "x"
    with cut_off(1, "tools.experiments.runner.remove"):
        run_stages(stages, out, PROGRAM, fresh=True)
    assert interrupt(long) == "x"


def test_failure_names_stage_cause_and_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's name is one that can be opened in the current folder."""
    program = "import sys; print('warm', file=sys.stderr); 1 / 0"
    fails = replace(script(program), environ={"OMP_NUM_THREADS": "1"})
    ran([fake(tmp_path, "a", "x")], tmp_path)
    message = failure(Stage(name="b", commands=(fails,)), tmp_path)
    first, second = message.splitlines()
    assert all(text in first for text in ("b", "ZeroDivisionError: ", f"{tmp_path}/stages/b.log"))
    assert f"cd {ROOT} && OMP_NUM_THREADS=1 {sys.executable} -c 'import sys;" in second
    assert "Traceback" in (tmp_path / "stages" / "b.log").read_text()
    assert capfd.readouterr().err == "warm\n"
    monkeypatch.chdir(tmp_path)
    assert "more in stages/b.log" in failure(Stage(name="b", commands=(fails,)), tmp_path)
    assert runner.to_open(ROOT / "runs" / "report.html") == f"{ROOT}/runs/report.html"


def test_failure_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    program = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
    message = failure(Stage(name="a", commands=(script(program),)), tmp_path / "out")
    assert all(text in message for text in ("stage a", "No space left", "4.1 kB", str(tmp_path)))


def test_stage_that_leaves_nothing(tmp_path: Path) -> None:
    stage = Stage(name="a", commands=(script(""),), outputs=(tmp_path / "a",))
    assert str(tmp_path / "a") in failure(stage, tmp_path)
    check = Mock(side_effect=ValueError("too small"))
    with pytest.raises(ValueError, match="too small"):
        run_stages([replace(fake(tmp_path, "a", "x"), check=check)], tmp_path, PROGRAM)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("warm\nerror: --lr -1: must be above 0\nE1 more\n", "--lr -1: must be above 0"),
        (
            "pretrain:  10%|#\rpretrain:  20%|##\nTraceback (most recent call last):\n"
            "a.b.HotError: too hot\n"
            "E1121 04:00:00 1 torch/distributed/elastic/multiprocessing/api.py:984] failed\n"
            "Traceback (most recent call last):\n  ChildFailedError\n",
            "HotError: too hot",
        ),
        ("pretrain:  10%|#\rpretrain:  20%|##\n", "pretrain:  20%|##"),
        (
            "pretrain:  10%|#\n[rank0]: RuntimeError: Connection closed by peer\n" + KILLED,
            "rank 1 ended with exitcode -9 (SIGKILL), as where memory runs out",
        ),
        (
            "pretrain:  10%|#\n" + KILLED.replace("-9", "-11").replace("SIGKILL", "SIGSEGV"),
            "rank 1 ended with exitcode -11 (SIGSEGV)",
        ),
        ("a.b.HotError: too hot\n" + KILLED.replace("SIGKILL", "SIGABRT"), "HotError: too hot"),
        ("warm\n" + KILLED.partition("E1128")[0], "warm"),
    ],
)
def test_cause_is_the_first_error(tail: str, expected: str) -> None:
    assert runner.cause(tail.encode(), 3).endswith(expected)


def test_fresh_deletes_only_outputs(tmp_path: Path) -> None:
    out, foreign = tmp_path / "run", tmp_path / "foreign"
    ran([fake(out, "a", "x"), fake(out, "b", "x")], out)
    result = out / "report.html"
    for file in (out / "mine", result, out / "stages" / "a.log"):
        file.write_text("kept, if it is mine")
    run_stages([], out, PROGRAM, [result], fresh=True)
    assert {path.name for path in out.iterdir()} == {"mine", "stages"}
    assert [path.name for path in (out / "stages").iterdir()] == ["owner"]
    foreign.mkdir()
    (foreign / "a").write_text("kept")
    mine = [fake(foreign, "a", "x")]
    for fresh in (False, True):
        error = refusal(lambda fresh=fresh: run_stages(mine, foreign, PROGRAM, fresh=fresh))
        assert field_of(error) == "--output"
    assert (foreign / "a").read_text() == "kept"
    assert field_of(refusal(lambda: run_stages([], out, "another", fresh=True))) == "--output"


def test_interrupted_fresh_start(tmp_path: Path) -> None:
    """Wherever it ends while it removes files."""
    stages = [fake(tmp_path, "a", "x")]
    ran(stages, tmp_path)
    for removed in count(1):
        with cut_off(removed, "tools.experiments.runner.remove") as lost:
            run_stages(stages, tmp_path, PROGRAM, fresh=True)
        if not lost:
            break
        assert ran(stages, tmp_path) == ["a"]
    assert removed > 3


def test_parallel_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Each waits for the other's file, which one after the other would never come.
    text = (
        "import pathlib, sys, time; mine, other = map(pathlib.Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print('first', flush=True); print('last', end='')"
    )
    files = [tmp_path / name for name in ("a", "b")]
    pair = (script(text, *files, label="one"), script(text, *files[::-1], label="two"))
    run_stages([Stage(name="pair", commands=pair, is_parallel=True)], tmp_path / "out", PROGRAM)
    shown = capfd.readouterr().out.splitlines()
    for label in ("one", "two"):
        lines = [line for line in shown if line.startswith(label)]
        assert lines == [f"{label} | first", f"{label} | last"]


@dataclass
class NoSettings:
    pass


def test_sigterm_ends_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os, pathlib, signal, sys, time; os.kill(os.getppid(), signal.SIGTERM)\n"
    text += "time.sleep(2); pathlib.Path(sys.argv[1]).touch()"
    stage = Stage(name="long", commands=(script(text, tmp_path / "ended"),))
    monkeypatch.setattr("sys.argv", [PROGRAM])
    run = partial(run_stages, [stage], tmp_path / "out", PROGRAM)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as stop:
            runner.main(NoSettings, lambda _: run(), PROGRAM, "")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 143
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize("accepted", [True, False])
def test_first_failure_ends_parallel_commands(tmp_path: Path, accepted: bool) -> None:
    fails = replace(script("import sys; sys.exit(3)"), accepts=lambda s: s == 3 and accepted)
    out = tmp_path / "out"
    wait = "" if accepted else "import time; time.sleep(6000)\n"
    other = script(f"{wait}import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", out / "a")
    pair = (fails, other)
    stage = Stage(name="pair", commands=pair, is_parallel=True, outputs=(out / "a",))
    with nullcontext() if accepted else pytest.raises(StageError):
        run_stages([stage], out, PROGRAM)


@pytest.mark.parametrize(
    ("word", "status", "expected"),
    [
        ("train_iters", 0, True),
        (NonFiniteError.__name__, 1, True),
        (NonFiniteError.__name__, -9, False),
        ("ValueError", 1, False),
        ("", 2, False),
    ],
)
def test_diverged_training_is_a_result(
    tmp_path: Path, word: str, status: int, expected: bool
) -> None:
    settings = replace(FIGURE7, output=tmp_path)
    pair = next(s for s in figure7.list_stages(settings, Machine(0, 2)) if s.is_parallel)
    folder = pair.outputs[1]
    folder.mkdir(parents=True)
    line = json.dumps({"step": 7, "ended": word, "exit_code": 1}) if word else ""
    (folder / "metrics.jsonl").write_text(line)
    assert pair.commands[1].accepts(status) == expected


@pytest.mark.parametrize(
    ("gpus", "cores", "expected"),
    [
        (0, 8, Processes(2, 4, 4)),
        (1, 1, Processes(2, 4, 1)),
        (5, 8, Processes(4, 2, 2)),
        (7, 8, Processes(4, 2, 2)),
        (8, 8, Processes(8, 1, 1)),
    ],
)
def test_gpus_that_are_used(gpus: int, cores: int, expected: Processes) -> None:
    flags = ["--preset", "quickstart", "--tensor-model-parallel-size", 2]
    config = runner.parse_training(PretrainGPT2Config, flags)
    assert runner.fit_processes(config, Machine(gpus, cores)) == expected


def test_micro_batches_divide_the_share_of_a_rank() -> None:
    flags = ["--preset", "quickstart", "--micro-batch-size", 4, "--global-batch-size", 12]
    config = runner.parse_training(PretrainGPT2Config, flags)
    assert runner.fit_processes(config, Machine(2, 2)) == Processes(2, 2, 1)


def test_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0  # without nvidia-smi
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert count_gpus() == 0
