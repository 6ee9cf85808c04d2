"""Documents as sets of shingles, their MinHash signatures, and the keys that find similar ones.

Text is normalised first: lower case, runs of white space as one blank, none at the ends.  A shingle
is five characters or five words (between blanks) of it; a shorter text is one shingle.  Shingles
are represented by 64-bit hashes: two of the 10^4 in a pair of documents coincide by chance in one
pair of 10^11.

A signature has PERMUTATIONS values: the smallest 32-bit hash under each of as many permutations
x -> a x + b mod 2^32, a odd.  The probability that two signatures agree in a value is the
Jaccard similarity of their sets (Broder 1997).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.corpus.compiled import compiled, mix
from tools.corpus.external import Words

Shingle = Literal["char5", "word5"]
SHINGLES: tuple[Shingle, ...] = ("char5", "word5")
LENGTH = 5
PERMUTATIONS = 128
BLANK = 32
# Code points for which str.isspace() holds; all of them are below 2^14.
SPACES = np.array([chr(point).isspace() for point in range(1 << 14)])

Points = NDArray[np.uint32]
Signatures = NDArray[np.uint32]

FACTOR = np.uint64(0x9E3779B97F4A7C15)
S32 = np.uint64(32)


@dataclass(frozen=True)
class Shingler:
    """Turns texts into sets and signatures."""

    shingle: Shingle
    seed: int
    """Seed of the permutations."""

    @cached_property
    def permutations(self) -> Points:
        """[2, PERMUTATIONS]: factors and offsets."""
        random = np.random.default_rng(self.seed)
        drawn = random.integers(1 << 32, size=(2, PERMUTATIONS), dtype=np.uint32)
        drawn[0] |= np.uint32(1)
        return drawn

    def points(self, text: str) -> Points:
        """The code points of the normalised text."""
        encoded = text.lower().encode("utf-32-le", "surrogatepass")
        return _collapse(np.frombuffer(encoded, np.uint32), SPACES)

    def hashes(self, points: Points) -> Words:
        """Hash of every shingle of a normalised text, in its order; equal shingles repeat."""
        return _grams(points if self.shingle == "char5" else _word_hashes(points))

    def shingle_set(self, text: str) -> Words:
        """The distinct hashes of a text's shingles, sorted."""
        hashes = np.sort(self.hashes(self.points(text)))
        return hashes[np.append(True, hashes[1:] != hashes[:-1])]

    def sign(self, hashes: Words) -> Signatures:
        """MinHash, [PERMUTATIONS], of the set of these hashes."""
        return _fold(hashes, *self.permutations)


@dataclass(frozen=True)
class Bands:
    """Cuts a signature into `count` bands of `rows` values."""

    count: int
    rows: int

    def keys(self, signatures: Signatures) -> Words:
        """[n, PERMUTATIONS] to [count, n]: keys are equal where all values of the band are."""
        cut = signatures[:, : self.count * self.rows].reshape(-1, self.count, self.rows)
        keys = np.zeros(cut.shape[:2], np.uint64)
        for row in range(self.rows):
            keys = (keys ^ cut[:, :, row]) * FACTOR
            keys ^= keys >> np.uint64(29)
        return keys.T

    def recall(self, jaccard: float) -> float:
        """Share of pairs of this similarity that share a bucket in at least one band."""
        return float(1 - (1 - jaccard**self.rows) ** self.count)


def sketch(signatures: Signatures) -> Words:
    """[n, PERMUTATIONS] to [n, PERMUTATIONS / 64]: one fair bit of each value."""
    bits = (signatures * np.uint32(0x9E3779B1)) >> np.uint32(31)
    return np.packbits(bits.astype(bool), axis=1, bitorder="little").view("<u8")


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
def _grams(units: Points | Words) -> Words:
    """Hash of every run of LENGTH units; of all units if they are fewer."""
    width = min(LENGTH, len(units))
    out = np.empty(max(len(units) - LENGTH + 1, 1), np.uint64)
    for k in range(len(out)):
        gram = np.uint64(0)
        for m in range(width):
            gram = gram * FACTOR + np.uint64(units[k + m])
        out[k] = mix(gram)
    return out


@compiled
def _word_hashes(points: Points) -> Words:
    """Hash of every run without blanks."""
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
    return words[: count + 1]


@compiled
def _fold(hashes: Words, factors: Points, offsets: Points) -> Signatures:
    least = np.full(PERMUTATIONS, 0xFFFFFFFF, np.uint32)
    for k in range(len(hashes)):
        x = np.uint32(hashes[k] >> S32)
        for m in range(PERMUTATIONS):
            value = np.uint32(factors[m] * x + offsets[m])
            least[m] = min(least[m], value)
    return least
