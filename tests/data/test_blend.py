"""Blending: within 1 of its share after every sample, in exact arithmetic."""

import random
from fractions import Fraction

import numpy as np
import pytest

from megatron.data.order import LONGEST_PERIOD, Blend


def random_weights(generator: random.Random) -> list[Fraction]:
    """2 to 8 weights over up to 3 decades, some of them equal: the hard cases are lopsided."""
    decades = generator.choice([0.3, 1, 2, 3])
    weights = [int(10 ** generator.uniform(0, decades)) for _ in range(generator.randint(2, 8))]
    return [Fraction(weight) for weight in weights]


def check_within_one(weights: list[Fraction]) -> None:
    """After every n of a period and a bit, and the local numbers count up from 0."""
    blend, total = Blend(weights), sum(weights)
    length = blend.period + 7
    sources, local = blend.locate(np.arange(length))
    after = np.arange(1, length + 1)
    for i, weight in enumerate(weights):
        own = sources == i
        assert np.array_equal(local[own], np.arange(own.sum()))
        share = weight / total
        scaled = np.cumsum(own) * share.denominator - after * share.numerator
        assert np.abs(scaled).max() <= share.denominator


def test_within_one_of_the_share_after_every_sample() -> None:
    generator = random.Random(3)
    for _ in range(150):
        check_within_one(random_weights(generator))


def test_lopsided_weights() -> None:
    for weights in [(1, 1), (1, 9999), (5000, 4999, 100, 10, 1), (1, 1, 1, 1, 1, 1, 1, 900)]:
        check_within_one([Fraction(weight) for weight in weights])


def test_decimal_weights_do_not_drift() -> None:
    """At 10^12 samples and more each data set has exactly what is its due."""
    blend = Blend([Fraction("0.3"), Fraction("0.7")])
    assert blend.period == 10
    n = 10**15
    sources, local = blend.locate(np.arange(n - 10, n + 10))
    before = {0: n * 3 // 10 - 3, 1: n * 7 // 10 - 7}
    for i, first in before.items():
        assert local[sources == i].tolist() == list(range(first, first + (6 if i == 0 else 14)))


def test_only_the_ratio_counts() -> None:
    numbers = np.arange(100)
    first = Blend([Fraction("0.3"), Fraction("0.7")]).locate(numbers)
    second = Blend([Fraction(30), Fraction(70)]).locate(numbers)
    assert np.array_equal(first, second)


def test_the_longest_period_is_exact() -> None:
    assert Blend([Fraction(1), Fraction(LONGEST_PERIOD - 1)]).period == LONGEST_PERIOD


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["0.33333333", "0.66666667"], [33_333, 66_667]),
        (["1283719", "998321"], [56_253, 43_747]),
        (["1", "1e9", "2e9"], [1, 33_333, 66_667]),
    ],
)
def test_weights_too_fine_are_rounded_with_a_warning(given: list[str], used: list[int]) -> None:
    weights = [Fraction(word) for word in given]
    with pytest.warns(UserWarning, match=" : ".join(map(str, used)) + " is used") as caught:
        blend = Blend(weights)
    assert len(caught) == 1
    sources, _ = blend.locate(np.arange(blend.period))
    assert np.bincount(sources).tolist() == used
    for weight, count in zip(weights, used, strict=True):
        difference = weight / sum(weights) - Fraction(count, blend.period)
        assert abs(difference) < Fraction(len(used), LONGEST_PERIOD)


def test_samples_before_repeat_is_the_first_sample_that_there_is_not() -> None:
    generator = random.Random(5)
    for _ in range(50):
        weights = random_weights(generator)
        blend = Blend(weights)
        sizes = [generator.randint(1, 60) for _ in weights]
        last = blend.samples_before_repeat(sizes)
        sources, local = blend.locate(np.arange(last + 1))
        too_many = local >= np.array(sizes)[sources]
        assert not too_many[:-1].any()
        assert too_many[-1]
