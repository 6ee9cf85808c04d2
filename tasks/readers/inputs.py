"""Input of the tasks: whole files, pairs of texts as BERT reads them, and checks of both.

Errors name the flag, the file and what would work instead. The checks are against input that would
silently train or measure something other than intended: each returns its counts, for the record,
warns where a count is higher than in good data, and raises ValueError where it is far higher.
"""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.bert import SPECIAL, lengths_kept
from megatron.data.text_checks import count_casing, judge_casing, judge_unknown
from megatron.data.tokenizer import BertTokenizer, BertWordPieceLowerCase
from megatron.errors import UsageError
from tasks.protocol import ChecksConfig, Encoding, Example

MARK = codecs.BOM_UTF8.decode()
ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ")  # first bytes of zip, gzip and xz files
KINDS = {str: "a text", list: "a list", int: "a number", bool: "true or false"}
AT_ONCE = 4096  # texts; the library holds some hundred bytes for each of their tokens
# RACE cut at the paper's 512 tokens has to pass: 7 % of its sequences are longer, and 10 % of
# those of the high schools. At 384 tokens it would be 42 %.
WARN_TRUNCATED = 0.05
# For questions, whose end matters more than that of a passage. In RACE's development set no
# question with its option has over 48 tokens (the paper keeps 128); in SQuAD's none has over 64.
WARN_CUT_QUESTIONS = 0.01


def read_utf8(flag: str, file: Path, cure: str) -> str:
    """The text of a file, with a byte-order mark if it has one.

    Raises OSError where there is no such file, ValueError where it is empty, an archive or not
    UTF-8; the message names flag, file and line, and ends in `cure`, which says what would work.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{flag} {file} is a folder; {cure}")
    if not file.is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file; {cure}")
    content = file.read_bytes()
    if content.startswith(ARCHIVES):
        raise ValueError(f"{flag} {file} is an archive; unpack it: {cure}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{flag} {file}, line {line}, is not UTF-8; {cure}") from error
    if not text.removeprefix(MARK).strip():
        raise ValueError(f"{flag} {file} is empty; {cure}")
    return text


def read_marked(flag: str, file: Path, cure: str) -> str:
    """The text of a file, without a byte-order mark."""
    return read_utf8(flag, file, cure).removeprefix(MARK)


def read_text(flag: str, file: Path, cure: str) -> str:
    """The text of a file that a model reads as it is. Raises ValueError, too, where an editor has
    added a byte-order mark or carriage returns, which the model would read."""
    text = read_utf8(flag, file, cure)
    for mark, what in ((MARK, "a byte-order mark"), ("\r\n", "a carriage return")):
        if mark in text:
            line = text.count("\n", 0, text.index(mark)) + 1
            raise ValueError(f"{flag} {file}, line {line}, has {what}; {cure}")
    return text


def read_json(flag: str, file: Path, cure: str) -> Any:
    """Contents of a JSON file."""
    try:
        return json.loads(read_marked(flag, file, cure))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {file} is not JSON ({error}); {cure}") from error


@dataclass(frozen=True)
class Place:
    """Where in the input something is, for messages: flag and file, and the place in the file."""

    text: str
    cure: str  # what would work

    def __str__(self) -> str:
        return self.text

    def at(self, inside: str) -> Place:
        return Place(f"{self.text}, {inside}", self.cure)

    def error(self, problem: str) -> ValueError:
        """problem: what follows the place in the message, such as " has no questions"."""
        return ValueError(f"{self.text}{problem}; {self.cure}")

    def take(self, entry: Any, key: str, kind: type) -> Any:
        """entry[key]; raises ValueError unless it is of this kind."""
        value = entry.get(key) if isinstance(entry, dict) else None
        if type(value) is not kind:
            raise self.error(f' has no "{key}" that is {KINDS[kind]}')
        return value


@dataclass(frozen=True)
class Ragged:
    """Rows of tokens of different lengths, concatenated."""

    tokens: NDArray[np.int32]  # [all]
    starts: NDArray[np.int64]  # [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows]"""
        return np.diff(self.starts)


def encode(texts: Sequence[str], tokenizer: BertTokenizer) -> Ragged:
    """The tokens of each text, without special tokens.

    Runs of white space become one blank, as in WordPiece. Control characters that are white space
    (a vertical tab, say) become one, too: WordPiece would drop them and so join two words.
    """
    parts, counts = [], [np.zeros(1, np.int64)]
    for start in range(0, len(texts), AT_ONCE):
        clean = [" ".join(text.split()) for text in texts[start : start + AT_ONCE]]
        tokens, lengths = tokenizer.encode_arrays(clean)
        parts.append(tokens.astype(np.int32))
        counts.append(lengths.astype(np.int64))
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return Ragged(joined, np.concatenate(counts).cumsum())


@dataclass(frozen=True)
class Shape:
    """How two texts become one sequence of at most `length` tokens.

    cut, for a pair that is too long: "longest" removes tokens from the end of the longer text (the
    second one if both are equally long) until both fit, as BERT does; "second" removes them only
    from the end of the second text. first: most tokens kept of the first text, in every pair.
    """

    cls: int
    sep: int
    length: int
    cut: Literal["longest", "second"] = "longest"
    first: int | None = None

    def __post_init__(self) -> None:
        most = self.length if self.cut == "longest" else self.first
        assert most is not None
        assert self.length >= SPECIAL
        assert self.cut == "longest" or most + SPECIAL < self.length, "no room for the second text"

    def kept(self, first: int, second: int) -> tuple[int, int]:
        """How many tokens are kept of two texts of these lengths."""
        first = first if self.first is None else min(first, self.first)
        room = self.length - SPECIAL
        if self.cut == "longest":
            return lengths_kept(first, second, room)
        return first, min(second, room - first)

    def join(self, first: NDArray[np.int32], second: NDArray[np.int32]) -> Encoding:
        """The joined sequence; its tokens are int32."""
        a, b = self.kept(len(first), len(second))
        tokens = np.empty(a + b + SPECIAL, np.int32)
        tokens[0], tokens[a + 1], tokens[-1] = self.cls, self.sep, self.sep
        tokens[1 : a + 1], tokens[a + 2 : -1] = first[:a], second[:b]
        return Encoding(tokens, a + 2)


