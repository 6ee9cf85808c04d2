"""SQuAD's files as released, the windows of their passages, and the answers of a model.

Files. 1.1: every question has an answer in its passage. 2.0: every question has "is_impossible",
and no answers where that is true. The questions decide which version a file is.
"plausible_answers" and other keys are not read.

Windows: [CLS] question [SEP] window [SEP]. A passage that does not fit is split into windows whose
starts are --doc-stride tokens apart. They overlap, so an answer at the edge of one window is inside
another. A window that lacks part of the answer is labelled like a question without an answer, with
the position of [CLS], in 1.1 too.

Answers: the answer is the span, in any window of the question, of at most --max-answer-length
tokens with the highest sum of start and end logit. If a token is in several windows, it may start a
span only in the window that has most context around it, as in the code of BERT's authors. All such
spans are searched, not only those of each window's 20 best starts and ends. The answer is the same
range of characters of the passage in the file; it is not rebuilt from tokens.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from megatron.data.tokenizer import BertTokenizer
from tasks.protocol import Example
from tasks.readers.inputs import Place, Ragged, Shape, encode, read_json

CURE = "a file as released, such as train-v1.1.json or dev-v2.0.json, would work"
MOST_MISPLACED = 0.01  # share of the answers; a file with more has been changed
NO_ANSWER = (-1, -1)
PER_TOKEN = 0.01  # bonus on the context of a token, per token of its window
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
    place: Place
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
    place = Place(f"{flag} {file}", CURE)
    passages: list[str] = []
    questions: list[Question] = []
    content = read_json(flag, file, CURE)
    for article_number, article in enumerate(place.take(content, "data", list), 1):
        in_article = place.at(f"article {article_number}")
        paragraphs = in_article.take(article, "paragraphs", list)
        for paragraph_number, paragraph in enumerate(paragraphs, 1):
            where = in_article.at(f"paragraph {paragraph_number}")
            passage = where.take(paragraph, "context", str)
            if not passage.strip():
                raise where.error(': its "context" is blank')
            for number, entry in enumerate(where.take(paragraph, "qas", list), 1):
                name = where.at(f"question {number}").take(entry, "id", str)
                named = place.at(f"question {name}")
                questions.append(_question(named, entry, passage, len(passages)))
            passages.append(passage)
    if not questions:
        raise place.error(" has no questions")
    name, count = Counter(each.id for each in questions).most_common(1)[0]
    if count > 1:
        raise place.error(f" has {count} questions {name}")
    squad = Squad(place, _version(place, questions), passages, questions)
    _check_places(squad, most_misplaced)
    return squad


def _question(place: Place, entry: Any, passage: str, number: int) -> Question:
    is_impossible = None
    if "is_impossible" in entry:
        is_impossible = place.take(entry, "is_impossible", bool)
    answers = []
    for each in place.take(entry, "answers", list):
        text = place.take(each, "text", str)
        given = place.take(each, "answer_start", int)
        if not text.strip():
            raise place.error(" has a blank answer")
        start = nearest(passage, text, given)
        answers.append(Answer(text, start, start not in (None, given)))
    # A question of 1.1 without answers would be scored as wrong for every prediction.
    if bool(is_impossible) == bool(answers):
        says = "says that it is impossible, and has" if answers else "is not impossible, and lacks"
        raise place.error(f" {says} answers")
    text = place.take(entry, "question", str)
    return Question(entry["id"], text, number, answers, is_impossible)


def nearest(passage: str, text: str, start: int) -> int | None:
    """Position of the text in the passage that is nearest to `start`; None if it has none."""
    start = min(max(start, 0), len(passage))
    found = passage.rfind(text, 0, start + len(text)), passage.find(text, start)
    return min((each for each in found if each >= 0), key=lambda at: abs(at - start), default=None)


def _version(place: Place, questions: Sequence[Question]) -> Version:
    with_mark = sum(each.is_impossible is not None for each in questions)
    if 0 < with_mark < len(questions):
        without = next(each.id for each in questions if each.is_impossible is None)
        raise place.error(
            f': {with_mark} of {len(questions)} questions have "is_impossible", as in 2.0, '
            f"and the others, such as {without}, have not, as in 1.1"
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
    message = f": {wrong} of {total} answers are not at their answer_start: {', '.join(parts)}"
    if wrong > most * total:
        raise squad.place.error(message)
    warnings.warn(f"{squad.place}{message}", stacklevel=3)


@dataclass(frozen=True)
class Passages:
    tokens: Ragged
    spans: NDArray[np.int32]  # [all tokens, 2], first and last + 1 character in the passage

    def spans_of(self, passage: int) -> NDArray[np.int32]:
        return self.spans[self.tokens.starts[passage] : self.tokens.starts[passage + 1]]

    def find(self, question: Question) -> tuple[int, int]:
        """First and last token that overlap the question's answer, the first of its answers that
        occurs in the passage; NO_ANSWER if there is none."""
        answer = question.placed
        if answer is None or answer.start is None:
            return NO_ANSWER
        starts, ends = self.spans_of(question.passage).T
        first = int(np.searchsorted(ends, answer.start, side="right"))
        after = int(np.searchsorted(starts, answer.start + len(answer.text), side="left"))
        return (first, after - 1) if first < after else NO_ANSWER


@dataclass(frozen=True)
class Windows(Sequence[Example]):
    """The windows of the questions, in order; each is made when it is requested."""

    squad: Squad
    questions: Sequence[Question]  # those that have windows
    asked: Ragged  # tokens of each question, uncut
    passages: Passages
    shape: Shape
    table: NDArray[np.int32]
    """[windows, 5]: question; first and last + 1 token of the window in the passage; first and last
    token of the answer in the passage, or NO_ANSWER."""
    firsts: NDArray[np.int64]  # [questions + 1], first window of each question

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Example:  # type: ignore[override]
        question, begin, end, first, last = self.table[number].tolist()
        passage = self.passages.tokens[self.questions[question].passage]
        sequence = self.shape.join(self.asked[question], passage[begin:end])
        shift = sequence.second - begin
        has_answer = (first, last) != NO_ANSWER
        return Example((sequence,), (first + shift, last + shift) if has_answer else (0, 0))

    def ahead(self, question: int) -> int:
        """Number of tokens before the passage in the question's sequences."""
        return self[int(self.firsts[question])].options[0].second

    @property
    def blank(self) -> list[str]:
        """Ids of the questions without tokens."""
        pairs = zip(self.questions, self.asked.lengths, strict=True)
        return [each.id for each, length in pairs if not length]

    @property
    def without_answer(self) -> int:
        """Number of windows labelled as without answer."""
        return int((self.table[:, 3] < 0).sum())

    @property
    def cut_answers(self) -> int:
        """Number of questions whose answer is in the passage, but not whole in any window."""
        held = np.zeros(len(self.questions), bool)
        held[self.table[self.table[:, 3] >= 0, 0]] = True
        pairs = zip(self.questions, held, strict=True)
        return sum(each.placed is not None and not is_held for each, is_held in pairs)


