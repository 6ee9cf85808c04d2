"""Exact match and F1 as the official scorers of SQuAD 1.1 and 2.0 count them.

Answers are compared in lower case, without ASCII punctuation, without the words a, an and the, and
with one blank between words. A question's exact match and F1 are the best over its right answers.
2.0 has two more rules: right answers that are empty after this do not count, and where either side
is empty F1 is the exact match.
"""

from __future__ import annotations

import json
import re
import string
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.readers.inputs import read_json
from tasks.readers.squad_data import Squad, Version

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
BESTS = {"best_exact": "exact_match", "best_f1": "f1"}
CURES: Mapping[type, str] = {
    str: 'one JSON object of {"question id": "answer"}, "" for no answer, would work',
    float: 'one JSON object of {"question id": number}, high where no answer is likely, would work',
}
EXACT = (
    "per cent of the questions whose answer is a right one, in lower case and without punctuation, "
    "articles and surplus blanks, as the official scorer compares them"
)
F1 = (
    "in per cent, mean over the questions of the harmonic mean of precision and recall of the "
    "answer's words, each question's best over its right answers, as the official scorer's"
)
BEST = (
    "the highest {} that any threshold of the no-answer score would give, in per cent; a question "
    "whose score is above {}_threshold is not answered"
)


@dataclass(frozen=True)
class Marks:
    """Scores in [0, 1] of every question, in the order of the file."""

    exact: NDArray[np.float64]  # [questions]
    f1: NDArray[np.float64]  # [questions]


def conventions(version: Version) -> dict[str, str]:
    """The meaning of each figure, by its name."""
    every = {"questions": "of the file", "exact_match": EXACT, "f1": F1}
    if version == "1.1":
        return every
    best = {name: BEST.format(of, name) for name, of in BESTS.items()}
    has = {f"has_answer_{name}": "of the questions with an answer" for name in every}
    no = {
        f"no_answer_{name}": "of those without one, which are right where the answer is empty"
        for name in every
    }
    thresholds = {f"{name}_threshold": f"the lowest that gives {name}" for name in best}
    return {**every, **has, **no, **best, **thresholds}


def normalise(text: str) -> str:
    letters = text.lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLE.sub(" ", letters).split())


def word_f1(answer: str, right: str) -> float:
    """F1 of the words of two normalised answers; 0 where they share no word."""
    words, gold = answer.split(), right.split()
    shared = (Counter(words) & Counter(gold)).total()
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0


def mark(squad: Squad, predictions: Mapping[str, str]) -> Marks:
    """The marks of all questions; one without a prediction counts as wrong."""
    marks = np.zeros((len(squad.questions), 2))
    for row, question in zip(marks, squad.questions, strict=True):
        if question.id in predictions:
            right = {normalise(each.text) for each in question.answers}
            row[:] = _mark(normalise(predictions[question.id]), right, squad.version == "2.0")
    return Marks(*marks.T)


def _mark(answer: str, right: set[str], is_v2: bool) -> tuple[float, float]:
    if is_v2:
        right = right - {""} or {""}
    exact = float(answer in right)
    f1 = max(word_f1(answer, each) for each in right)
    # The F1 of two empty answers is 1 in 2.0, and 0 in 1.1.
    return exact, exact if is_v2 and not answer else f1


def unanswered(squad: Squad, marks: Marks, is_left_out: NDArray[np.bool_]) -> Marks:
    """Marks with masked questions, [questions], unanswered: right if they have no answer."""
    right = ~squad.has_answer
    return Marks(*(np.where(is_left_out, right, each) for each in (marks.exact, marks.f1)))


def figures(squad: Squad, marks: Marks) -> dict[str, Any]:
    """Means in per cent; for 2.0 also separately for questions with and without an answer."""
    found: dict[str, Any] = {}
    if squad.version == "2.0":
        has = squad.has_answer
        for name, part in (("has_answer", has), ("no_answer", ~has)):
            found[f"{name}_questions"] = int(part.sum())
            if part.any():
                found[f"{name}_exact_match"] = _percent(marks.exact[part])
                found[f"{name}_f1"] = _percent(marks.f1[part])
    exact, f1 = _percent(marks.exact), _percent(marks.f1)
    return {"questions": len(squad.questions), **found, "exact_match": exact, "f1": f1}


