"""Sentence splitting: cases, and no character lost."""

import random
from pathlib import Path

import pytest

from tests.tools.corpus.lines import read_jsonl
from tests.tools.corpus.tokenize.test_encoders import fuzz
from tools.corpus.tokenize import encode as sentences
from tools.corpus.tokenize.encode import LONGEST, split_sentences
from tools.corpus.tokenize.encoders import PROBES

MARKS = [
    *".?!\"'()*-/Ab\x00\u00e9\u6f22\u3002\u200b\u2028\u00bb\u00ab\u201c\u201d\u2018\u2019\u2014",
    "[1]", "1.", "a)", "...", "\u2026", "Mr.", "e.g.", "U.S.", "\U0001f600", "ii.", "No.", "?!",
    "http://a.b", "3.5",
]  # fmt: skip


def check(text: str) -> list[str]:
    """That each character but white space is in one sentence, in order."""
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(each and each == each.strip() for each in found)
    assert not any("\n" in each for each in found)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Hale met J. R. Keller. They spoke.", ["Dr. Hale met J. R. Keller.", "They spoke."]),
        ("It is 3.14 e.g. here. So.", ["It is 3.14 e.g. here.", "So."]),
        ('"Stop!" cried the guard. He ran.', ['"Stop!" cried the guard.', "He ran."]),
        ("A title\n\n  A line \r\nanother\u2028last", ["A title", "A line", "another", "last"]),
        ("no end", ["no end"]),
        (" \n\t\u3000", []),
        ("", []),
    ],
)
def test_sentences_by_hand(text: str, expected: list[str]) -> None:
    assert check(text) == expected


def test_odd_text_loses_nothing() -> None:
    draw = random.Random(1)
    pieces = [*MARKS, " ", "\t", "\n"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 40))) for _ in range(5000)]
    for text in [*PROBES, *fuzz(3, 3000), *texts]:
        check(text)


def test_real_text_loses_nothing(test_data: Path) -> None:
    web = read_jsonl(test_data / "neardup" / "c4_sample.jsonl.gz")
    found = sum(len(check(record["text"])) for record in web)
    found += len(check((test_data / "wikitext103" / "wiki.valid.tokens").read_text("utf-8")))
    assert 20_000 < found < 40_000


@pytest.mark.parametrize("unit", ["\u6f22\u5b57\u3002", "\u201ca b. ", "x", ". "])
def test_a_long_line_is_looked_at_in_parts(unit: str) -> None:
    """100,000 characters of each kind, at which the library would work for minutes."""
    found = check(unit * (100_000 // len(unit)))
    assert max(map(len, found)) <= LONGEST


def test_the_last_sentence_of_a_part_goes_on_in_the_next() -> None:
    text = "This is the sentence of the day. " * (3 * LONGEST // 33)
    assert set(check(text)) == {"This is the sentence of the day."}


@pytest.mark.parametrize("blank", [" ", "\t", "\u3000"])
def test_a_sentence_longer_than_a_part_is_cut_between_words(blank: str) -> None:
    words = [f"word{number}" for number in range(LONGEST)]
    found = check(blank.join(words))
    assert [word for piece in found for word in piece.split()] == words
    assert all(LONGEST - 20 < len(piece) <= LONGEST for piece in found[:-1])
    assert list(map(len, check("a " + "x" * 2 * LONGEST))) == [1, LONGEST, LONGEST]


def test_a_library_that_loses_text_does_not_lose_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    library = sentences.sentencex
    monkeypatch.setattr(library, "segment", lambda _, text: [text[:3], text[4:]])
    assert check("One. Two.") == ["One. Two."]
