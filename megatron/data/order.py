"""Maps a sample number to a sample of one data set: split, blend, and the order of an epoch.

Nothing is built when a data set is opened but one period of a blend: the order of an epoch is
computed number by number.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import floor, gcd, lcm
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.sources import Corpus, Data
from megatron.errors import UsageError

SPLITS = ("training", "validation", "test")
LONGEST_PERIOD = 100_000  # most samples after which the order of a blend repeats
ROUNDS = 8
WORD = 2**64 - 1

SplitOfOne = TypeVar("SplitOfOne", bound=Sized)
Dataset = TypeVar("Dataset")


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Ranges of documents, in file order, in proportion to the three weights of --split.

    A weight of 0 gives an empty range. Raises UsageError where a split of positive weight would
    get no document.
    """
    weights = [Fraction(weight) for weight in split.split(",")]
    bounds = [floor(documents * sum(weights[:end]) / sum(weights)) for end in range(4)]
    training, validation, test = (range(start, stop) for start, stop in pairwise(bounds))
    for name, weight, part in zip(SPLITS, weights, (training, validation, test), strict=True):
        if weight and not part:
            equal = ",".join("1" if each else "0" for each in weights)
            works = equal if documents >= sum(map(bool, weights)) else "1,0,0"
            allowed = f"larger for {name}, or 0: it gets none of {documents} documents"
            raise UsageError("--split", split, allowed, works=works)
    return training, validation, test


def in_order(number: int, samples_per_epoch: int, seed: int) -> int:
    """The default part of --sampler."""
    return number


