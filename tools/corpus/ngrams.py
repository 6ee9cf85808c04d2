"""Word n-grams of texts as 64-bit hashes, and where those of a given set occur.

A word is a run of letters and digits (str.isalnum) in lower case.  Characters between words are
ignored, so "don't", "don 't" and "Don - t" are the same two words.  Lower case is taken per code
point, so that positions are those of the original text ('İ' becomes 'i', not two characters).

The time to search a text grows with its length, not with the size of the set: a bitmap excludes
all but some 6 % of the n-grams before the sorted hashes are searched.

Matching hashes are not verified by comparing words.  A word's hash is a polynomial in its code
points, made random by a bijection of 64 bits; an n-gram's is a polynomial in its words' hashes.
Two n-grams agree by chance once in 2^64.  10^6 n-grams, searched for among the 3 x 10^10 of 174 GB,
give 0.002 false matches in all; among the 2.5 x 10^12 of 15 TB, 0.14.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.corpus.compiled import compiled, mix

Hashes = NDArray[np.uint64]
Points = NDArray[np.uint32]
Indices = NDArray[np.int64]

BLOCK = 1 << 20  # characters that are processed together, which bounds the memory
BITS_PER_NGRAM = 16  # in the bitmap
FEWEST_BITS, MOST_BITS = 16, 30  # log2 of the bitmap's size
LETTER, FACTOR = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)
S3 = np.uint64(3)
ZERO, ONE, SEVEN = np.uint64(0), np.uint64(1), np.uint64(7)


class Words(NamedTuple):
    """Words of a text, in order: word k is text[starts[k] : ends[k]]."""

    starts: Indices
    ends: Indices
    hashes: Hashes


class Found(NamedTuple):
    """Occurrences of n-grams of a set in a text, in order of position."""

    positions: Indices
    """Index of the n-gram's first word."""
    ids: Indices
    """Number of the n-gram in the set."""


@functools.cache
def fold_table() -> Points:
    """[1114112]: the lower case of every code point that words are made of, 0 for all others."""
    points = np.arange(0x110000, dtype=np.uint32)
    characters = points.view("U1")
    alphanumeric = np.strings.isalnum(characters)
    lower = np.strings.lower(characters[alphanumeric]).astype("U1").view(np.uint32)
    table = np.zeros_like(points)
    table[alphanumeric] = lower
    return table


def split_words(text: str) -> Words:
    parts = []
    for start, stop in _blocks(text):
        points = np.frombuffer(text[start:stop].encode("utf-32-le"), np.uint32)
        starts, ends, hashes = _split(points, fold_table())
        parts.append(Words(starts + start, ends + start, hashes))
    return parts[0] if len(parts) == 1 else Words(*map(np.concatenate, zip(*parts, strict=True)))


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most 2 BLOCK characters; at least one piece.

    Cuts are at blanks; where BLOCK characters have none, a word may be cut and counts as two.
    """
    start = 0
    while len(text) - start > 2 * BLOCK:
        stop = text.find(" ", start + BLOCK, start + 2 * BLOCK)
        stop = start + 2 * BLOCK if stop < 0 else stop
        yield start, stop
        start = stop
    yield start, len(text)


@compiled
def _split(points: Points, fold: Points) -> tuple[Indices, Indices, Hashes]:
    most = len(points) // 2 + 1
    starts, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    hashes = np.empty(most, np.uint64)
    count = 0
    word, power = ZERO, ZERO  # the power is zero outside of words
    for k in range(len(points)):
        point = fold[points[k]]
        if point:
            if not power:
                starts[count] = k
                word, power = ZERO, ONE
            word += np.uint64(point) * power
            power *= LETTER
        elif power:
            ends[count], hashes[count] = k, mix(word)
            count += 1
            power = ZERO
    if power:
        ends[count], hashes[count] = len(points), mix(word)
        count += 1
    return starts[:count], ends[:count], hashes[:count]


def hash_ngrams(words: Hashes, n: int) -> Hashes:
    """Hash of every run of n words; empty if there are fewer words."""
    count = max(len(words) - n + 1, 0)
    ngrams = np.zeros(count, np.uint64)
    for k in range(n):
        ngrams = ngrams * FACTOR + words[k : k + count]
    return ngrams


class NgramSet:
    """n-grams to look for, numbered in the order of their hashes."""

    def __init__(self, n: int, hashes: Hashes) -> None:
        """hashes: of n-grams, in any order; duplicates are removed."""
        self.n = n
        self.hashes = np.unique(hashes)
        size = (BITS_PER_NGRAM * len(self.hashes)).bit_length()
        bits = min(max(size, FEWEST_BITS), MOST_BITS)
        self._shift = np.uint64(64 - bits)
        self._bitmap = np.zeros(1 << bits - 3, np.uint8)
        keys = self.hashes >> self._shift
        flags = (ONE << (keys & SEVEN)).astype(np.uint8)
        np.bitwise_or.at(self._bitmap, (keys >> S3).astype(np.int64), flags)

    def __len__(self) -> int:
        return len(self.hashes)

    def ids(self, hashes: Hashes) -> Indices:
        """The numbers of n-grams that are in the set."""
        return np.searchsorted(self.hashes, hashes)

    def find(self, words: Hashes) -> Found:
        """Every occurrence in a text.  words: the hashes of its words."""
        return Found(*_find(words, self.n, self.hashes, self._bitmap, self._shift))


@compiled
def _find(
    words: Hashes, n: int, table: Hashes, bitmap: NDArray[np.uint8], shift: np.uint64
) -> tuple[Indices, Indices]:
    positions, ids = np.empty(len(words), np.int64), np.empty(len(words), np.int64)
    count = 0
    leaving, ngram = ONE, ZERO
    for _ in range(n):
        leaving *= FACTOR
    for k in range(len(words)):
        ngram = ngram * FACTOR + words[k]
        if k >= n:
            ngram -= words[k - n] * leaving
        key = ngram >> shift
        if k >= n - 1 and (bitmap[key >> S3] >> (key & SEVEN)) & ONE:
            place = np.searchsorted(table, ngram)
            if place < len(table) and table[place] == ngram:
                positions[count], ids[count] = k - n + 1, place
                count += 1
    return positions[:count].copy(), ids[:count].copy()
