"""SQuAD's scorer: official predictions, and what each rule says of small cases."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.readers.squad_files import Squad, read_squad
from tasks.readers.squad_scorer import (
    best_figures,
    figures,
    mark,
    normalise,
    score_file,
    unanswered,
)
from tests.refusals import field_of, refusal
from tests.tasks.squads import question, write_squad, write_v2


def write_json(file: Path, content: Any) -> Path:
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


@pytest.fixture
def squad(tmp_path: Path) -> Squad:
    return read_squad("--valid-data", write_v2(tmp_path / "dev.json"))


def test_official_predictions_get_their_official_figures(test_data: Path) -> None:
    folder = test_data / "squad"
    squad = read_squad("--valid-data", folder / "dev-v2.0.json")
    found = score_file(squad, folder / "bert_single_v2.0_predictions.json", None, 1.0)
    assert round(found["exact_match"], 3) == 78.742
    assert round(found["f1"], 3) == 81.775
    assert found["questions"] == 11873
    assert found["has_answer_questions"] == 5928
    assert found["no_answer_questions"] == 5945
    assert found["missing_predictions"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Rain,\tin Spain.", "rain in spain"), ("An a-z", "az"), ("a.the b", "athe b"),
        ("theatre a the", "theatre"), ("U.S.", "us"), ("“the”", "“ ”"), ("the", ""),
    ],
)  # fmt: skip
def test_texts_are_normalised(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("The plain!", 1, 1), ("plain", 1, 1), ("mainly in the plain", 0, 4 / 5),
        ("plain plain", 0, 2 / 3), ("Spain", 0, 0), ("", 0, 0),
    ],
)  # fmt: skip
def test_the_best_right_answer_counts(squad: Squad, answer: str, exact: float, f1: float) -> None:
    marks = mark(squad, {"plain": answer})
    assert (marks.exact[0], marks.f1[0]) == pytest.approx((exact, f1))
    assert marks.exact[1:].sum() == marks.f1[1:].sum() == 0  # without a prediction: wrong


def test_questions_without_answer_are_right_if_left_open(squad: Squad) -> None:
    marks = mark(squad, {"plain": "", "spain": "Spain", "snow": "", "hail": "rain"})
    assert marks.exact.tolist() == marks.f1.tolist() == [0, 1, 1, 0]
    # Nothing is left of "the", and the official scorer takes it for no answer.
    assert mark(squad, {"snow": "the"}).f1.tolist() == [0, 0, 1, 0]
    assert figures(squad, marks) == {
        "questions": 4,
        "has_answer_questions": 2,
        "has_answer_exact_match": 50.0,
        "has_answer_f1": 50.0,
        "no_answer_questions": 2,
        "no_answer_exact_match": 50.0,
        "no_answer_f1": 50.0,
        "exact_match": 50.0,
        "f1": 50.0,
    }
    closed = unanswered(squad, marks, np.array([False, True, False, True]))
    assert closed.exact.tolist() == [0, 0, 1, 1]


def test_the_versions_differ_in_answers_of_which_nothing_is_left(tmp_path: Path) -> None:
    answers = {"The": 0, "Spain": 12}
    said = {"q": "the"}
    first = write_squad(tmp_path / "first.json", question("q", answers))
    marks = mark(read_squad("--valid-data", first), said)
    assert (marks.exact[0], marks.f1[0]) == (1, 0)
    second = write_squad(tmp_path / "second.json", question("q", answers, is_impossible=False))
    marks = mark(read_squad("--valid-data", second), said)
    assert (marks.exact[0], marks.f1[0]) == (0, 0)
    only = write_squad(tmp_path / "only.json", question("q", {"The": 0}, is_impossible=False))
    marks = mark(read_squad("--valid-data", only), said)
    assert (marks.exact[0], marks.f1[0]) == (1, 1)


def test_the_best_threshold_is_the_lowest_of_all_that_were_tried(squad: Squad) -> None:
    rng = np.random.default_rng(5)
    for trial in range(200):
        texts = dict(zip(("plain", "spain", "snow", "hail"), rng.permutation(
            ["the plain", "in the plain", "Spain", "rain"]), strict=True))  # fmt: skip
        odds = rng.integers(-2, 3, 4) + 0.0  # some are equal
        marks = mark(squad, texts)
        tried = {
            threshold: figures(squad, unanswered(squad, marks, odds > threshold))
            for threshold in sorted({0.0, odds.min() - 1, *odds})
        }
        found = best_figures(squad, marks, np.ones(4, bool), odds)
        for name, of in (("best_exact", "exact_match"), ("best_f1", "f1")):
            most = max(each[of] for each in tried.values())
            assert found[name] == pytest.approx(most), trial
            assert tried[found[f"{name}_threshold"]][of] == pytest.approx(most), trial


def test_no_threshold_answers_where_every_answer_is_wrong(squad: Squad) -> None:
    marks = mark(squad, dict.fromkeys(("plain", "spain", "snow", "hail"), "wrong"))
    found = best_figures(squad, marks, np.ones(4, bool), np.array([0.1, 0.2, 0.3, 0.4]))
    assert found["best_exact"] == 50
    assert found["best_exact_threshold"] == 0


def test_an_empty_answer_costs_nothing_at_any_threshold(squad: Squad) -> None:
    marks = mark(squad, {"plain": "plain", "spain": "Spain", "snow": "", "hail": ""})
    answered = np.array([True, True, False, False])
    assert best_figures(squad, marks, answered, np.array([2.0, 2, 1, 1]))["best_f1"] == 100


def test_a_file_of_no_answer_probabilities_is_used_as_by_the_official_scorer(
    squad: Squad, tmp_path: Path
) -> None:
    said = {"plain": "plain", "spain": "Spain", "snow": "rain", "hail": "rain"}
    odds = {"plain": 0.1, "spain": 0.6, "snow": 0.4, "hail": 0.9}
    files = write_json(tmp_path / "said.json", said), write_json(tmp_path / "odds.json", odds)
    found = score_file(squad, *files, 0.5)
    assert found["exact_match"] == 50  # plain, hail
    assert found["has_answer_exact_match"] == 50
    assert found["best_exact"] == 75
    assert found["best_exact_threshold"] == 0.1
    assert score_file(squad, *files, 0.6)["has_answer_exact_match"] == 100
    assert score_file(squad, *files, 1.0)["exact_match"] == 50
    assert score_file(squad, *files, 1.0)["no_answer_exact_match"] == 0


def test_missing_and_unknown_predictions_are_counted(squad: Squad, tmp_path: Path) -> None:
    file = write_json(tmp_path / "said.json", {"plain": "plain", "snow": "", "fog": "rain"})
    with pytest.warns(UserWarning, match="said.json") as told:
        found = score_file(squad, file, None, 1.0)
    assert len(told) == 2
    assert found["missing_predictions"] == 2
    assert found["exact_match"] == 50


EVERY = dict.fromkeys(("plain", "spain", "snow", "hail"), "")


@pytest.mark.parametrize(
    ("said", "odds", "named", "question"),
    [
        (["plain"], None, "--predictions", ""),
        ({"plain": 1}, None, "--predictions", "question plain"),
        ({"fog": ""}, None, "--predictions", ""),
        (EVERY, {"plain": "x"}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": float("nan")}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": True}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": 1}, "--na-prob-file", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:--na-prob-file")
def test_errors_name_the_file_and_the_question(
    squad: Squad, tmp_path: Path, said: Any, odds: Any, named: str, question: str
) -> None:
    files = [write_json(tmp_path / "said.json", said)]
    files.append(None if odds is None else write_json(tmp_path / "odds.json", odds))
    error = refusal(lambda: score_file(squad, *files, 1.0))
    assert field_of(error) == named
    assert question in str(error)


def test_the_first_version_has_no_no_answer_scores(tmp_path: Path) -> None:
    squad = read_squad("--valid-data", write_squad(tmp_path / "a.json", question("q", {"The": 0})))
    said, odds = ({"q": "The"}, {"q": 1})
    files = write_json(tmp_path / "said.json", said), write_json(tmp_path / "odds.json", odds)
    assert field_of(refusal(lambda: score_file(squad, *files, 1.0))) == "--na-prob-file"
    assert score_file(squad, files[0], None, 1.0)["exact_match"] == 100
