"""SQuAD's files: what is read of them, and what is said of bad ones."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tasks.squad.files import nearest, read_squad
from tests.tasks.squads import PASSAGE, question, write_squad, write_v2


def test_the_version_is_told_from_the_questions(tmp_path: Path) -> None:
    second = read_squad("--valid-data", write_v2(tmp_path / "dev.json"))
    assert second.version == "2.0"
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
    with pytest.warns(
        UserWarning,
        match=r"--train-data .*train.json: 2 of 200 answers are not at their answer_start: "
        r"1 elsewhere in the passage \(the first of question moved\), "
        r"1 nowhere in the passage \(the first of question lost\)$",
    ):
        squad = read_squad("--train-data", file)
    assert squad.questions[198].placed.start == 12
    assert squad.questions[199].placed is None
    assert (squad.moved, squad.lost) == (["moved"], ["lost"])
    file = write_squad(tmp_path / "train.json", *right[1:], *wrong)
    with pytest.raises(ValueError, match="2 of 199 answers are not .* as released"):
        read_squad("--train-data", file)


def test_a_released_file_raises_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squad = read_squad("--valid-data", write_v2(tmp_path / "dev.json"))
    assert squad.moved == squad.lost == []


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in question("q7", {"The": 0}).items() if name != key}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([without("id")], 'article 1, paragraph 1, question 1 has no "id" that is a text'),
        ([without("question")], 'question q7 has no "question" that is a text'),
        ([without("answers")], 'question q7 has no "answers" that is a list'),
        ([question("q7", {})], "question q7 is not impossible, and lacks answers"),
        (
            [question("q7", {"The": 0}, is_impossible=True)],
            "question q7 says that it is impossible, and has answers",
        ),
        ([question("q7", {"The": 0}, is_impossible="no")], 'no "is_impossible" that is true or'),
        ([question("q7", {"The": "0"})], 'question q7 has no "answer_start" that is a number'),
        ([question("q7", {" ": 3})], "question q7 has a blank answer"),
        ([question("q7", {"The": 0}), question("q7", {"The": 0})], "has 2 questions q7"),
        (
            [question("q7", {"The": 0}), question("q8", {"The": 0}, is_impossible=False)],
            '1 of 2 questions have "is_impossible", as in 2.0, and the others, such as q7',
        ),
        ([{**question("q7", {"The": 0}), "question": "\ud800"}], "half of a surrogate pair"),
        ([], "has no questions"),
    ],
)
def test_errors_name_the_file_and_the_question(
    tmp_path: Path, entries: list[dict[str, Any]], message: str
) -> None:
    file = write_squad(tmp_path / "dev.json", *entries)
    with pytest.raises(ValueError, match=rf"--valid-data {file}.*{message}.* would work"):
        read_squad("--valid-data", file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "data" that is a list'),
        (json.dumps({"data": [{}]}), 'article 1 has no "paragraphs"'),
        (json.dumps({"data": [{"paragraphs": [{}]}]}), 'paragraph 1 has no "context"'),
        (
            json.dumps({"data": [{"paragraphs": [{"context": " ", "qas": []}]}]}),
            'paragraph 1: its "context" is blank',
        ),
    ],
)
def test_errors_name_the_file_and_the_paragraph(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "dev.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"--valid-data {file}.*{message}"):
        read_squad("--valid-data", file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--valid-data .*none.json: no such file"):
        read_squad("--valid-data", tmp_path / "none.json")
