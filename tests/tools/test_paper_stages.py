"""How stages run commands side by side, and what of that a script takes for a result."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.train.diagnose import NonFiniteError
from tests.tools.test_paper_plans import FIGURE7
from tools.command import Command
from tools.paper.figure7 import plan as figure7_plan
from tools.stages import Stage, StageError, own_folder, run_stages


def script(text: str, *words: str, label: str = "") -> Command:
    return Command(argv=(sys.executable, "-c", text, *words), label=label)


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


def test_of_commands_side_by_side_the_first_that_fails_ends_all(tmp_path: Path) -> None:
    forever = script("import time; time.sleep(600)")
    fails = script("import sys; sys.exit('error: too hot')")
    stage = Stage(name="pair", commands=(forever, fails), side_by_side=True)
    own_folder(tmp_path / "out", [stage], fresh=False)
    with pytest.raises(StageError, match="too hot"):
        run_stages([stage], tmp_path / "out", tmp_path)


# It leaves a record of how it ended, and then ends with a status; the other waits for that.
ENDS = """
import json, os, pathlib, sys
file, word, status = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
file.parent.mkdir(parents=True)
text = json.dumps({"step": 7, "ended": word, "exit_code": 1}) if word else ""
file.with_name("pid").write_text(str(os.getpid()))
file.write_text(text)
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""
# It goes on once the first has ended, or where that ends all, would for ever.
GOES_ON = """
import pathlib, sys, time
first, own = map(pathlib.Path, sys.argv[1:3])
while not first.exists(): time.sleep(0.01)
stat = pathlib.Path("/proc", first.with_name("pid").read_text(), "stat")
while stat.exists() and stat.read_text().split()[2] != "Z": time.sleep(0.01)
if sys.argv[3] == "for ever": time.sleep(600)
own.parent.mkdir(parents=True)
own.touch()
"""


@pytest.mark.parametrize(
    ("word", "status", "is_result"),
    [
        (NonFiniteError.__name__, 1, True),
        (NonFiniteError.__name__, -9, False),
        ("ValueError", 1, False),
        ("", 2, False),
    ],
)
def test_a_training_that_diverges_is_a_result_and_one_that_fails_is_none(
    tmp_path: Path, word: str, status: int, is_result: bool
) -> None:
    settings = replace(FIGURE7, output=tmp_path / "out")
    stage = next(stage for stage in figure7_plan.plan(settings, 2) if stage.side_by_side)
    one, other = (
        figure7_plan.metrics_file(settings.output, run)
        for run in figure7_plan.runs_of(settings)[:2]
    )
    how_long = "a while" if is_result else "for ever"
    waits = script(GOES_ON, str(one), str(other), how_long)
    instead = script(ENDS, str(one), word, str(status)), waits
    pair = zip(stage.commands, instead, strict=True)
    stage = replace(stage, commands=tuple(replace(a, argv=b.argv) for a, b in pair))
    own_folder(settings.output, [stage], fresh=False)
    if is_result:
        run_stages([stage], settings.output, tmp_path)
    else:
        with pytest.raises(StageError, match=f"exit status {status}"):
            run_stages([stage], settings.output, tmp_path)
    assert other.exists() == is_result


def test_a_folder_of_another_program_is_refused(tmp_path: Path) -> None:
    own_folder(tmp_path, [], fresh=False)
    with pytest.raises(ValueError, match="--output .* was written by the quickstart, not by mine"):
        own_folder(tmp_path, [], fresh=True, flag="--output", owner="mine")
