"""What a data set gives: the samples of given numbers, as arrays."""

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


class Samples(Protocol):
    """A series of samples, each a pure function of its number."""

    samples_per_epoch: int

    def batch(self, numbers: Sequence[int], /) -> Batch: ...
