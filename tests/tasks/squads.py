"""SQuAD files and a vocabulary, small enough for tests."""

import json
from pathlib import Path
from typing import Any

from tests.tasks.made import wordpiece

WORDS = ["rain", "spain", "stays", "mainly", "plain", "where", "does", "it", "stay"]
PASSAGE = "The rain in Spain stays mainly in the plain."
MANIFEST = {"config": {"model": {"max_position_embeddings": 64}}}


TOKENIZER = wordpiece(*WORDS)  # others are spelt letter by letter


def question(name: str, answers: dict[str, int], **more: Any) -> dict[str, Any]:
    """answers: {text: first character}."""
    found = [{"text": text, "answer_start": start} for text, start in answers.items()]
    return {"id": name, "question": "Where does it stay?", "answers": found, **more}


def squad_of(*questions: dict[str, Any], passage: str = PASSAGE) -> dict[str, Any]:
    """One article of one paragraph."""
    paragraphs = [{"context": passage, "qas": questions}]
    return {"version": "any", "data": [{"title": "Rain", "paragraphs": paragraphs}]}


def write_squad(file: Path, *questions: dict[str, Any], passage: str = PASSAGE) -> Path:
    file.write_text(json.dumps(squad_of(*questions, passage=passage)), encoding="utf-8")
    return file


def write_v2(file: Path) -> Path:
    """Two questions with an answer, two without."""
    return write_squad(
        file,
        question("plain", {"the plain": 34, "in the plain": 31}, is_impossible=False),
        question("spain", {"Spain": 12}, is_impossible=False),
        question("snow", {}, is_impossible=True, plausible_answers=[{"text": "rain"}]),
        question("hail", {}, is_impossible=True),
    )
