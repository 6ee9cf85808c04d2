"""SQuAD's files: what is read of them, and what is said of bad ones."""

import warnings
from pathlib import Path

import pytest

from tasks.squad.files import nearest, read_squad
from tests.tasks.squads import PASSAGE, question, write_squad, write_v2


def test_the_version_is_told_from_the_questions(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = read_squad("--valid-data", write_v2(tmp_path / "dev.json"))
    assert second.version == "2.0"
    assert second.moved == second.lost == []
    assert second.has_answer.tolist() == [True, True, False, False]
    first = read_squad("--valid-data", write_squad(tmp_path / "a.json", question("q", {"The": 0})))
    assert first.version == "1.1"
    assert first.passages == [PASSAGE]
    assert first.questions[0].placed.start == 0


@pytest.mark.parametrize(
    ("start", "found"), [(-3, 5), (5, 5), (9, 5), (10, 14), (15, 14), (32, 25), (33, 40), (99, 40)]
)
def test_an_answer_is_looked_for_near_its_place(start: int, found: int) -> None:
    assert nearest(PASSAGE, "ain", start) == found


def test_misplaced_answers_are_moved_counted_and_named(tmp_path: Path) -> None:
    right = [question(f"q{number}", {"Spain": 12}) for number in range(198)]
    wrong = [question("moved", {"Spain": 10}), question("lost", {"snow": 4})]
    file = write_squad(tmp_path / "train.json", *right, *wrong)
    with pytest.warns(UserWarning, match=f"^--train-data {file}: 2 of 200 .*moved.*lost"):
        squad = read_squad("--train-data", file)
    assert squad.questions[198].placed.start == 12
    assert squad.questions[199].placed is None
    assert (squad.moved, squad.lost) == (["moved"], ["lost"])
    file = write_squad(tmp_path / "train.json", *right[1:], *wrong)
    with pytest.raises(ValueError, match="2 of 199"):
        read_squad("--train-data", file)
