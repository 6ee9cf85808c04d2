"""A split of a data set or of a blend as a series of sample numbers, of whatever kind of sample."""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import Blend
from megatron.data.indexed import IndexedDataset
from megatron.data.order import permute
from megatron.data.sources import Corpus
from megatron.data.splits import SPLITS, split_documents

AnyPart = TypeVar("AnyPart", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Those samples of a batch that come from one data set. n: how many."""

    source: int
    """The data set."""
    rows: NDArray[np.int64]
    """[n]: places in the batch."""
    places: NDArray[np.int64]
    """[n]: which of its samples, in file order."""
    epochs: NDArray[np.int64]
    """[n]: how often the data set has begun anew."""


class Series:
    """Sample numbers of a split: an epoch of each data set in an order of its own.

    That of training never ends: each data set goes on with its next epoch, in another order.
    samples_per_epoch: samples until the first data set of the blend begins anew.
    """

    def __init__(self, name: str, sizes: Sequence[int], blend: Blend, *, seed: int) -> None:
        """sizes: samples of an epoch of each data set."""
        self.samples_per_epoch = blend.samples_before_repeat(sizes)
        self.sizes = tuple(sizes)
        self.seed = seed
        self._name = name
        self._blend = blend

    def locate(self, numbers: Sequence[int]) -> Iterator[Drawn]:
        """Where these samples are; ValueError past the end of a split that is not endless."""
        asked = max(numbers) + 1
        if self._name != "training" and asked > self.samples_per_epoch:
            raise ValueError(
                f"the {self._name} split ends after {self.samples_per_epoch} samples, and {asked} "
                f"were asked for; fewer --eval-iters, or a larger weight for {self._name} in "
                "--split, would work"
            )
        sources, local = self._blend.locate(np.asarray(numbers, np.int64))
        for source in np.unique(sources).tolist():
            rows, size = np.flatnonzero(sources == source), self.sizes[source]
            epochs, within = np.divmod(local[rows], size)
            places = permute(within, size, seed=self.seed, epochs=epochs)
            yield Drawn(source=source, rows=rows, places=places, epochs=epochs)


def open_series(
    corpus: Corpus,
    split: str,
    seed: int,
    cut: Callable[[IndexedDataset, range, str], AnyPart],
) -> list[tuple[Series, list[AnyPart]] | None]:
    """The series of training, validation and test, and the part of each data set in it.

    None for a weight of 0; --split cuts each data set of a blend. cut: makes the part of these
    documents for the split of this name. Raises ValueError, naming the flag, for a split without
    documents.
    """
    blend = Blend([source.weight for source in corpus.sources])
    datasets = [source.data for source in corpus.sources]
    shares = [split_documents(split, len(data.documents) - 1) for data in datasets]
    opened: list[tuple[Series, list[AnyPart]] | None] = []
    for name, ranges in zip(SPLITS, zip(*shares, strict=True), strict=True):
        if not all(ranges):
            opened.append(None)
            continue
        parts = [cut(data, part, name) for data, part in zip(datasets, ranges, strict=True)]
        opened.append((Series(name, [len(part) for part in parts], blend, seed=seed), parts))
    return opened
