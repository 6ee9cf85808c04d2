"""Stages of scripts: run, reused, run again, side by side, failed; the commands are small fakes."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron.train.diagnose import NonFiniteError
from tests.refusals import field_of, refusal
from tests.tools.test_paper_plans import FIGURE7
from tools.command import Command, cause
from tools.paper.figure7 import plan as figure7
from tools.stages import Stage, StageError, own_folder, run_stages, stamp_file


def script(text: str, *words: str, label: str = "") -> Command:
    return Command(argv=(sys.executable, "-c", text, *words), label=label)


def fake(out: Path, name: str, text: str, inputs: tuple[Path, ...] = ()) -> Stage:
    """A stage that writes `text` to a file and its own name to a diary."""
    program = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]);"
        "open(sys.argv[3], 'a').write(sys.argv[4] + ' ')"
    )
    command = script(program, str(out / name), text, str(out / "diary"), name)
    return Stage(name=name, commands=(command,), inputs=inputs, outputs=(out / name,))


def ran(stages: list[Stage], out: Path) -> list[str]:
    """The stages that a call runs; it reuses the others."""
    own_folder(out, stages, fresh=False)
    run_stages(stages, out, out)
    file = out / "diary"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def test_a_stage_runs_again_where_it_changed_and_with_it_all_that_follow(tmp_path: Path) -> None:
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


def test_a_failure_names_stage_status_cause_and_command(tmp_path: Path) -> None:
    program = "import sys; sys.exit('error: --input x: no such file')"
    fails = replace(script(program), environ={"OMP_NUM_THREADS": "1"})
    stages = [fake(tmp_path, "a", "x"), Stage(name="b", commands=(fails,))]
    own_folder(tmp_path, stages, fresh=False)
    with pytest.raises(StageError) as failure:
        run_stages(stages, tmp_path, tmp_path)
    message = str(failure.value)
    for said in ("stage b", "status 1", "--input x: no such file"):
        assert said in message
    assert f"cd {tmp_path} && OMP_NUM_THREADS=1 {sys.executable} -c 'import sys;" in message
    assert stamp_file(tmp_path, "a").exists()
    assert not stamp_file(tmp_path, "b").exists()


def test_a_stage_that_leaves_nothing_has_failed(tmp_path: Path) -> None:
    stage = Stage(name="a", commands=(script(""),), outputs=(tmp_path / "a",))
    own_folder(tmp_path, [stage], fresh=False)
    with pytest.raises(StageError):
        run_stages([stage], tmp_path, tmp_path)


def test_the_cause_is_not_the_launchers_summary() -> None:
    tail = (
        "pretrain:  10%|#\rpretrain:  20%|##\nTraceback (most recent call last):\n"
        "RuntimeError: too hot\n"
        "E1121 04:00:00 1 torch/distributed/elastic/multiprocessing/api.py:984] failed\n"
        "Traceback (most recent call last):\n  ChildFailedError\n"
    )
    assert cause(tail).splitlines() == [
        "  pretrain:  20%|##",
        "  Traceback (most recent call last):",
        "  RuntimeError: too hot",
    ]


def test_fresh_deletes_only_what_the_stages_wrote(tmp_path: Path) -> None:
    out, foreign = tmp_path / "run", tmp_path / "foreign"
    stages = [fake(out, "a", "x"), fake(out, "b", "x")]
    ran(stages, out)
    (out / "mine").write_text("kept")
    own_folder(out, stages[:1], fresh=True)
    assert {path.name for path in out.iterdir()} == {"mine", "stages"}
    foreign.mkdir()
    (foreign / "a").write_text("kept")
    mine = [fake(foreign, "a", "x")]
    for fresh in (False, True):
        assert field_of(refusal(partial(own_folder, foreign, mine, fresh=fresh))) == "--out"
    assert (foreign / "a").read_text() == "kept"
    other = refusal(lambda: own_folder(out, [], fresh=True, flag="--output", owner="mine"))
    assert field_of(other) == "--output"


def test_commands_side_by_side_wait_for_each_other_and_are_labelled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Each waits for the other's file, which one after the other would never come.
    text = (
        "import pathlib, sys, time; mine, other = map(pathlib.Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print('first', flush=True); print('last', end='')"
    )
    files = [str(tmp_path / name) for name in ("a", "b")]
    pair = (script(text, *files, label="one"), script(text, *files[::-1], label="two"))
    stage = Stage(name="pair", commands=pair, side_by_side=True)
    own_folder(tmp_path / "out", [stage], fresh=False)
    run_stages([stage], tmp_path / "out", tmp_path)
    shown = capfd.readouterr().out.splitlines()
    for label in ("one", "two"):
        assert [line for line in shown if line.startswith(label)] == [
            f"{label} | first",
            f"{label} | last",
        ]


def test_the_first_command_that_fails_ends_those_beside_it(tmp_path: Path) -> None:
    forever = script("import time; time.sleep(6000)")
    fails = script("import sys; sys.exit('error: too hot')")
    stage = Stage(name="pair", commands=(forever, fails), side_by_side=True)
    own_folder(tmp_path / "out", [stage], fresh=False)
    with pytest.raises(StageError) as failure:
        run_stages([stage], tmp_path / "out", tmp_path)
    assert "too hot" in str(failure.value)


@pytest.mark.parametrize(
    ("word", "status", "wanted"),
    [
        ("train_iters", 0, True),
        (NonFiniteError.__name__, 1, True),
        (NonFiniteError.__name__, -9, False),
        ("ValueError", 1, False),
        ("", 2, False),
    ],
)
def test_a_training_that_diverges_is_a_result_and_one_that_fails_is_none(
    tmp_path: Path, word: str, status: int, wanted: bool
) -> None:
    settings = replace(FIGURE7, output=tmp_path)
    pair = next(stage for stage in figure7.plan(settings, 2) if stage.side_by_side)
    file = figure7.metrics_file(tmp_path, figure7.runs_of(settings)[1])
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": 7, "ended": word, "exit_code": 1}) if word else "")
    assert pair.commands[1].accepts(status) == wanted


@pytest.mark.parametrize("accepted", [True, False])
def test_a_command_beside_one_whose_end_is_accepted_goes_on(tmp_path: Path, accepted: bool) -> None:
    fails = script("import sys; sys.exit(3)")
    fails = replace(fails, accepts=lambda status: status == 3 and accepted)
    out = tmp_path / "out"
    other = script("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(out / "a"))
    stage = Stage(name="pair", commands=(fails, other), side_by_side=True, outputs=(out / "a",))
    own_folder(out, [stage], fresh=False)
    with nullcontext() if accepted else pytest.raises(StageError, match="status 3"):
        run_stages([stage], out, tmp_path)
