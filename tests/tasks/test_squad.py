"""SQuAD as a task: settings, what is counted, figures, and answers that are saved and scored."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.checks import ChecksConfig
from tasks.squad.task import Settings, SquadTask, prepare, score_only
from tests.tasks.squads import MANIFEST, TOKENIZER, question, write_squad, write_v2

SMALL: dict[str, Any] = {"load": "x", "seq_length": 16, "max_query_length": 8, "doc_stride": 2}


def make_task(tmp_path: Path, **more: Any) -> SquadTask:
    file = write_v2(tmp_path / "dev.json")
    return prepare(Settings(valid_data=(file,), **SMALL | more), MANIFEST, TOKENIZER)


def logits_of(task: SquadTask, answered: float) -> list[Any]:
    """Of a model that knows the labels, and gives the mark of no answer this much less."""
    found = []
    for example in task.evaluations[""]:
        logits = np.zeros((len(example.options[0].tokens), 2), np.float32)
        logits[0] = -answered
        logits[-3] += 0.1  # else the first span, "the", of which nothing is left to compare
        logits[example.label, (0, 1)] += 1
        found.append(logits)
    return found


def test_the_task_has_what_is_trained_and_evaluated(tmp_path: Path) -> None:
    train = write_squad(
        tmp_path / "train.json", question("q", {"the plain": 34}, is_impossible=False)
    )
    task = make_task(tmp_path, train_data=(train,))
    assert (task.head, task.labels, task.best) == ("span", (), ("", "f1"))
    assert task.paper == "SQUAD 2.0"
    assert all(len(example.label) == 2 for example in task.train)
    assert task.notes["squad_version"] == "2.0"
    counted = task.notes["input"]["train"]
    assert {name: count for name, count in counted.items() if count} == {
        "texts_with_letters": 2, "texts_with_capitals": 2, "tokens": 15, "questions": 1,
        "windows": 2, "windows_without_answer": 1,
    }  # fmt: skip
    assert len(counted) == 13
    counted = task.notes["input"]["valid"][""]
    assert counted["questions"] == 4
    assert counted["windows"] == len(task.evaluations[""]) == 8


def test_every_figure_has_a_meaning(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert task.figures("", logits_of(task, 0)).keys() == task.conventions.keys()
    file = write_squad(tmp_path / "dev.json", question("q", {"Spain": 12}))
    first = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert first.paper == "SQUAD 1.1"
    every = {"questions": 1, "exact_match": 100, "f1": 100}
    assert first.figures("", logits_of(first, -9)) == every, "every question is answered"
    assert first.conventions.keys() == every.keys()


def test_the_threshold_decides_what_is_answered(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    figures = task.figures("", logits_of(task, 0))
    assert figures["exact_match"] == figures["f1"] == figures["best_f1"] == 100
    # With the mark of no answer 2 x 3 lower every question is answered ...
    figures = task.figures("", logits_of(task, 3))
    assert (figures["has_answer_f1"], figures["no_answer_f1"], figures["f1"]) == (100, 0, 50)
    assert figures["best_exact"] == figures["best_f1"] == 100
    # ... and what the best threshold is said to be gives what it is said to give.
    threshold = figures["best_f1_threshold"]
    task = make_task(tmp_path, null_score_diff_threshold=threshold)
    assert task.figures("", logits_of(task, 3))["f1"] == 100


def test_saved_answers_score_the_same_without_a_model(tmp_path: Path) -> None:
    saved = {
        "save_predictions": tmp_path / "said.json",
        "save_null_odds": tmp_path / "odds.json",
    }
    task = make_task(tmp_path, **saved, null_score_diff_threshold=-6.0)
    figures = task.figures("", logits_of(task, 2.5))
    said = json.loads(saved["save_predictions"].read_text(encoding="utf-8"))
    assert said == {"plain": "the plain", "spain": "Spain", "snow": "", "hail": ""}
    assert list(json.loads(saved["save_null_odds"].read_text())) == list(said)
    settings = Settings(
        valid_data=(tmp_path / "dev.json",),
        predictions=saved["save_predictions"],
        na_prob_file=saved["save_null_odds"],
        na_prob_thresh=-6.0,
    )
    found = score_only(settings)
    assert {key: found[key] for key in figures if "best" not in key} == {
        key: value for key, value in figures.items() if "best" not in key
    }
    assert found["protocol"]["squad_version"] == "2.0"
    assert found.keys() == found["conventions"].keys() | {"conventions", "protocol"}
    assert settings.files == [*settings.valid_data, *saved.values()]


def test_a_file_of_predictions_is_scored_wherever_the_right_answers_stand(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "dev.json", question("q", {"snow": 3}))
    said = tmp_path / "said.json"
    said.write_text('{"q": "Snow"}', encoding="utf-8")
    with pytest.warns(UserWarning, match="1 of 1 answers"):
        found = score_only(Settings(valid_data=(file,), predictions=said))
    assert found["exact_match"] == 100


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"4 of 4 questions .*--max-query-length 4"):
        make_task(tmp_path, max_query_length=4)
    with pytest.warns(UserWarning, match=r"--max-query-length 4") as told:
        task = make_task(tmp_path, max_query_length=4, checks=ChecksConfig(max_truncated=1.0))
    assert len(told) == 1
    assert task.notes["input"]["valid"][""]["truncated_questions"] == 4
    with pytest.warns(UserWarning, match="1 of 4 questions"):
        make_task(tmp_path, seq_length=12, doc_stride=99, max_query_length=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_task(tmp_path)


def test_blank_questions_and_answers_not_in_their_passage_are_in_the_record(
    tmp_path: Path,
) -> None:
    right = [question(f"q{number}", {"Spain": 12}) for number in range(197)]
    odd = [question("moved", {"Spain": 10}), question("lost", {"snow": 4})]
    blank = {**question("blank", {"Spain": 12}), "question": "\u200b \n"}
    file = write_squad(tmp_path / "dev.json", *right, *odd, blank)
    with pytest.warns(UserWarning, match="dev.json: ") as told:
        task = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert len(told) == 2
    assert "1 of 200 questions" in str(told[1].message)
    counted = task.notes["input"]["valid"][""]
    assert counted["blank_questions"] == counted["moved_answers"] == 1
    assert counted["answers_not_in_passage"] == 1
