"""tools/plan.py schedule: what it writes, draws and refuses."""

import json
from pathlib import Path

import pytest

from megatron.parallel.schedules import schedule
from tests.refusals import refused
from tools.plan import __main__ as plan

SIZES = ("--pipeline", "4", "--micro-batches", "8")


def test_the_json_is_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "own.json", tmp_path / "own.png"
    words = ["schedule", "--kind=zb-h1", *SIZES, f"--json={file}", f"--picture={picture}"]
    assert plan.main(words, {}) == 0
    assert not capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    lists = schedule("zb-h1", 4, 8)
    assert found["actions"] == [[str(action) for action in actions] for actions in lists]
    assert found["actions"][3][:3] == ["3F0", "3I0", "3F1"]
    assert found["in_flight"] == [4, 4, 4, 4]
    assert found["idle_share"] == pytest.approx(3 / 24)
    words = ["schedule", "--kind=interleaved", "--virtual=3", *SIZES, f"--json={file}"]
    assert plan.main(words, {}) == 0
    assert json.loads(file.read_text())["virtual"] == 3


def test_the_text_shows_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["schedule", "--kind=interleaved", "--virtual=2", *SIZES], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:5] for line in lines[:4]] == [
        ["0F0", "0F1", "0F2"],
        [".", "1F0", "1F1"],
        [".", ".", "2F0"],
        [".", ".", "."],
    ]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--pipeline=2", "--micro-batches"),
        ("--micro-batches=2", "--pipeline"),
        ("--pipeline=0 --micro-batches=2", "--pipeline"),
        ("--pipeline=2 --micro-batches=2 --kind=zb-v", "--kind"),
        ("--pipeline=2 --micro-batches=2 --kind=interleaved", "--virtual"),
        ("--pipeline=2 --micro-batches=2 --virtual=3", "--virtual"),
        ("--pipeline=2 --micro-batches=2 --virtual=0", "--virtual"),
    ],
)
def test_schedules_that_cannot_be_are_refused(words: str, flag: str) -> None:
    assert refused(lambda given: plan.main(["schedule", *given], {}), words) == flag
