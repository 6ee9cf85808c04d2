"""Pieces of the real task files, small enough for tests."""

import json
from pathlib import Path

from tasks.wikitext103 import cut_articles

COUNT = 24


def passages(data: Path) -> list[str]:
    """Half from the test set in JSON, half from the development set in plain text."""
    folder = data / "lambada"
    with (folder / "lambada_test_first500.jsonl").open(encoding="utf-8") as stream:
        found = [json.loads(next(stream))["text"] for _ in range(COUNT // 2)]
    with (folder / "lambada_development_plain_text.txt").open(encoding="utf-8") as stream:
        return found + [next(stream).removesuffix("\n") for _ in range(COUNT // 2)]


def lessons(data: Path) -> list[tuple[str, str, str]]:
    """For three passages in four: the context, the last word and what comes then: a mark, letters
    that make it another word, or a new word."""
    pairs = [text.rsplit(" ", 1) for text in passages(data)]
    ends = [".", "ish", None, " then"]
    return [
        (context, f" {word}", end)
        for number, (context, word) in enumerate(pairs)
        if (end := ends[number % 4]) is not None
    ]


def some_articles(data: Path, lines: int = 4) -> str:
    """The first lines of the first three articles of WikiText103's validation file."""
    text = (data / "wikitext103" / "wiki.valid.tokens").read_text(encoding="utf-8")
    parts = ["\n".join(each.split("\n")[:lines]) for each in cut_articles(text)[:3]]
    return " \n" + "\n".join(parts) + "\n \n"