def permute(
    numbers: NDArray[np.int64], size: int, *, seed: int, epochs: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The sample at each of these positions in an epoch, in range(size): int64 [n].

    epochs: int64 [n], the epoch of each position. Each epoch is a bijection of range(size); the
    result is a pure function of (number, size, seed, epoch).

    A Feistel network is a bijection of 2^(2h) numbers for any round function. A number that it maps
    to `size` or above goes through it again until it lands below (cycle walking), which gives a
    bijection of range(size). 2^(2h) is at most 4 size, so this takes at most 4 passes on average.
    """
    assert numbers.shape == epochs.shape
    assert np.all((numbers >= 0) & (numbers < size))
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    of_epoch = mix(mix(np.array([seed & WORD], np.uint64)) ^ epochs.astype(np.uint64))
    keys = mix(of_epoch + np.arange(ROUNDS, dtype=np.uint64)[:, None])
    value = numbers.astype(np.uint64)
    walking = np.arange(len(value))
    while len(walking):
        left, right = value[walking] >> half, value[walking] & mask
        for key in keys[:, walking]:
            left, right = right, left ^ (mix(key ^ right) & mask)
        value[walking] = (left << half) | right
        walking = walking[value[walking] >= size]
    return value.astype(np.int64)


def mix(value: NDArray[Any]) -> NDArray[Any]:
    """SplitMix64's output function, modulo 2^64: each bit of the result depends on every bit."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


class Blend:
    """Maps sample numbers of a blend to a data set and a sample number in it.

    After every sample, each data set is within 1 of its share: its j-th sample comes after its
    share passes j - 1, and at the latest when its share is j. Among the data sets that may give the
    next sample, the one with the earliest deadline is taken, which always meets these deadlines
    (Baruah et al., Proportionate Progress, 1996).

    With whole-number weights of sum D, the order repeats after D samples, with every data set
    exactly at its share. So one period is kept, and any sample number, however large, is looked up
    in it. Weights whose D would be too large, such as sizes in bytes, are rounded first: the shares
    used differ from the shares given by less than n / LONGEST_PERIOD for n data sets.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """weights: above 0, of any sum. The longest period takes 0.2 s with 2 data sets, 0.8 s with
        60; common weights such as 0.3 and 0.7 repeat after 10."""
        shares = _whole_numbers(weights)
        if (total := sum(shares)) > LONGEST_PERIOD:
            nearest = (round(Fraction(share * LONGEST_PERIOD, total)) for share in shares)
            rounded = _whole_numbers([Fraction(max(1, share)) for share in nearest])
            fine, coarse = (" : ".join(map(str, each)) for each in (shares, rounded))
            text = f"--data-path: weights {fine} are too fine for an exact order; {coarse} is used"
            warnings.warn(text, stacklevel=2)
            shares = rounded
        self._shares = np.array(shares, np.int64)
        self.period = period = sum(shares)
        self._sources = np.empty(period, np.int64)  # the data set of each sample
        taken = [0] * len(shares)
        deadlines = [-(-period // share) for share in shares]  # rounded up
        for position in range(period):
            after = position + 1
            may = (i for i, share in enumerate(shares) if taken[i] * period < after * share)
            source = min(may, key=deadlines.__getitem__)
            self._sources[position] = source
            taken[source] += 1
            deadlines[source] = -(-(taken[source] + 1) * period // shares[source])
        self._positions = [np.flatnonzero(self._sources == i) for i in range(len(shares))]
        self._local = np.empty(self.period, np.int64)
        for positions in self._positions:
            self._local[positions] = np.arange(len(positions))

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(data set, sample number in that data set) of each number, int64."""
        periods, position = np.divmod(numbers, self.period)
        sources = self._sources[position]
        return sources, periods * self._shares[sources] + self._local[position]

    def samples_before_repeat(self, samples: Sequence[int]) -> int:
        """Samples that can be taken before a data set, of samples[i] samples, has none left."""
        firsts = []
        for size, share, positions in zip(
            samples, self._shares.tolist(), self._positions, strict=True
        ):
            periods, position = divmod(size, share)
            firsts.append(periods * self.period + int(positions[position]))
        return min(firsts)


def _whole_numbers(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the ratio of the weights."""
    assert min(weights) > 0
    scale = lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    return [number // gcd(*numbers) for number in numbers]


@dataclass(kw_only=True, eq=False)
class Series(Generic[SplitOfOne]):
    """A split of a data set or of a blend, as a series of samples; each epoch of each data set has
    its own order.

    The training series never ends: each data set goes on with its next epoch, in another order.
    Each kind of model adds `batch`, which makes the samples of these numbers, in their order.
    """

    name: str
    """One of SPLITS."""
    splits: Sequence[SplitOfOne]
    """The part of each data set in the split; its length is its number of samples."""
    blend: Blend
    seed: int
    shuffle: bool = True
    """False takes every epoch in file order."""
    samples_per_epoch: int = field(init=False)
    """Samples until one data set of the blend starts its second epoch."""

    def __post_init__(self) -> None:
        self.samples_per_epoch = self.samples_in(1)

    def samples_in(self, epochs: int) -> int:
        """Samples until one data set of the blend has been read `epochs` times."""
        return self.blend.samples_before_repeat([epochs * len(each) for each in self.splits])

    def locate(
        self, numbers: Sequence[int]
    ) -> Iterator[tuple[SplitOfOne, NDArray[np.int64], NDArray[np.int64]]]:
        """(split, rows, samples): numbers[rows] are these samples of the split, in file order.

        Raises ValueError past the end of a split that is not endless.
        """
        if self.name != "training" and max(numbers) >= self.samples_per_epoch:
            allowed = f"fewer, or {{}} of a larger part: the {self.name} split ends after "
            allowed += f"{self.samples_per_epoch} samples"
            raise UsageError("--eval-iters", None, allowed, "--split")
        sources, local = self.blend.locate(np.asarray(numbers, np.int64))
        for source in np.unique(sources).tolist():
            split, rows = self.splits[source], np.flatnonzero(sources == source)
            epochs, within = np.divmod(local[rows], len(split))
            if self.shuffle:
                within = permute(within, len(split), seed=self.seed, epochs=epochs)
            yield split, rows, within


def open_series(
    corpus: Corpus[Data],
    split: str,
    seed: int,
    cut: Callable[[Data, range, str], SplitOfOne],
    make: Callable[..., Dataset],
    *,
    shuffle: bool = True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """(training, validation, test), None for a weight of 0; --split cuts each data set of a blend.

    cut: makes the split of this name from these documents. make: a subclass of Series, from its
    fields. Raises ValueError, naming the flag, for a split without documents.
    """
    blend = Blend([source.weight for source in corpus.sources])
    datasets = [source.data for source in corpus.sources]
    ranges = [split_documents(split, data.num_documents) for data in datasets]
    opened: list[Dataset | None] = []
    for name, documents in zip(SPLITS, zip(*ranges, strict=True), strict=True):
        if not all(documents):
            opened.append(None)
            continue
        splits = [cut(data, each, name) for data, each in zip(datasets, documents, strict=True)]
        opened.append(make(name=name, splits=splits, blend=blend, seed=seed, shuffle=shuffle))
    training, validation, test = opened
    return training, validation, test