def shape_of(tokenizer: BertTokenizer, length: int, **more: Any) -> Shape:
    return Shape(tokenizer.cls, tokenizer.sep, length, **more)


@dataclass(frozen=True)
class PairExamples(Sequence[Example]):
    """Examples of a classifier: pair k is first[k] and second[k], and its class is classes[k]."""

    first: Ragged
    second: Ragged
    classes: NDArray[np.int64]  # [pairs]
    shape: Shape

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, number: int) -> Example:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        sequence = self.shape.join(self.first[number], self.second[number])
        return Example((sequence,), (int(self.classes[number]),))

    @property
    def whole(self) -> NDArray[np.int64]:
        """[pairs], the lengths of the sequences before cutting."""
        return self.first.lengths + self.second.lengths + SPECIAL


@dataclass(frozen=True)
class InputChecks:
    """The checks of a task's sequences."""

    config: ChecksConfig
    tokenizer: BertTokenizer
    seq_length: int
    positions: int  # the model's number of positions

    def check(
        self, place: str, texts: Iterable[str], tokens: NDArray[Any], lengths: NDArray[Any]
    ) -> dict[str, Any]:
        """place: flag and file, for messages; texts: the texts in the sequences; tokens: the tokens
        of these texts; lengths: [N], lengths of the sequences before cutting."""
        config = self.config
        return {
            **check_casing(place, texts, self.tokenizer, config.allow_lower_case),
            **check_unknown(place, tokens, self.tokenizer, config.max_unknown),
            **check_truncation(
                place, lengths, self.seq_length, self.positions, config.max_truncated
            ),
        }


def check_truncation(
    place: str, lengths: NDArray[Any], seq_length: int, positions: int, most: float
) -> dict[str, Any]:
    """lengths: [N], lengths of the sequences before cutting; positions: the model's number of
    positions; most: --max-truncated; place: flag and file, for the message."""
    limit = ("--seq-length", seq_length, positions)
    return {
        "sequences": len(lengths),
        "truncated": check_cut(place, "sequences", lengths, limit, WARN_TRUNCATED, most),
        "longest": int(lengths.max()),
        "mean_length": round(float(lengths.mean()), 1),
    }


def check_cut(
    place: str,
    kind: str,
    lengths: NDArray[Any],
    limit: tuple[str, int, int],
    warn_above: float,
    most: float,
) -> int:
    """How many are longer than the limit, and cut. Warns if their share is above `warn_above`;
    raises ValueError if it is above `most`, which is --max-truncated.

    kind: what is cut; lengths: [N], before cutting; limit: (flag, its value, its highest value).
    """
    name, value, highest = limit
    count, longest = int((lengths > value).sum()), int(lengths.max(initial=0))
    share = count / max(1, len(lengths))
    message = (
        f"{place}: {count} of {len(lengths)} {kind} ({share:.1%}) are longer than {name} {value} "
        "and lose their end"
    )
    cure = f"{name} can be at most {highest}"
    if value < highest:
        better = min(longest, highest)
        left = int((lengths > better).sum())
        cure = f"{name} {better} would cut {left or 'none'}"
    if share > most:
        allowed = f"--max-truncated {np.ceil(100 * share) / 100:.2f} would let them be cut"
        raise ValueError(f"{message}; {cure}, or {allowed}")
    if share > warn_above:
        warnings.warn(f"{message}; {cure}", stacklevel=3)
    return count


def check_unknown(
    place: str, tokens: NDArray[Any], tokenizer: BertTokenizer, most: float
) -> dict[str, int]:
    """tokens: the ids of all texts, without special tokens; most: --max-unknown."""
    count = int((tokens == tokenizer.unknown).sum())
    works = "a model of this language or script"
    if message := judge_unknown(place, count, len(tokens), most, works):
        warnings.warn(message, stacklevel=2)
    return {"tokens": len(tokens), "unknown_tokens": count}


def check_casing(
    place: str, texts: Iterable[str], tokenizer: BertTokenizer, allow: bool
) -> dict[str, int]:
    """Check that text for a vocabulary with capitals has some. allow: --allow-lower-case."""
    casing = count_casing(texts)
    works = f"a model of {BertWordPieceLowerCase.kind}"
    if message := judge_casing(place, casing, tokenizer, allow=allow, works=works):
        warnings.warn(message, stacklevel=2)
    return {"texts_with_letters": casing.texts, "texts_with_capitals": casing.with_capitals}


def check_apart(train: Sequence[Path], valid: Sequence[Path]) -> None:
    """Raise UsageError if a path is given twice; warn of data in both training and evaluation."""
    for name, paths in (("--train-data", train), ("--valid-data", valid)):
        once = {path.resolve(): path for path in paths}
        if len(once) < len(paths):
            works = (name, *map(str, once.values()))
            raise UsageError(name, " ".join(map(str, paths)), "different paths", works=works)
    for path in {each.resolve() for each in train} & {each.resolve() for each in valid}:
        warnings.warn(
            f"--valid-data {path} is trained on as well: its figures say what the model has "
            "learned by heart",
            stacklevel=2,
        )


def majority(right: NDArray[np.int64]) -> float:
    """Share of the most frequent class: the accuracy of always predicting it."""
    return float(np.bincount(right).max() / len(right))
