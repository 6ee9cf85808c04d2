"""GPT-2's samples: arrays that are a pure function of (seed, sample number).

The documents of a split are concatenated in file order. Sample k is their tokens [k s, k s + s]:
neighbours share one token, and every token but the first is a label once. Each epoch reads the
samples in its own order; a blend reads them from several data sets (order.py).

b: samples of a batch; s: tokens of a sample (--seq-length).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.batch import Array, TextBatch
from megatron.data.indexed import IndexedDataset, check_highest_id
from megatron.data.order import Series, open_series
from megatron.data.sources import Corpus
from megatron.errors import UsageError, flag, switch


@dataclass(frozen=True, kw_only=True)
class GPT2Batch(TextBatch):
    per_token: ClassVar = ("tokens", "labels", "loss_mask", "positions")
    per_key: ClassVar = ("document_starts", "is_real")

    positions: Array
    """int64 [b, s]"""
    labels: Array = None
    """int64 [b, s]: the token after each token; None if there is no loss."""
    loss_mask: Array = None
    """float32 [b, s]: 1 where the loss counts, else 0."""
    document_starts: Array = None
    """int64 [b, s]: position in its sample at which the document of each token starts, which is the
    first that the token may attend to; None where attention crosses documents."""
    is_cut: Array = None
    """bool [b]: whether the document has more than s + 1 tokens; None if documents are packed."""

    @property
    def num_cut(self) -> int | None:
        return None if self.is_cut is None else int(self.is_cut.sum())

    @property
    def num_empty(self) -> int | None:
        return None if self.is_cut is None else int((self.loss_mask.sum(axis=-1) == 0).sum())


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Treatment of the boundaries between documents."""

    eod: int | None
    """Id of the end mark of each document; None if documents have none."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        on = [name for name in names if getattr(self, name)] if self.eod is None else []
        if on:
            allowed = f"left out{', as {}' * (len(on) - 1)}: the documents of {{}} have no end "
            allowed += "marks (--no-append-eod)"
            others = *map(flag, on[1:]), "--data-path"
            works = tuple(switch(name, False) for name in on)
            raise UsageError(flag(on[0]), None, allowed, *others, works=works)

    def batch(self, window: NDArray[np.int32]) -> GPT2Batch:
        """The batch of samples [b, s + 1]. Each label is the next token, also across documents."""
        tokens, labels = (each.astype(np.int64) for each in (window[:, :-1], window[:, 1:]))
        is_mark = tokens == self.eod
        # A document starts at the sample's first token and after each mark.
        starts = np.zeros(tokens.shape, np.int64)
        if self.reset_position_ids or self.reset_attention_mask:
            rows, columns = np.nonzero(is_mark[:, :-1])
            starts[rows, columns + 1] = columns + 1
            starts = np.maximum.accumulate(starts, axis=1)
        offsets = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
        return GPT2Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=(~(is_mark & self.eod_mask_loss)).astype(np.float32),
            positions=offsets - starts if self.reset_position_ids else offsets,
            document_starts=starts if self.reset_attention_mask else None,
        )


@dataclass(frozen=True)
class TokenRange:
    """The tokens of one data set in one split."""

    data: IndexedDataset
    tokens: range
    seq_length: int

    def __len__(self) -> int:
        """Samples of an epoch."""
        return max(0, len(self.tokens) - 1) // self.seq_length

    def read(self, samples: Sequence[int]) -> NDArray[Any]:
        """Tokens [samples, s + 1], in the file's dtype."""
        starts = [self.tokens.start + sample * self.seq_length for sample in samples]
        for start in starts:
            self.data.will_read(start, start + self.seq_length + 1)
        return np.stack([self.data.read(start, start + self.seq_length + 1) for start in starts])


@dataclass(kw_only=True)
class RandomText:
    """Random tokens, each sample a function of seed and number."""

    vocabulary: int
    length: int
    seed: int
    samples_per_epoch: int = sys.maxsize

    def batch(self, numbers: Sequence[int]) -> GPT2Batch:
        drawn = [np.random.default_rng([self.seed, number]) for number in numbers]
        ids = np.stack([each.integers(self.vocabulary, size=self.length + 1) for each in drawn])
        return Boundaries(eod=None).batch(ids.astype(np.int32))


@dataclass(kw_only=True, eq=False)
class GPT2Dataset(Series[TokenRange]):
    vocab_size: int
    boundaries: Boundaries

    def batch(self, numbers: Sequence[int]) -> GPT2Batch:
        """Raises ValueError past the end of a split that is not endless, and for ids outside the
        vocabulary."""
        window = np.empty((len(numbers), self.splits[0].seq_length + 1), np.int32)
        for tokens, rows, samples in self.locate(numbers):
            ids = tokens.read(samples.tolist())
            check_highest_id(tokens.data.prefix, int(ids.max()), self.vocab_size)
            window[rows] = ids
        return self.boundaries.batch(window)


def open_splits(
    corpus: Corpus[IndexedDataset],
    *,
    split: str,
    seq_length: int,
    seed: int,
    shuffle: bool = True,
    **treatment: bool,
) -> tuple[GPT2Dataset | None, GPT2Dataset | None, GPT2Dataset | None]:
    """See open_series. treatment: fields of Boundaries. Raises UsageError also for a split of fewer
    than seq_length + 1 tokens, and if boundaries are asked for that the data does not mark."""
    boundaries = Boundaries(eod=corpus.eod, **treatment)

    def cut(data: IndexedDataset, documents: range, name: str) -> TokenRange:
        tokens = data.token_range(documents)
        if len(tokens) <= seq_length:
            allowed = f"below the {len(tokens)} tokens of the {name} split of {{}}, to which {{}} "
            others = data.prefix, "--split"  # another split may be shorter
            raise UsageError("--seq-length", seq_length, f"{allowed}may give more", *others)
        return TokenRange(data, tokens, seq_length)

    make = partial(GPT2Dataset, vocab_size=corpus.vocab_size, boundaries=boundaries)
    return open_series(corpus, split, seed, cut, make, shuffle=shuffle)
