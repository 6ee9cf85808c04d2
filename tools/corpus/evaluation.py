"""Evaluation files as sets of n-grams that a training corpus should not contain.

An evaluation set is a file, identified by its name, and consists of passages; no n-gram spans two
passages, or an <unk>.

    WikiText (has ` = Title = ` headings)   an article is a passage
    JSON, or JSON lines                     an object's "text", or else each string anywhere in it
                                            that is more than one word (so no ids and labels)
    other text, such as LAMBADA's           a passage lies between blank lines; without any, each
                                            line is a passage

Words have no punctuation (tools.corpus.ngrams), so text tokenised like WikiText's and LAMBADA's
(` @-@ `, ` , `, ``` `` ```) matches running text; only "was n't" has to become "wasn't" first.

A passage of fewer than n words, or without n words between two <unk>, is counted and not searched
for.  GPT-3 searched for such passages as a whole, which also finds stock phrases such as "which of
the following is true according to the passage".
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UsageError
from megatron.libraries import Library
from tools.corpus.ngrams import Hashes, Indices, NgramSet, hash_ngrams, split_words

orjson = Library("orjson")

UNKNOWN = "<unk>"
HEADING = re.compile(r"^ ?= (?!= )(.+) = ?$", re.MULTILINE)
SPLIT_NEGATION = re.compile(r"(?<=\w) (?=n't\b)", re.IGNORECASE)
ESCAPE = re.compile(r" @([-,.])@ ")
WHITE_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation file; its n-grams are numbers in the NgramSets of all files."""

    name: str
    passages: int
    not_searched: int
    """Passages without an n-gram."""
    words: int
    ids: Indices
    """The distinct n-grams to cut at."""
    leak_ids: Indices
    """The distinct n-grams of the leakage table."""
    leak_counts: Indices
    """How often each of them occurs."""

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passages": self.passages,
            "not_searched": self.not_searched,
            "words": self.words,
            "distinct_ngrams": len(self.ids),
        }

    def leakage(self, found: NDArray[np.bool_]) -> tuple[float, float]:
        """Share of its n-grams that were found: (of all, of the distinct ones)."""
        mine = found[self.leak_ids]
        if not len(mine):
            return 0.0, 0.0
        return float(self.leak_counts[mine].sum() / self.leak_counts.sum()), float(mine.mean())


@dataclass(frozen=True)
class Evaluation:
    sets: tuple[EvaluationSet, ...]
    cut: NgramSet
    """The n-grams to cut at."""
    leak: NgramSet
    """The n-grams of the leakage table."""
    titles: frozenset[str]
    """Titles of articles, normalised."""
    unknown_titles: int
    """Number of titles with <unk>, which cannot be compared."""


def load_evaluation(
    files: Sequence[Path], titles: Sequence[Path], ngram: int, leakage_ngram: int
) -> Evaluation:
    """Read these files, once per worker.  Raises UsageError.

    titles: further files from which titles are taken, WikiText or one title per line.
    """
    names = [path.name for path in files]
    for path in files:
        if names.count(path.name) > 1:
            raise UsageError("--evaluation", path, "of a name that no other file has")
    given = [("--evaluation", path) for path in files] + [("--titles", path) for path in titles]
    for flag, path in given:
        if not path.is_file():
            raise UsageError(flag, path, "a file")
    states = [path.stat() for _, path in given]
    stamps = tuple((state.st_size, state.st_mtime_ns) for state in states)
    return _load(tuple(files), tuple(titles), ngram, leakage_ngram, stamps)


@functools.lru_cache(maxsize=1)
def _load(
    files: tuple[Path, ...],
    title_files: tuple[Path, ...],
    ngram: int,
    leakage_ngram: int,
    stamps: tuple[tuple[int, int], ...],
) -> Evaluation:
    del stamps  # part of the cache's key, so that changed files are read again
    words = []  # of each file, passage and part between <unk>
    for path in files:
        words.append([hash_passage(passage) for passage in read_passages(path)])
        if not any(len(part) for passage in words[-1] for part in passage):
            raise UsageError("--evaluation", path, "a file with words in it")
    to_cut = [_ngrams(passages, ngram) for passages in words]
    to_count = [_ngrams(passages, leakage_ngram) for passages in words]
    cut = NgramSet(ngram, np.concatenate([each for found in to_cut for each in found]))
    leak = NgramSet(leakage_ngram, np.concatenate([each for found in to_count for each in found]))
    sets = []
    for path, passages, cuts, counts in zip(files, words, to_cut, to_count, strict=True):
        leak_ids, leak_counts = np.unique(leak.ids(np.concatenate(counts)), return_counts=True)
        sets.append(
            EvaluationSet(
                path.name,
                passages=len(passages),
                not_searched=sum(not len(each) for each in cuts),
                words=sum(len(part) for passage in passages for part in passage),
                ids=np.unique(cut.ids(np.concatenate(cuts))),
                leak_ids=leak_ids,
                leak_counts=leak_counts,
            )
        )
    titles = [title for path in files for title in HEADING.findall(_read("--evaluation", path))]
    for path in title_files:
        text = _read("--titles", path)
        titles += HEADING.findall(text) or [line for line in text.split("\n") if line.strip()]
    return Evaluation(
        tuple(sets),
        cut,
        leak,
        frozenset(normalise_title(title) for title in titles if UNKNOWN not in title),
        sum(UNKNOWN in title for title in titles),
    )


def _ngrams(passages: Sequence[Sequence[Hashes]], n: int) -> list[Hashes]:
    """Hashes of the n-grams of each passage; equal ones repeat."""
    return [np.concatenate([hash_ngrams(part, n) for part in parts]) for parts in passages]


def hash_passage(passage: str) -> list[Hashes]:
    """The hashes of the words of every part between <unk>."""
    running = SPLIT_NEGATION.sub("", passage)
    return [split_words(part).hashes for part in running.split(UNKNOWN)]


def read_passages(path: Path) -> list[str]:
    text = _read("--evaluation", path)
    if path.suffix in (".json", ".jsonl") or text.lstrip()[:2] == '{"':
        return [each for value in _parse(path, text) for each in _strings(value)]
    if HEADING.search(text):
        passages = re.split(r"^(?= ?= (?!= ).+ = ?$)", text, flags=re.MULTILINE)
    else:
        passages = re.split(r"\n\s*\n", text.strip())
        if len(passages) == 1:
            passages = text.split("\n")
    return [passage for passage in passages if passage.strip()]


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(flag, path, f"UTF-8, and byte {error.start} is not") from None


def _parse(path: Path, text: str) -> Iterator[Any]:
    """The values of a JSON file, or of its lines."""
    try:
        yield orjson.loads(text)
        return
    except ValueError:  # several lines
        pass
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                yield orjson.loads(line)
        except ValueError as error:
            allowed = f"JSON, or lines of JSON, and line {number} is not: {error}"
            raise UsageError("--evaluation", path, allowed) from None


def _strings(value: Any) -> Iterator[str]:
    """The passages in a JSON value."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        yield from _strings(value["text"])
    elif isinstance(value, str):
        if len(value.split()) > 1:
            yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def normalise_title(title: str) -> str:
    """The title without case, white space and WikiText's escapes: the same for
    "M @-@ 82 ( Michigan highway )" and "M-82 (Michigan highway)"."""
    return WHITE_SPACE.sub("", ESCAPE.sub(r"\1", title)).casefold()
