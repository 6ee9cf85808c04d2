"""SQuAD's files as released, of either version, checked.

1.1: every question has an answer in its passage. 2.0: every question has "is_impossible", and no
answers where that is true. The questions decide which version a file is. "plausible_answers" and
other keys are not read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.readers.inputs import read_json, take

CURE = "a file as released, such as train-v1.1.json or dev-v2.0.json, would work"
_take = partial(take, cure=CURE)
MOST_MISPLACED = 0.01  # share of the answers; a file with more has been changed
Version: TypeAlias = Literal["1.1", "2.0"]


@dataclass(frozen=True)
class Answer:
    text: str
    start: int | None  # its first character in the passage; None where the passage lacks the text
    moved: bool  # whether the file's answer_start differs from it


@dataclass(frozen=True)
class Question:
    id: str
    text: str
    passage: int  # index of the passage
    answers: Sequence[Answer]  # empty where the question cannot be answered
    is_impossible: bool | None  # None: not in the file, as in 1.1

    @property
    def placed(self) -> Answer | None:
        """The first answer that occurs in the passage."""
        return next((each for each in self.answers if each.start is not None), None)


@dataclass(frozen=True)
class Squad:
    place: str  # flag and file, for messages
    version: Version
    passages: Sequence[str]
    questions: Sequence[Question]

    @property
    def has_answer(self) -> NDArray[np.bool_]:
        """[questions]"""
        return np.array([bool(each.answers) for each in self.questions])

    @property
    def moved(self) -> list[str]:
        """Question id of each answer that is elsewhere in its passage than the file says."""
        return [q.id for q in self.questions for each in q.answers if each.moved]

    @property
    def lost(self) -> list[str]:
        """Question id of each answer that is nowhere in its passage."""
        return [q.id for q in self.questions for each in q.answers if each.start is None]


def read_squad(flag: str, file: Path, *, most_misplaced: float = MOST_MISPLACED) -> Squad:
    """Raises ValueError or OSError, naming file and question, for files not as released.

    An answer that is not at its answer_start is placed at the nearest occurrence of its text. The
    number of such answers is a warning, and above a share of most_misplaced an error.
    """
    place = f"{flag} {file}"
    passages: list[str] = []
    questions: list[Question] = []
    content = read_json(flag, file, CURE)
    for article_number, article in enumerate(_take(content, "data", list, place), 1):
        in_article = f"{place}, article {article_number}"
        paragraphs = _take(article, "paragraphs", list, in_article)
        for paragraph_number, paragraph in enumerate(paragraphs, 1):
            where = f"{in_article}, paragraph {paragraph_number}"
            passage = _take(paragraph, "context", str, where)
            if not passage.strip():
                raise ValueError(f'{where}: its "context" is blank; {CURE}')
            for number, entry in enumerate(_take(paragraph, "qas", list, where), 1):
                name = _take(entry, "id", str, f"{where}, question {number}")
                named = f"{place}, question {name}"
                questions.append(_question(named, entry, passage, len(passages)))
            passages.append(passage)
    if not questions:
        raise ValueError(f"{place} has no questions; {CURE}")
    name, count = Counter(each.id for each in questions).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{place} has {count} questions {name}; {CURE}")
    squad = Squad(place, _version(place, questions), passages, questions)
    _check_places(squad, most_misplaced)
    return squad


def _question(named: str, entry: Any, passage: str, number: int) -> Question:
    is_impossible = None
    if "is_impossible" in entry:
        is_impossible = _take(entry, "is_impossible", bool, named)
    answers = []
    for each in _take(entry, "answers", list, named):
        text = _take(each, "text", str, named)
        given = _take(each, "answer_start", int, named)
        if not text.strip():
            raise ValueError(f"{named} has a blank answer; {CURE}")
        start = nearest(passage, text, given)
        answers.append(Answer(text, start, start not in (None, given)))
    # A question of 1.1 without answers would be scored as wrong for every prediction.
    if bool(is_impossible) == bool(answers):
        says = "says that it is impossible, and has" if answers else "is not impossible, and lacks"
        raise ValueError(f"{named} {says} answers; {CURE}")
    text = _take(entry, "question", str, named)
    return Question(entry["id"], text, number, answers, is_impossible)


def nearest(passage: str, text: str, start: int) -> int | None:
    """Position of the text in the passage that is nearest to `start`; None if it has none."""
    start = min(max(start, 0), len(passage))
    found = passage.rfind(text, 0, start + len(text)), passage.find(text, start)
    return min((each for each in found if each >= 0), key=lambda at: abs(at - start), default=None)


def _version(place: str, questions: Sequence[Question]) -> Version:
    with_mark = sum(each.is_impossible is not None for each in questions)
    if 0 < with_mark < len(questions):
        without = next(each.id for each in questions if each.is_impossible is None)
        raise ValueError(
            f'{place}: {with_mark} of {len(questions)} questions have "is_impossible", as in 2.0, '
            f"and the others, such as {without}, have not, as in 1.1; {CURE}"
        )
    return "2.0" if with_mark else "1.1"


def _check_places(squad: Squad, most: float) -> None:
    places = {"elsewhere": squad.moved, "nowhere": squad.lost}
    wrong = sum(map(len, places.values()))
    if not wrong:
        return
    total = sum(len(each.answers) for each in squad.questions)
    parts = [
        f"{len(ids)} {place} in the passage (the first of question {ids[0]})"
        for place, ids in places.items()
        if ids
    ]
    message = f"{squad.place}: {wrong} of {total} answers are not at their answer_start"
    text = f"{message}: {', '.join(parts)}"
    if wrong > most * total:
        raise ValueError(f"{text}; {CURE}")
    warnings.warn(text, stacklevel=3)
