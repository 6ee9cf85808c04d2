"""Two texts as BERT reads them, [CLS] first [SEP] second [SEP], of many in little memory.

A text is encoded once and its pairs are put together when they are asked for: the passages of
RACE, each of which is read with some fourteen answers, so take 70 MB in place of 600.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.pairs import SPECIAL, lengths_kept
from megatron.data.tokenizer import BertTokenizer
from tasks.protocol import Encoding, Example

AT_ONCE = 4096  # texts; the library holds some hundred bytes for each of their tokens


@dataclass(frozen=True)
class Ragged:
    """Rows of tokens, one after another."""

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
    """The tokens of each text, without special ones.

    Runs of white space count as one blank, as WordPiece takes them, and so do the control
    characters among them (a vertical tab, say), which it would drop and so join two words.
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

    cut, of a pair that is too long: "longest" takes tokens off the end of the longer text until
    both fit, and of equally long ones off the second, as BERT does; "second" takes them off the
    end of the second text alone. first: tokens kept of the first text, whatever its pair has.
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
        """How many tokens are kept of texts of so many tokens."""
        first = first if self.first is None else min(first, self.first)
        room = self.length - SPECIAL
        if self.cut == "longest":
            return lengths_kept(first, second, room)
        return first, min(second, room - first)

    def join(self, first: NDArray[np.int32], second: NDArray[np.int32]) -> Encoding:
        """The sequence, whose tokens are int32."""
        a, b = self.kept(len(first), len(second))
        tokens = np.empty(a + b + SPECIAL, np.int32)
        tokens[0], tokens[a + 1], tokens[-1] = self.cls, self.sep, self.sep
        tokens[1 : a + 1], tokens[a + 2 : -1] = first[:a], second[:b]
        return Encoding(tokens, a + 2)


def shape_of(tokenizer: BertTokenizer, length: int, **more: Any) -> Shape:
    return Shape(tokenizer.cls, tokenizer.sep, length, **more)


@dataclass(frozen=True)
class PairExamples(Sequence[Example]):
    """Examples of a classifier: pair k is first[k] and second[k], and of the class classes[k]."""

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
        """[pairs], the lengths that the sequences would have uncut."""
        return self.first.lengths + self.second.lengths + SPECIAL
