"""Batches of a data set: samples as arrays, and the sample numbers that each rank reads."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Protocol, Self

import numpy as np

Array = Any  # a numpy array from a data set, a torch tensor on a device


@dataclass(frozen=True, kw_only=True)
class Batch:
    """b samples of s tokens. Each kind of model adds its own fields: arrays whose first dim is the
    sample. The first of them is never None."""

    unit: ClassVar[str] = "tokens"
    """Name of what `num_tokens` counts."""
    per_token: ClassVar[tuple[str, ...]] = ()
    """Fields whose last dim is the token of a sample: context ranks take their own tokens of them.
    Each class lists all of its own."""
    per_key: ClassVar[tuple[str, ...]] = ()
    """Fields whose last dim is the token, too, and which attention reads of all tokens."""
    numbers: Array = None
    """int64 [b]: sample numbers, counted over the whole training; dropout depends on them. None in
    evaluation."""
    token_order: Array = None
    """int64 [tokens]: position of each token in its sample; None where all tokens are there."""

    @property
    def num_samples(self) -> int:
        added = fields(self)[len(fields(Batch)) :]  # by the kind of model
        return len(getattr(self, added[0].name))

    @property
    def num_tokens(self) -> int:
        """Tokens that are read, without padding; the number of samples if they have no tokens."""
        return self.num_samples

    @property
    def num_cut(self) -> int | None:
        """Samples that are cut because they are too long; None if none can be."""
        return None

    @property
    def num_empty(self) -> int | None:
        """Samples without a token to be predicted; None if there can be none."""
        return None

    def trimmed(self) -> Self:
        """The batch without entries that only fill it up to sizes that kernels like."""
        return self

    def with_arrays(self, **arrays: Array) -> Self:
        """The batch with these fields changed; dataclasses.replace would derive others again."""
        batch = copy(self)
        for name, array in arrays.items():
            object.__setattr__(batch, name, array)
        return batch

    def numbered(self, numbers: Array) -> Self:
        """The same samples with these numbers."""
        return self.with_arrays(numbers=numbers)

    @property
    def seq_length(self) -> int | None:
        """Tokens of a sample in this batch; None if it has no field per token."""
        return getattr(self, self.per_token[0]).shape[-1] if self.per_token else None

    def take(self, order: Array) -> Self:
        """The batch with only the tokens at positions `order`, int64 [at most s], of each sample.
        Fields `per_key` stay whole."""
        arrays = {"token_order": order if self.token_order is None else self.token_order[order]}
        for name in self.per_token:
            if (array := getattr(self, name)) is not None:
                arrays[name] = array[..., order]
        return replace(self, **arrays)

    def filled(self, count: int) -> Self:
        """The batch with `count` tokens after those of each sample, which are no text and do not
        count: all their fields are 0."""
        arrays = {}
        for name in (*self.per_token, *self.per_key):
            if (array := getattr(self, name)) is not None:
                arrays[name] = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, count)])
        return replace(self, **arrays)


@dataclass(frozen=True, kw_only=True)
class TextBatch(Batch):
    per_token: ClassVar[tuple[str, ...]] = ("tokens",)
    per_key: ClassVar[tuple[str, ...]] = ("is_real",)

    tokens: Array
    """int64 [b, s], or [b, sequences of a sample, s]"""
    is_real: Array = None
    """bool, as tokens: False where there is padding; None without any."""

    def filled(self, count: int) -> Self:
        is_real = np.ones(self.tokens.shape, np.bool_) if self.is_real is None else self.is_real
        return super(TextBatch, self.with_arrays(is_real=is_real)).filled(count)

    @property
    def num_tokens(self) -> int:
        return prod(self.tokens.shape) if self.is_real is None else int(self.real_here.sum())

    @property
    def real_here(self) -> Array:
        """`is_real` of the tokens that are there."""
        return self.is_real if self.token_order is None else self.is_real[..., self.token_order]


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(TextBatch):
    """Labelled examples to fine-tune BERT on, padded to the longest sequence among them. With
    several options, tokens, token_types and is_real have three dims, [b, options, s]."""

    per_token: ClassVar = ("tokens", "token_types")

    token_types: Array  # int64 [b, s]
    is_real: Array  # bool [b, s], False where there is padding
    labels: Array  # int64 [b, 1]; [b, 2] for spans, [b, 0] where they are not known
    counted: Array  # float32 [b], 0 for an example that only fills the batch

    @property
    def num_tokens(self) -> int:
        return int(self.real_here[self.counted > 0].sum())


class Samples(Protocol):
    """A series of samples, each a pure function of its number."""

    samples_per_epoch: int
    """Numbers below it belong to different samples."""

    def batch(self, numbers: Sequence[int], /) -> Batch:
        """The samples of these numbers, in their order; called from several threads."""
        ...


def micro_batch_numbers(
    consumed: int, *, global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int
) -> list[range]:
    """Sample numbers of this rank's micro-batches in the step that starts at sample `consumed`.

    Together, data-parallel ranks read [consumed, consumed + global_batch_size), each number once.
    """
    at_once = micro_batch_size * data_size
    assert global_batch_size % at_once == 0
    first = consumed + data_rank * micro_batch_size
    starts = range(first, first + global_batch_size, at_once)
    return [range(start, start + micro_batch_size) for start in starts]
