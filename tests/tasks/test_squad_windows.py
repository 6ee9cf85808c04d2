"""SQuAD's windows and answers: labels, and what is read back from logits, in the same places."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.tokenizer import read_tokenizer
from tasks.readers.inputs import Shape, shape_of
from tasks.readers.squad_files import Squad, read_squad
from tasks.readers.squad_scorer import figures, mark, unanswered
from tasks.readers.squad_windows import (
    Windows,
    best_contexts,
    best_span,
    cut_passage,
    make_windows,
    read_answers,
)
from tests.tasks.squads import PASSAGE, TOKENIZER, question, write_squad, write_v2


def shape(length: int, first: int = 8) -> Shape:
    return shape_of(TOKENIZER, length, cut="second", first=first)


def read(tmp_path: Path, *questions: dict[str, Any], passage: str = PASSAGE) -> Squad:
    file = write_squad(tmp_path / "dev.json", *questions, passage=passage)
    return read_squad("--valid-data", file)


def texts(windows: Windows) -> list[tuple[str, str]]:
    """For each window the words of its part of the passage and of its label."""
    found = []
    for example in windows:
        (sequence,), (first, last) = example.options, example.label
        part = sequence.tokens[sequence.second : -1].tolist()
        found.append((TOKENIZER.decode(part), TOKENIZER.decode(sequence.tokens[first : last + 1])))
    return found


@pytest.mark.parametrize(
    ("size", "room", "stride", "expected"),
    [
        (4, 4, 2, [(0, 4)]), (5, 4, 2, [(0, 4), (2, 5)]), (6, 4, 2, [(0, 4), (2, 6)]),
        (7, 4, 2, [(0, 4), (2, 6), (4, 7)]), (9, 4, 8, [(0, 4), (4, 8), (8, 9)]),
        (1, 4, 2, [(0, 1)]),
    ],
)  # fmt: skip
def test_windows_start_a_stride_apart_and_the_last_ends_the_passage(
    size: int, room: int, stride: int, expected: list[tuple[int, int]]
) -> None:
    assert list(cut_passage(size, room, stride)) == expected


# "been" and "is" are spelt by letters: an answer that cuts a word has the letters it has. One
# within a token is labelled with all of it. White space of any kind parts words.
@pytest.mark.parametrize(
    ("passage", "answer", "start", "labelled", "read_back"),
    [
        (PASSAGE, "Spain", 12, "spain", "Spain"),
        (PASSAGE, "lain", 39, "plain", "plain"),
        ("been Is. it", "ee", 1, "##ee", "ee"),
        ("been Is. it", "been Is", 0, "been is", "been Is"),
        ("been Is. it", "s.", 6, "##s.", "s."),
        ("rain\vin\x85\tSpain", "Spain", 9, "spain", "Spain"),
        ("(É,  Rain`s\vÎn) SPAIN\u200b does", "Rain`s\vÎn", 5, "rain [UNK] s in", "Rain`s\vÎn"),
    ],
)
def test_a_sequence_is_question_and_window_and_answers_are_as_the_passage_has_them(
    tmp_path: Path, passage: str, answer: str, start: int, labelled: str, read_back: str
) -> None:
    squad = read(tmp_path, question("q", {answer: start}), passage=passage)
    windows = make_windows(squad, TOKENIZER, shape(64), 8, training=True)
    (example,) = windows
    (sequence,), (first, last) = example.options, example.label
    cls, sep, encode = TOKENIZER.cls, TOKENIZER.sep, TOKENIZER.encode
    asked, own = encode("where does it stay?"), encode(" ".join(passage.split()))
    assert sequence.tokens.tolist() == [cls, *asked, sep, *own, sep]
    assert (sequence.tokens.dtype, sequence.second) == (np.int32, len(asked) + 2)
    found = TOKENIZER.decode(sequence.tokens[first : last + 1])
    assert found == labelled
    assert read_answers(windows, [perfect(example)], 30).texts == [read_back]


def perfect(example: Any) -> NDArray[np.float32]:
    """Logits of a model that knows the label."""
    logits = np.zeros((len(example.options[0].tokens), 2), np.float32)
    logits[example.label, (0, 1)] = 1
    return logits


def test_windows_are_labelled_with_the_answer_that_they_have_whole(tmp_path: Path) -> None:
    squad = read(tmp_path, question("q", {"Spain stays": 12}))
    windows = make_windows(squad, TOKENIZER, shape(12), 2, training=True)
    assert texts(windows) == [
        ("the rain in spain", "[CLS]"),
        ("in spain stays mainly", "spain stays"),
        ("stays mainly in the", "[CLS]"),
        ("in the plain.", "[CLS]"),
    ]
    assert windows.without_answer == 3
    assert windows.cut_answers == 0


def test_what_cannot_be_labelled_is_not_trained_on_and_is_counted(tmp_path: Path) -> None:
    questions = [question(f"q{number}", {"Spain": 12}) for number in range(99)]
    passage = PASSAGE + " \u200b"
    lost = question("lost", {"snow": 3})
    file = write_squad(tmp_path / "dev.json", *questions, lost, passage=passage)
    with pytest.warns(UserWarning, match="--train-data"):
        squad = read_squad("--train-data", file)
    assert squad.lost == ["lost"]
    some = {training: make_windows(squad, TOKENIZER, shape(64), 8, training=training)
            for training in (True, False)}  # fmt: skip
    assert [each.id for each in some[True].questions] == [each["id"] for each in questions]
    assert len(some[False].questions) == 100
    assert some[False][99].label == (0, 0)
    nothing = read(tmp_path, question("blank", {"\u200b": len(PASSAGE) + 1}), passage=passage)
    assert not make_windows(nothing, TOKENIZER, shape(64), 8, training=True).questions


def test_cut_questions_and_cut_answers_are_counted(tmp_path: Path) -> None:
    squad = read(tmp_path, question("q", {"in Spain stays": 9}), question("r", {"The": 0}))
    windows = make_windows(squad, TOKENIZER, shape(8, first=2), 9, training=True)
    assert texts(windows)[:2] == [
        ("the rain in", "[CLS]"),
        ("spain stays mainly", "[CLS]"),
    ]
    assert windows.truncated == 2
    assert windows.cut_answers == 1
    assert all(len(each.options[0].tokens) <= 8 for each in windows)


def spans(windows: Windows, logits: list[NDArray[Any]], number: int, longest: int) -> Iterator[Any]:
    """(score, text) of every span of a question that counts, one after another."""
    own = [row for row in range(len(windows)) if windows.table[row, 0] == number]
    asked = windows.questions[number]
    offsets = windows.passages.spans_of(asked.passage)
    passage = windows.squad.passages[asked.passage]
    bounds = [windows.table[row, 1:3].tolist() for row in own]

    def context(token: int, begin: int, end: int) -> float:
        return min(token - begin, end - 1 - token) + 0.01 * (end - begin)

    for row, (begin, end) in zip(own, bounds, strict=True):
        ahead = windows[row].options[0].second
        for first in range(begin, end):
            best = max(context(first, *each) for each in bounds if each[0] <= first < each[1])
            if context(first, begin, end) == best:
                for last in range(first, min(end, first + longest)):
                    score = (
                        logits[row][ahead + first - begin, 0] + logits[row][ahead + last - begin, 1]
                    )
                    yield score, passage[offsets[first, 0] : offsets[last, 1]]


def test_answers_are_the_best_of_all_spans(tmp_path: Path) -> None:
    squad = read_squad("--valid-data", write_v2(tmp_path / "dev.json"))
    windows = make_windows(squad, TOKENIZER, shape(12), 2, training=False)
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(20):
        logits = [rng.normal(size=(len(each.options[0].tokens), 2)) for each in windows]
        found = read_answers(windows, logits, 3)
        for number, (text, odds) in enumerate(zip(found.texts, found.odds, strict=True)):
            score, expected = max(spans(windows, logits, number, 3))
            rows = windows.table[:, 0] == number
            null = min(sum(logits[row][0]) for row in np.flatnonzero(rows))
            assert text == expected
            assert odds == pytest.approx(null - score)
            seen.add(len(text.split()))
    assert seen == {1, 2, 3}


def test_a_token_counts_where_its_context_is_best() -> None:
    table = np.array([[0, 6], [2, 8], [4, 9]])
    allowed = best_contexts(table)
    # Token 3 has 2 tokens behind it in the first window, and 1 before it in the second.
    assert [np.flatnonzero(each).tolist() for each in allowed] == [[0, 1, 2, 3], [2, 3], [2, 3, 4]]
    # Token 3 has 1 token at its poorer side in both, and the second window is the longer one.
    allowed = best_contexts(np.array([[0, 5], [2, 10]]))
    assert [np.flatnonzero(each).tolist() for each in allowed] == [[0, 1, 2], [1, 2, 3, 4, 5, 6, 7]]
    # A long window has no say in the tokens behind its end.
    assert best_contexts(np.array([[0, 300], [290, 302]]))[1][-2:].all()


def test_the_best_span_ends_where_it_starts_or_behind() -> None:
    starts, ends = np.array([0.0, 5, 0, 0]), np.array([9.0, 1, 0, 3])
    assert best_span(starts, ends, 4) == (9, 0, 0)
    assert best_span(starts, ends - [9, 0, 0, 0], 4) == (8, 1, 3)
    assert best_span(starts, ends - [9, 0, 0, 0], 2) == (6, 1, 1)
    assert best_span(starts, ends - [9, 0, 0, 0], 99) == (8, 1, 3)


@pytest.mark.parametrize(
    ("length", "stride", "longest", "right"),
    # Six answers have more than 30 tokens; nothing else is lost.
    [(384, 128, 60, 2910), (96, 32, 30, 2904)],
)
def test_perfect_logits_of_real_questions_are_read_back(
    test_data: Path, length: int, stride: int, longest: int, right: int
) -> None:
    tokenizer = read_tokenizer("BertWordPieceLowerCase", test_data / "bert")
    squad = read_squad("--valid-data", test_data / "squad" / "cs224n_dev-v2.0.json")
    windows = make_windows(squad, tokenizer, shape(length, 40), stride, training=True)
    assert len(windows.questions) == len(squad.questions)
    assert windows.truncated == windows.cut_answers == 0
    logits = [perfect(each) for each in windows]
    assert max(map(len, logits)) <= length
    found = read_answers(windows, logits, longest)
    ids = [each.id for each in squad.questions]
    marks = mark(squad, dict(zip(ids, found.texts, strict=True)))
    score = figures(squad, unanswered(squad, marks, found.odds > 0))
    assert score["no_answer_exact_match"] == 100
    assert score["has_answer_exact_match"] == pytest.approx(100 * right / 2910)
