"""SQuAD: its files, what is counted of them, figures, answers that are saved and scored."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.protocol import ChecksConfig
from tasks.readers.squad import Settings, SquadTask, prepare, score_only
from tasks.readers.squad_files import nearest, read_squad
from tests.refusals import field_of, refusal
from tests.tasks.made import write_model
from tests.tasks.program import result, told
from tests.tasks.squads import MANIFEST, PASSAGE, TOKENIZER, question, write_squad, write_v2

SMALL: dict[str, Any] = {"load": "x", "seq_length": 16, "max_query_length": 8, "doc_stride": 2}


def test_the_version_is_told_from_the_questions(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = read_squad("--valid-data", write_v2(tmp_path / "dev.json"))
    assert (second.version, second.moved, second.lost) == ("2.0", [], [])
    assert second.has_answer.tolist() == [True, True, False, False]
    first = read_squad("--valid-data", write_squad(tmp_path / "a.json", question("q", {"The": 0})))
    assert (first.version, first.passages) == ("1.1", [PASSAGE])
    assert first.questions[0].placed.start == 0


@pytest.mark.parametrize(
    ("start", "found"), [(-3, 5), (5, 5), (9, 5), (10, 14), (15, 14), (32, 25), (33, 40), (99, 40)]
)
def test_an_answer_is_looked_for_near_its_place(start: int, found: int) -> None:
    assert nearest(PASSAGE, "ain", start) == found


def test_misplaced_answers_are_moved_counted_and_named(tmp_path: Path) -> None:
    right = [question(f"q{number}", {"Spain": 12}) for number in range(198)]
    wrong = [question("moved", {"Spain": 10}), question("lost", {"snow": 4})]
    right[0]["question"] = "\u200b \n"
    file = write_squad(tmp_path / "train.json", *right, *wrong)
    with pytest.warns(UserWarning, match=f"^--train-data {file}: "):
        squad = read_squad("--train-data", file)
    assert squad.questions[198].placed.start == 12
    assert squad.questions[199].placed is None
    assert (squad.moved, squad.lost) == (["moved"], ["lost"])
    with pytest.warns(UserWarning, match="train.json") as told:
        task = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert len(told) == 2
    counted = task.notes["input"]["valid"][""]
    names = ("blank_questions", "moved_answers", "answers_not_in_passage")
    assert [counted[name] for name in names] == [1, 1, 1]
    file = write_squad(tmp_path / "train.json", *right[1:], *wrong)
    assert field_of(refusal(lambda: read_squad("--train-data", file))) == "--train-data"


def make_task(tmp_path: Path, **more: Any) -> SquadTask:
    file = write_v2(tmp_path / "dev.json")
    return prepare(Settings(valid_data=(file,), **SMALL | more), MANIFEST, TOKENIZER)


def logits_of(task: SquadTask, answered: float) -> list[Any]:
    """Those of a model that knows the labels, and gives the mark of no answer this much less."""
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
    assert (task.head, task.labels, task.best) == ("span", (), "f1")
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


def test_the_threshold_decides_what_is_answered(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    figures = task.score({"": logits_of(task, 0)})
    assert figures["exact_match"] == figures["f1"] == figures["best_f1"] == 100
    # With the mark of no answer 2 x 3 lower every question is answered ...
    figures = task.score({"": logits_of(task, 3)})
    assert (figures["has_answer_f1"], figures["no_answer_f1"], figures["f1"]) == (100, 0, 50)
    assert figures["best_exact"] == figures["best_f1"] == 100
    assert figures.keys() == task.conventions.keys()
    # ... and what the best threshold is said to be gives what it is said to give.
    threshold = figures["best_f1_threshold"]
    task = make_task(tmp_path, null_score_diff_threshold=threshold)
    assert task.score({"": logits_of(task, 3)})["f1"] == 100


def test_every_question_of_the_first_version_is_answered(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "dev.json", question("q", {"Spain": 12}))
    task = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert task.paper == "SQUAD 1.1"
    figures = task.score({"": logits_of(task, -9)})
    assert figures == {"questions": 1, "exact_match": 100, "f1": 100}
    assert task.conventions.keys() == figures.keys()


def test_a_file_of_predictions_is_scored_wherever_the_right_answers_stand(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "dev.json", question("q", {"snow": 3}))
    said = tmp_path / "said.json"
    said.write_text('{"q": "Snow"}', encoding="utf-8")
    with pytest.warns(UserWarning, match="dev.json"):
        found = score_only(Settings(valid_data=(file,), predictions=said))
    assert found["exact_match"] == 100


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    lost = str(refusal(lambda: make_task(tmp_path, max_query_length=4)))
    assert "--max-query-length 4" in lost
    with pytest.warns(UserWarning, match="--max-query-length 4") as told:
        task = make_task(tmp_path, max_query_length=4, checks=ChecksConfig(max_truncated=1.0))
    assert len(told) == 1
    assert task.notes["input"]["valid"][""]["truncated_questions"] == 4
    with pytest.warns(UserWarning, match="dev.json"):
        make_task(tmp_path, seq_length=12, doc_stride=99, max_query_length=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_task(tmp_path)


WORDS = ["rain", *(f"w{each}" for each in "abcdefghijklmnopqrst")]
CUT = ["--seq-length", "24", "--max-query-length", "4", "--doc-stride", "8"]


def write_questions(file: Path, count: int, seed: int) -> Path:
    """Where a passage has rain, if it has; most passages are longer than a window."""
    paragraphs = [
        paragraph(np.random.default_rng([seed, each]), str(each)) for each in range(count)
    ]
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    return file


def paragraph(random: np.random.Generator, name: str) -> dict[str, Any]:
    words = [WORDS[each] for each in random.integers(1, len(WORDS), size=30)]
    has_answer = bool(random.integers(2))
    if has_answer:
        words[random.integers(30)] = "Rain"
    passage = " ".join(words)
    answers = {"Rain": passage.index("Rain")} if has_answer else {}
    asked = question(name, answers, is_impossible=not has_answer)
    return {"context": passage, "qas": [{**asked, "question": "Rain?"}]}


def test_a_model_is_trained_then_evaluated_and_its_answers_are_scored_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", words=WORDS)
    train, dev = (
        str(write_questions(tmp_path / f"{name}.json", count, seed))
        for seed, (name, count) in enumerate({"train": 96, "dev": 24}.items())
    )
    save, said, odds = tmp_path / "save", tmp_path / "said.json", tmp_path / "odds.json"
    flags = ["--load", str(model), "--train-data", train, "--valid-data", dev, *CUT, "--lr", "3e-3"]
    sizes = ["--global-batch-size", "16", "--micro-batch-size", "16"]
    tuned = result([*flags, *sizes, "--epochs", "3", "--save", str(save)], capsys, "SQUAD")
    assert tuned["notes"]["input"]["train"]["windows"] > 200
    assert tuned["f1"] > 60 > 100 * tuned["no_answer_questions"] / tuned["questions"]

    flags = ["--load", tuned["seeds"][0]["checkpoints"]["last"], "--valid-data", dev, *CUT]
    saves = ["--save-predictions", str(said), "--save-null-odds", str(odds)]
    asked = result([*flags, *saves], capsys, "SQUAD")
    assert {key: asked[key] for key in asked["conventions"]} == pytest.approx(
        {key: tuned[key] for key in asked["conventions"]}, rel=1e-5
    )
    assert json.loads(odds.read_text(encoding="utf-8")).keys() == {str(n) for n in range(24)}
    words = ["--valid-data", dev, "--predictions", str(said)]
    alone = result(words, capsys, "SQUAD")
    shared = alone["conventions"].keys() & asked.keys()
    assert {"f1", "has_answer_f1", "no_answer_f1", "exact_match"} < shared
    assert {key: asked[key] for key in shared} == {key: alone[key] for key in shared}
    assert [Path(each["file"]).name for each in alone["data"]] == ["dev.json", "said.json"]
    by_odds = result(
        [*words, "--na-prob-file", str(odds), "--na-prob-thresh", "0"], capsys, "SQUAD"
    )
    shared = {key for key in by_odds["conventions"].keys() & asked.keys() if "best" not in key}
    assert {key: by_odds[key] for key in shared} == {key: asked[key] for key in shared}
    assert "--lr" in "".join(told([*words, "--lr", "3", "--epochs", "9"], capsys, "SQUAD"))
