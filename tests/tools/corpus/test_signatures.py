"""Normalised text, shingle sets and signatures: compiled and by definition."""

import functools
import random
from collections.abc import Iterable

import numpy as np

from tools.corpus.dedup import signatures
from tools.corpus.dedup.signatures import PERMUTATIONS, SHINGLES, Shingler

ALPHABET = "abc ABC\u00c4\u00df\u0130\u0416 \t\n\u00a0\u2003\u3000\U0001f600."


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(ALPHABET, k=draw.randrange(60))) for _ in range(count)]


def test_white_space_is_what_python_takes_for_it() -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert {c for c in every if c.isspace()} == {
        chr(k) for k in np.flatnonzero(signatures.SPACES).tolist()
    }


def mixed(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def polynomial(digits: Iterable[int]) -> int:
    return functools.reduce(lambda sum, digit: (sum * 0x9E3779B97F4A7C15 + digit) % 2**64, digits)


def test_a_hash_is_that_of_the_definition() -> None:
    """Signatures that a run has kept are valid for the next version: hashes do not change."""
    for text in texts(300):
        words = [[ord(c) for c in word] for word in " ".join(text.lower().split()).split(" ")]
        hashes = [mixed(polynomial([0, *word])) for word in words]
        letters = [ord(c) for c in " ".join(text.lower().split())]
        for shingle, units in zip(SHINGLES, (letters, hashes), strict=True):
            grams = [units[k : k + 5] for k in range(max(1, len(units) - 4))]
            expected = {mixed(polynomial([0, *gram])) for gram in grams}
            assert Shingler(shingle, 1).shingle_set(text).tolist() == sorted(expected)


def test_a_signature_is_the_minimum_under_each_permutation() -> None:
    shingler = Shingler("char5", 3)
    hashes = shingler.shingle_set("the smallest hash under each permutation")
    factors, offsets = shingler.permutations
    assert all(int(factor) % 2 for factor in factors)
    for place in range(PERMUTATIONS):
        least = min(
            ((int(x) >> 32) * int(factors[place]) + int(offsets[place])) % 2**32 for x in hashes
        )
        assert shingler.sign(hashes)[place] == least


def test_another_seed_permutes_otherwise() -> None:
    hashes = Shingler("char5", 1).shingle_set("some text or other")
    one, other = (Shingler("char5", seed).sign(hashes) for seed in (1, 2))
    assert (one == other).mean() < 0.1
