"""Pairs of texts as BERT reads them, [CLS] first [SEP] second [SEP], in little memory.

A text is encoded once, and a pair is joined when it is requested. The passages of RACE, each of
which is read with some fourteen answers, take 70 MB this way and 600 MB otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.bert import SPECIAL, lengths_kept
from megatron.data.tokenizer import BertTokenizer
from tasks.protocol import Encoding, Example

AT_ONCE = 4096  # texts; the library holds some hundred bytes for each of their tokens


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
