"""Whole-word n-gram masking (paper, section 5.2): what is to be predicted, and what hides it.

A word is a piece and the continuations after it. A sample of W words gets k n-grams, where k is
mask_prob W / mean, rounded up or down at random so that this is its mean; n is between 1 and
max_ngram_size with probability in proportion to 1/n, and its mean is max_ngram_size / (1 + 1/2 +
... + 1/max_ngram_size). So what is to be expected is simple, and it does not depend on how long the
words are:

    tokens to be predicted         mask_prob of all, marks not among them
    n-grams of 1, 2, 3, ... words  as 1 : 1/2 : 1/3 ...
    a token to be predicted        0.8 [MASK], 0.1 a random id, 0.1 itself, each drawn by itself

The n-grams lie anywhere in a segment with the same probability but do not touch, so that a run of
words to be predicted is one n-gram. Samples of few words get one n-gram all the same, which makes
their share larger: those of fewer than 11 words, for the usual settings. An n-gram is shorter where
its segment has not so many words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HIDDEN, RANDOM = 0.8, 0.1  # shares of [MASK] and of random ids; the others stay


@dataclass(frozen=True, kw_only=True)
class Masking:
    mask: int
    """Id of [MASK]."""
    ordinary: NDArray[np.int64]
    """The ids that may stand in place of another."""
    is_continuation: NDArray[np.bool_]
    """[vocabulary]: whether a piece goes on with the word before it."""
    mask_prob: float
    max_ngram_size: int

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob <= 0.5:
            raise ValueError(
                f"--mask-prob {self.mask_prob} should be above 0 and at most 0.5, since n-grams do "
                "not touch; --mask-prob 0.15 would work"
            )
        assert self.max_ngram_size >= 1

    def choose(
        self, segments: Sequence[NDArray[np.int64]], rng: np.random.Generator
    ) -> list[NDArray[np.bool_]]:
        """Which tokens of each segment are to be predicted."""
        words = [self._words(segment) for segment in segments]
        counts = self._counts([int(word[-1]) + 1 for word in words], rng)
        lengths = self._lengths(sum(counts), rng)
        chosen, first = [], 0
        for word, count in zip(words, counts, strict=True):
            mine = lengths[first : first + count]
            chosen.append(_place(mine, int(word[-1]) + 1, rng)[word])
            first += count
        return chosen

    def hide(
        self, tokens: NDArray[np.int64], chosen: NDArray[np.bool_], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """What the model reads in place of the tokens."""
        places = np.flatnonzero(chosen)
        fate, drawn = rng.random((2, len(places)))
        others = self.ordinary[(drawn * len(self.ordinary)).astype(np.int64)]
        stays = np.where(fate < HIDDEN + RANDOM, others, tokens[places])
        read = tokens.copy()
        read[places] = np.where(fate < HIDDEN, self.mask, stays)
        return read

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Probabilities of n-grams of up to 1, 2, ... words."""
        sums = np.cumsum(1 / np.arange(1, self.max_ngram_size + 1))
        return sums / sums[-1]

    def _words(self, segment: NDArray[np.int64]) -> NDArray[np.int64]:
        """The word of each piece, from 0 on; a segment begins with a word even if it was cut."""
        begins = ~self.is_continuation[segment]
        begins[0] = True
        return np.cumsum(begins) - 1

    def _counts(self, words: Sequence[int], rng: np.random.Generator) -> list[int]:
        """N-grams of each segment; one offset rounds them all, so that their sum is rounded too."""
        mean = float(1 + (1 - self._shares).sum())
        expected = np.array(words) * self.mask_prob / mean
        expected *= max(1.0, 1 / expected.sum())
        ends = np.floor(np.cumsum(expected) + rng.random()).astype(int)
        return np.diff(ends, prepend=0).tolist()

    def _lengths(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Words of each n-gram, in random order; each length as often as its share says, but for 1.

        Drawn one by one they would be as often on average, but the share of tokens in a sample
        would vary more.
        """
        levels = (np.argsort(rng.random(count), kind="stable") + rng.random()) / count
        return np.searchsorted(self._shares, levels, "right") + 1


def _place(lengths: NDArray[np.int64], words: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Where n-grams of these lengths lie: bool [words], all places that do not touch alike."""
    lengths = np.minimum(lengths, words)
    lengths = lengths[np.cumsum(lengths) + np.arange(len(lengths)) <= words]
    free = words - int(lengths.sum())
    # Words that stay before each n-gram: different ones, so that no two n-grams touch.
    before = np.sort(np.argsort(rng.random(free + 1), kind="stable")[: len(lengths)])
    ends = before + np.cumsum(lengths)
    steps = np.zeros(words + 1, np.int64)
    steps[ends - lengths] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1]) > 0