def make_windows(
    squad: Squad, tokenizer: BertTokenizer, shape: Shape, stride: int, *, training: bool
) -> Windows:
    """The windows of the file's questions, of at most shape.length tokens.

    training: leave out questions whose answers are not in their passages, or have no tokens there.
    Raises ValueError, naming the question, where a passage has no tokens.
    """
    passages = locate(squad.passages, tokenizer)
    kept = [(each, passages.find(each)) for each in squad.questions]
    if training:
        kept = [(each, span) for each, span in kept if span != NO_ANSWER or not each.answers]
    asked = encode([each.text for each, _ in kept], tokenizer)
    rows, firsts = [], [0]
    for number, (question, (first, last)) in enumerate(kept):
        size = len(passages.tokens[question.passage])
        if not size:
            raise ValueError(f"{squad.place}, question {question.id}: no word in its passage")
        _, room = shape.kept(int(asked.lengths[number]), shape.length)
        for begin, end in cut_passage(size, room, stride):
            span = (first, last) if begin <= first and last < end else NO_ANSWER
            rows.append((number, begin, end, *span))
        firsts.append(len(rows))
    table = np.array(rows, np.int32).reshape(-1, 5)
    questions = [each for each, _ in kept]
    return Windows(squad, questions, asked, passages, shape, table, np.array(firsts))


