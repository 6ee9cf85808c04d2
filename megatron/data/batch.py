"""What a data set gives: samples of given numbers, as arrays; and which numbers a rank reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some samples; each kind of model has fields of its own. b: samples, s: tokens of each."""

    tokens: NDArray[np.int64]
    """[b, s], or [b, sequences of a sample, s]"""

    @property
    def num_tokens(self) -> int:
        """Tokens that are read; padding does not count."""
        return self.tokens.size


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(Batch):
    """Labelled examples to fine-tune BERT on, padded to the longest sequence among them.

    With several options tokens, token_types and is_real have three dims, [b, options, s].
    """

    token_types: NDArray[np.int64]  # [b, s]
    is_real: NDArray[np.bool_]  # [b, s], False where there is padding
    labels: NDArray[np.int64]  # [b, 1], [b, 2] of spans, [b, 0] where they are not known
    counted: NDArray[np.float32]  # [b], 0 of an example that only fills the batch

    @property
    def num_tokens(self) -> int:
        return int(self.is_real[self.counted > 0].sum())


class Samples(Protocol):
    """A series of samples, each a pure function of its number."""

    samples_per_epoch: int

    def batch(self, numbers: Sequence[int], /) -> Batch: ...


def micro_batches(
    consumed: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
) -> list[range]:
    """Sample numbers of this rank's micro-batches of the step that starts at sample `consumed`.

    All ranks together read [consumed, consumed + global_batch_size), each number once, whatever
    the micro-batch and data-parallel sizes.
    """
    at_once = micro_batch_size * data_size
    assert global_batch_size % at_once == 0
    first = consumed + data_rank * micro_batch_size
    starts = range(first, first + global_batch_size, at_once)
    return [range(start, start + micro_batch_size) for start in starts]