def _percent(marks: NDArray[np.float64]) -> float:
    return 100 * float(marks.mean())


def best_figures(
    squad: Squad, marks: Marks, answered: NDArray[np.bool_], odds: NDArray[np.float64]
) -> dict[str, float]:
    """The highest exact match and F1 that a threshold of the odds can give, and that threshold.

    answered: [questions], whether the prediction with these marks is not empty;
    odds: [questions], the higher, the more likely it is that there is no answer.
    """
    found = {}
    for name, each in zip(BESTS, (marks.exact, marks.f1), strict=True):
        gains = np.where(squad.has_answer, each, -1.0 * answered)
        most, threshold = _best_threshold(gains, odds)
        none_right = int((~squad.has_answer).sum())
        found[name] = 100 * (none_right + most) / len(gains)
        found[f"{name}_threshold"] = threshold
    return found


def _best_threshold(gains: NDArray[np.float64], odds: NDArray[np.float64]) -> tuple[float, float]:
    """(largest sum of gains of the questions whose odds are at most a threshold, the lowest such
    threshold). gains: [questions], gain of answering over not answering."""
    order = np.argsort(odds, kind="stable")
    ranked, sums = odds[order], gains[order].cumsum()
    # Questions of equal odds are answered together.
    ends = np.append(ranked[1:] != ranked[:-1], True)
    ranked, sums = ranked[ends], sums[ends]
    best = int(sums.argmax())
    if sums[best] <= 0:
        return 0.0, 0.0 if ranked[0] > 0 else float(ranked[0]) - 1
    return float(sums[best]), float(ranked[best])


def score_file(
    squad: Squad, predictions: Path, na_prob_file: Path | None, threshold: float
) -> dict[str, Any]:
    """The figures of a file of predictions. Raises ValueError or OSError, naming flag and file.

    na_prob_file: odds, from which the best thresholds are computed; a question whose odds are above
    the threshold counts as not answered.
    """
    ids = [each.id for each in squad.questions]
    answers, missing = read_by_id("--predictions", predictions, ids, str)
    marks = mark(squad, answers)
    best: dict[str, float] = {}
    if na_prob_file is not None:
        odds = _read_odds(na_prob_file, squad, missing)
        answered = np.array([bool(answers[each]) for each in ids])
        best = best_figures(squad, marks, answered, odds)
        marks = unanswered(squad, marks, odds > threshold)
    return {"missing_predictions": missing, **best, **figures(squad, marks)}


def read_by_id(
    flag: str, file: Path, ids: Sequence[str], kind: type[str] | type[float]
) -> tuple[dict[str, Any], int]:
    """(the file's values by question id, how many questions have none); warns of other ids."""
    place, cure = f"{flag} {file}", CURES[kind]
    values = read_json(flag, file, cure)
    if not isinstance(values, dict):
        raise ValueError(f"{place} is not an object; {cure}")
    for name, value in values.items():
        is_number = type(value) in (int, float) and isfinite(value)
        if not (isinstance(value, str) if kind is str else is_number):
            raise ValueError(f"{place}, question {name}: {json.dumps(value)[:60]}; {cure}")
    missing = [each for each in ids if each not in values]
    if len(missing) == len(ids):
        raise ValueError(f"{place} has none of the {len(ids)} questions of --valid-data; {cure}")
    if surplus := len(values) - len(ids) + len(missing):
        warnings.warn(f"{place}: {surplus} questions are not in --valid-data", stacklevel=3)
    if missing:
        text = f"{place} lacks {len(missing)} of {len(ids)} questions, such as {missing[0]}"
        warnings.warn(text, stacklevel=3)
    return values, len(missing)


def _read_odds(file: Path, squad: Squad, missing: int) -> NDArray[np.float64]:
    """[questions]; raises ValueError unless odds and predictions have all questions."""
    place = f"--na-prob-file {file}"
    if squad.version == "1.1":
        raise ValueError(f"{place}: {squad.place} is of SQuAD 1.1, which has no no-answer score")
    ids = [each.id for each in squad.questions]
    odds, without = read_by_id("--na-prob-file", file, ids, float)
    if missing or without:
        raise ValueError(
            f"{place}: {missing} predictions and {without} numbers are missing; all would work"
        )
    return np.array([odds[each] for each in ids], np.float64)