def locate(texts: Sequence[str], tokenizer: BertTokenizer) -> Passages:
    """The tokens of each text, and their characters in it."""
    ids, spans, counts = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)], [0]
    for text in texts:
        # As in `encode`: WordPiece would drop some white space, and so join two words.
        own, places = tokenizer.offsets(re.sub(r"\s", " ", text))
        ids.append(np.array(own, np.int32))
        spans.append(np.array(places, np.int32).reshape(-1, 2))
        counts.append(len(own))
    return Passages(Ragged(np.concatenate(ids), np.cumsum(counts)), np.concatenate(spans))


def cut_passage(size: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) token of each window of a passage of `size` tokens.

    room: tokens per window; stride: distance between the starts of windows, at most room.
    """
    step = min(room, stride)
    for begin in range(0, max(size - room, 0) + step, step):
        yield begin, min(begin + room, size)


@dataclass(frozen=True)
class Answers:
    texts: Sequence[str]  # one answer per question, none of them empty
    odds: NDArray[np.float64]  # [questions], see read_answers


def read_answers(windows: Windows, logits: Sequence[NDArray[np.floating]], longest: int) -> Answers:
    """logits: one array per window, [its tokens, 2]; longest: most tokens of an answer.

    The odds of no answer are the lowest sum of the two logits of [CLS] in any window, minus the sum
    of the answer's two logits.
    """
    texts, odds = [], []
    for number, question in enumerate(windows.questions):
        own = range(*windows.firsts[number : number + 2].tolist())
        table, ahead = windows.table[own.start : own.stop, 1:3], windows.ahead(number)
        found = []
        for window, (begin, end), may_start in zip(own, table, best_contexts(table), strict=True):
            starts, ends = logits[window][ahead : ahead + end - begin].astype(np.float64).T
            sum_, first, last = best_span(np.where(may_start, starts, -np.inf), ends, longest)
            found.append((sum_, begin + first, begin + last))
        best, first, last = max(found, key=lambda each: each[0])
        null = min(float(logits[window][0].astype(np.float64).sum()) for window in own)
        passage = question.passage
        spans = windows.passages.spans_of(passage)
        texts.append(windows.squad.passages[passage][spans[first, 0] : spans[last, 1]])
        odds.append(null - best)
    return Answers(texts, np.array(odds))


def best_contexts(table: NDArray[np.integer]) -> list[NDArray[np.bool_]]:
    """For each window, a mask of its tokens that have no better context in another window. Context
    is the number of tokens on the shorter side. table: [windows, 2], first and last + 1 token."""
    begins, ends = table[:, :1], table[:, 1:]
    places = np.arange(ends.max())
    context = np.minimum(places - begins, ends - 1 - places) + PER_TOKEN * (ends - begins)
    inside = (places >= begins) & (places < ends)
    best = np.where(inside, context, -np.inf).argmax(axis=0)
    return [best[begin:end] == number for number, (begin, end) in enumerate(table)]


def best_span(
    starts: NDArray[np.float64], ends: NDArray[np.float64], longest: int
) -> tuple[float, int, int]:
    """(sum, first, last) of the span [first, last] of at most `longest` tokens with the highest sum
    of logits. starts, ends: logits, [n]."""
    padded = np.append(ends, np.full(longest - 1, -np.inf))
    sums = starts[:, None] + sliding_window_view(padded, longest)  # [n, tokens after the first]
    first, more = divmod(int(sums.argmax()), longest)
    return float(sums[first, more]), first, first + more
