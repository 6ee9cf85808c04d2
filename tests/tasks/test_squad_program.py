"""SQuAD through tasks/main.py: a small BERT learns to find a word, and its answers are scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tasks.made import write_model
from tests.tasks.program import result
from tests.tasks.squads import question

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
    alone = result(["--valid-data", dev, "--predictions", str(said)], capsys, "SQUAD")
    shared = alone["conventions"].keys() & asked.keys()
    assert {"f1", "has_answer_f1", "no_answer_f1", "exact_match"} < shared
    assert {key: asked[key] for key in shared} == {key: alone[key] for key in shared}
    assert json.loads(odds.read_text(encoding="utf-8")).keys() == {str(n) for n in range(24)}
