"""Documents as sets of shingles, and their MinHash signatures.

Text is normalised first: lower case, runs of white space as one blank, none at the ends.  A shingle
is five characters or five words (between blanks) of it; a shorter text is one shingle.  Shingles
are represented by 64-bit hashes: two of the 10^4 in a pair of documents coincide by chance in one
pair of 10^11.

A signature has PERMUTATIONS values: the smallest 32-bit hash under each of as many permutations
x -> a x + b mod 2^32, a odd.  The probability that two signatures agree in a value is the
Jaccard similarity of their sets (Broder 1997).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.corpus.compiled import HAVE_NUMBA, compiled, mix

Shingle = Literal["char5", "word5"]
SHINGLES: tuple[Shingle, ...] = ("char5", "word5")
LENGTH = 5
PERMUTATIONS = 128
BLANK = 32
# Code points for which str.isspace() holds; all of them are below 2^14.
SPACES = np.array([chr(point).isspace() for point in range(1 << 14)])

Words = NDArray[np.uint64]
Points = NDArray[np.uint32]
Signatures = NDArray[np.uint32]

FACTOR = np.uint64(0x9E3779B97F4A7C15)
S32 = np.uint64(32)


@dataclass(frozen=True)
class Shingler:
    """Turns texts into sets and signatures; compiled and plain numpy give the same."""

    shingle: Shingle
    seed: int
    """Seed of the permutations."""
    use_numba: bool = field(default=HAVE_NUMBA, repr=False)  # the results are the same

    @cached_property
    def permutations(self) -> Points:
        """[2, PERMUTATIONS]: factors and offsets."""
        random = np.random.default_rng(self.seed)
        drawn = random.integers(1 << 32, size=(2, PERMUTATIONS), dtype=np.uint32)
        drawn[0] |= np.uint32(1)
        return drawn

    def points(self, text: str) -> Points:
        """The code points of the normalised text."""
        if not self.use_numba:
            return _points(" ".join(text.lower().split()))
        return _collapse(_points(text.lower()), SPACES)

    def hashes(self, points: Points) -> Words:
        """Hash of every shingle of a normalised text, in its order; equal shingles repeat."""
        characters = self.shingle == "char5"
        if self.use_numba:
            return _character_hashes(points) if characters else _word_hashes(points)
        if characters:
            return _gram_hashes(points.astype(np.uint64))
        return _gram_hashes(_hash_words(points))

    def shingle_set(self, text: str) -> Words:
        """The distinct hashes of a text's shingles, sorted."""
        hashes = np.sort(self.hashes(self.points(text)))
        return hashes[np.append(True, hashes[1:] != hashes[:-1])]

    def sign(self, hashes: Words) -> Signatures:
        """MinHash, [PERMUTATIONS], of the set of these hashes."""
        fold = _fold if self.use_numba else _fold_by_numpy
        return fold(hashes, *self.permutations)

    def sign_texts(self, texts: Sequence[str]) -> Signatures:
        """[texts, PERMUTATIONS]"""
        signatures = np.empty((len(texts), PERMUTATIONS), np.uint32)
        for number, text in enumerate(texts):
            signatures[number] = self.sign(self.hashes(self.points(text)))
        return signatures


def _points(text: str) -> Points:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@compiled
def _collapse(points: Points, spaces: NDArray[np.bool_]) -> Points:
    """Runs of white space as one blank, none at the ends."""
    out = np.empty_like(points)
    length = 0
    blank = True  # drops blanks at the start
    for k in range(len(points)):
        point = points[k]
        if point < len(spaces) and spaces[point]:
            if not blank:
                out[length] = BLANK
                length += 1
            blank = True
        else:
            out[length] = point
            length += 1
            blank = False
    if blank and length:
        length -= 1
    return out[:length]


@compiled
def _character_hashes(points: Points) -> Words:
    width = min(LENGTH, len(points))
    out = np.empty(max(len(points) - LENGTH + 1, 1), np.uint64)
    for k in range(len(out)):
        gram = np.uint64(0)
        for m in range(width):
            gram = gram * FACTOR + np.uint64(points[k + m])
        out[k] = mix(gram)
    return out


@compiled
def _word_hashes(points: Points) -> Words:
    words = np.empty(len(points) // 2 + 1, np.uint64)
    count = 0
    word = np.uint64(0)
    for k in range(len(points)):
        if points[k] == BLANK:
            words[count] = mix(word)
            count += 1
            word = np.uint64(0)
        else:
            word = word * FACTOR + np.uint64(points[k])
    words[count] = mix(word)
    count += 1
    width = min(LENGTH, count)
    out = np.empty(max(count - LENGTH + 1, 1), np.uint64)
    for k in range(len(out)):
        gram = np.uint64(0)
        for m in range(width):
            gram = gram * FACTOR + words[k + m]
        out[k] = mix(gram)
    return out


@compiled
def _fold(hashes: Words, factors: Points, offsets: Points) -> Signatures:
    least = np.full(PERMUTATIONS, 0xFFFFFFFF, np.uint32)
    for k in range(len(hashes)):
        x = np.uint32(hashes[k] >> S32)
        for m in range(PERMUTATIONS):
            value = np.uint32(factors[m] * x + offsets[m])
            least[m] = min(least[m], value)
    return least


def _gram_hashes(units: Words) -> Words:
    """Hash of every run of LENGTH units; of all units if they are fewer."""
    count = max(len(units) - LENGTH + 1, 1)
    grams = np.zeros(count, np.uint64)
    for k in range(min(LENGTH, len(units))):
        grams = grams * FACTOR + units[k : k + count]
    return mix(grams)


def _hash_words(points: Points) -> Words:
    """Hash of every run without blanks: its points are the digits of a number to base FACTOR."""
    ends = np.append(np.flatnonzero(points == BLANK), len(points))
    starts = np.append(0, ends[:-1] + 1)
    words = np.zeros(len(ends), np.uint64)
    for k in range(int((ends - starts).max())):
        longer = starts + k < ends
        words[longer] = words[longer] * FACTOR + points[starts[longer] + k]
    return mix(words)


def _fold_by_numpy(
    hashes: Words, factors: Points, offsets: Points, block: int = 4096
) -> Signatures:
    """Computed in blocks that fit the cache."""
    x = (hashes >> S32).astype(np.uint32)
    parts = [x[k : k + block] for k in range(0, len(x), block)]
    columns = factors[:, None], offsets[:, None]
    return np.min([(columns[0] * part + columns[1]).min(axis=1) for part in parts], axis=0)
