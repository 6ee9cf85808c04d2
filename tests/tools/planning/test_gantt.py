"""tools/plan.py schedule: what it writes, draws and refuses."""

import json
from pathlib import Path

import pytest

from megatron.parallel.schedules import read_schedule, schedule, to_json
from tests.refusals import field_of, refusal, refused
from tools import plan

SIZES = ("--pipeline", "4", "--micro-batches", "8")


def test_the_json_is_a_schedule_and_is_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, again, picture = tmp_path / "own.json", tmp_path / "again.json", tmp_path / "own.png"
    words = ["schedule", "--kind=zb-h1", *SIZES, f"--json={file}", f"--picture={picture}"]
    assert plan.main(words, {}) == 0
    assert not capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    assert found["actions"] == to_json(schedule("zb-h1", 4, 8))["actions"]
    assert found["in_flight"] == [4, 4, 4, 4]
    assert found["idle_share"] == pytest.approx(3 / 24)
    assert read_schedule(file) == schedule("zb-h1", 4, 8)
    assert plan.main(["schedule", f"--file={file}", f"--json={again}"], {}) == 0
    assert json.loads(again.read_text()) == found
    file.write_text(json.dumps(to_json(schedule("interleaved", 2, 5, 3))))
    assert plan.main(["schedule", f"--file={file}", f"--json={again}"], {}) == 0
    assert json.loads(again.read_text())["virtual"] == 3


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


@pytest.mark.parametrize("content", ['{"actions": [["0F0", "0B0"], ["1B0", "1F0"]]}', "{}"])
def test_a_file_of_a_schedule_that_does_not_work_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(content)
    words = ["schedule", f"--file={file}"]
    assert field_of(refusal(lambda: plan.main(words, {}))) == "--file"
    refusal(lambda: plan.main([*words, "--pipeline=2"], {}))
