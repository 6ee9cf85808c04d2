"""The order of samples: splits, blends, the order of an epoch, and the ranks that share it."""

import random
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.batch import micro_batch_numbers
from megatron.data.order import LONGEST_PERIOD, Blend, permute, split_documents
from megatron.errors import UsageError
from tests.refusals import refusal


def test_every_document_is_in_one_split_in_proportion() -> None:
    for split, documents, sizes in [
        ("969,30,1", 1000, [969, 30, 1]),
        ("29,1,0", 77, [74, 3, 0]),
        ("0.8,0.1,0.1", 10, [8, 1, 1]),
        ("1,2,3", 6, [1, 2, 3]),
        ("0,0,1", 30, [0, 0, 30]),
    ]:
        ranges = split_documents(split, documents)
        assert [each for part in ranges for each in part] == list(range(documents))
        assert [len(part) for part in ranges] == sizes


def test_splits_that_cannot_be_are_refused() -> None:
    for split, documents in (("969,30,1", 20), ("29,1,0", 1), ("1,1,1", 2)):
        error = refusal(partial(split_documents, split, documents), kind=UsageError)
        flag, works = error.works
        assert flag == error.flag == "--split"
        split_documents(works, documents)


def epoch(size: int, seed: int, number: int) -> NDArray[np.int64]:
    return permute(np.arange(size), size, seed=seed, epochs=np.full(size, number))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_an_epoch_takes_every_sample_once(size: int) -> None:
    for number in range(3):
        assert np.array_equal(np.sort(epoch(size, 7, number)), np.arange(size))


def plainly(number: int, size: int, seed: int, epoch: int) -> int:
    """permute() of one number in Python's integers."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    half = next(h for h in range(1, 33) if 4**h >= size)
    key = mix(mix(seed % 2**64) ^ epoch)
    while True:
        left, right = divmod(number, 2**half)
        for turn in range(8):
            left, right = right, left ^ (mix(mix((key + turn) % 2**64) ^ right) % 2**half)
        number = left * 2**half + right
        if number < size:
            return number


def test_the_order_is_that_of_this_format_for_ever() -> None:
    """Another order would silently change every run that is resumed."""
    assert epoch(10, 1234, 0).tolist() == [8, 1, 9, 0, 4, 5, 2, 7, 6, 3]
    rng = np.random.default_rng(0)
    for size, seed in ((2**40 + 3, 1), (65_537, -1), (64, 3), (5, 2**63), (1, 0)):
        epochs = np.array([0, 5, 5, 10**6] * 20)
        numbers = np.concatenate([[0, size - 1], rng.integers(0, size, 78)])
        found = permute(numbers, size, seed=seed, epochs=epochs).tolist()
        pairs = zip(numbers.tolist(), epochs.tolist(), strict=True)
        assert found == [plainly(number, size, seed, epoch) for number, epoch in pairs]


@pytest.mark.parametrize(("data_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (4, 1)])
def test_a_step_reads_the_same_samples_at_any_layout(data_size: int, micro_batch_size: int) -> None:
    sizes = {"global_batch_size": 12, "micro_batch_size": micro_batch_size, "data_size": data_size}
    ranks = [micro_batch_numbers(36, **sizes, data_rank=rank) for rank in range(data_size)]
    in_order = [number for step in zip(*ranks, strict=True) for batch in step for number in batch]
    assert in_order == list(range(36, 48))


def random_weights(generator: random.Random) -> list[Fraction]:
    """2 to 8 weights over up to 3 decades, some of them equal: the hard cases are lopsided."""
    decades = generator.choice([0.3, 1, 2, 3])
    weights = [int(10 ** generator.uniform(0, decades)) for _ in range(generator.randint(2, 8))]
    return [Fraction(weight) for weight in weights]


def test_within_one_of_the_share_after_every_sample() -> None:
    """After every n of a period and a bit, and the local numbers count up from 0."""
    generator = random.Random(3)
    lopsided = [(1, 1), (1, 1, 4), (1, 9999), (5000, 4999, 100, 10, 1), (1, 1, 1, 1, 1, 1, 1, 900)]
    for weights in [*lopsided, *(random_weights(generator) for _ in range(150))]:
        blend = Blend([Fraction(weight) for weight in weights])
        after = np.arange(1, blend.period + 8)
        sources, local = blend.locate(after - 1)
        for i, weight in enumerate(weights):
            own, share = sources == i, Fraction(weight, sum(weights))
            assert np.array_equal(local[own], np.arange(own.sum()))
            scaled = np.cumsum(own) * share.denominator - after * share.numerator
            assert np.abs(scaled).max() < share.denominator


def test_decimal_weights_do_not_drift() -> None:
    """At 10^15 samples each data set has exactly what is its due; only the ratio counts."""
    n = 10**15
    for words in (("0.3", "0.7"), ("30", "70")):
        blend = Blend([Fraction(word) for word in words])
        assert blend.period == 10
        sources, local = blend.locate(np.arange(n - 10, n + 10))
        for i, (first, count) in enumerate([(n * 3 // 10 - 3, 6), (n * 7 // 10 - 7, 14)]):
            assert local[sources == i].tolist() == list(range(first, first + count))


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["1", str(LONGEST_PERIOD - 1)], None),
        (["0.33333333", "0.66666667"], [33_333, 66_667]),
        (["1283719", "998321"], [56_253, 43_747]),
        (["1", "1e9", "2e9"], [1, 33_333, 66_667]),
    ],
)
def test_weights_too_fine_are_rounded(
    given: list[str], used: list[int] | None, recwarn: pytest.WarningsRecorder
) -> None:
    weights = [Fraction(word) for word in given]
    blend = Blend(weights)
    assert len(recwarn) == (used is not None)
    if used is None:
        assert blend.period == sum(weights)
        return
    assert " : ".join(map(str, used)) in str(recwarn[0].message)
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


def test_the_splits_are_those_of_this_format_for_ever() -> None:
    """A resumed run, and an evaluation, must not meet documents of another split."""
    assert split_documents("2,1,1", 5) == (range(2), range(2, 3), range(3, 5))
    assert split_documents("1,1,1", 4) == (range(1), range(1, 2), range(2, 4))
