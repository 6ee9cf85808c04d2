"""BERT's samples (paper, section 5.2): a pure function of (seed, sample number), masks included.

A sample is a block of sentences of one document (see blocks.py), cut into two segments whose order
BERT tells (pairs.py) and of which it predicts words (masking.py); padding fills it up:

    tokens       [CLS] first  [SEP] second [SEP] [PAD] ...     some of them hidden
    token_types    0     0      0     1      1     0
    is_real      True                       True  False

An epoch takes the blocks in an order of its own, a blend takes them from several data sets (see
series.py). In place of a spare number another block is drawn, so in an epoch, or in a whole
validation split, every block comes at least once and some come again, with another cut and other
masks; all with the same probability, so that a mean over the split is a fair one. What is drawn for
a sample number is drawn from a random stream of its own: each epoch draws anew, while each
evaluation reads the same samples. All is made of the stream's uniform numbers: what else numpy
draws may differ between its versions.

b: samples of a batch; s: tokens of a sample (--seq-length), of which 3 are marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.batch import Batch
from megatron.data.blocks import Blocks
from megatron.data.indexed import IndexedDataset
from megatron.data.masking import Masking
from megatron.data.pairs import SPECIAL, Pair, draw_pair
from megatron.data.series import Series, open_series
from megatron.data.sources import Corpus, Source
from megatron.data.verify import check_highest_id
from megatron.data.wordpiece import BertTokenizer


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    token_types: NDArray[np.int64]
    """[b, s]: 1 for the second segment and the mark after it, else 0."""
    is_real: NDArray[np.bool_]
    """[b, s]: False where there is padding."""
    labels: NDArray[np.int64]
    """[b, s]: what stands there, also where nothing is to be predicted."""
    loss_mask: NDArray[np.float32]
    """[b, s]: 1 where a token is to be predicted, else 0."""
    is_swapped: NDArray[np.int64]
    """[b]: 1 where the second segment comes before the first in the document, else 0."""

    @property
    def num_tokens(self) -> int:
        return int(self.is_real.sum())


@dataclass(frozen=True, kw_only=True)
class BertSample:
    """A sample before it is put into a batch. Each list holds an array [n] of each segment."""

    pair: Pair
    is_spare: bool
    """Whether the sample number belongs to no block, so that one was drawn."""
    stands: list[NDArray[np.int64]]
    """What stands in the document."""
    chosen: list[NDArray[np.bool_]]
    """Where it is to be predicted."""
    reads: list[NDArray[np.int64]]
    """What the model reads."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    pad: int
    cls: int
    sep: int

    def batch(self, samples: Sequence[BertSample], seq_length: int) -> BertBatch:
        shape = len(samples), seq_length
        labels, types = np.full(shape, self.pad, np.int64), np.zeros(shape, np.int64)
        is_real, chosen = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        for row, sample in enumerate(samples):
            middle = 1 + len(sample.stands[0])
            end = middle + 1 + len(sample.stands[1])
            first, second = slice(1, middle), slice(middle + 1, end)
            labels[row, [0, middle, end]] = self.cls, self.sep, self.sep
            labels[row, first], labels[row, second] = sample.stands
            chosen[row, first], chosen[row, second] = sample.chosen
            types[row, middle + 1 : end + 1] = 1
            is_real[row, : end + 1] = True
        tokens = labels.copy()
        tokens[chosen] = np.concatenate(
            [
                read[where]
                for sample in samples
                for read, where in zip(sample.reads, sample.chosen, strict=True)
            ]
        )
        return BertBatch(
            tokens=tokens,
            token_types=types,
            is_real=is_real,
            labels=labels,
            loss_mask=chosen.astype(np.float32),
            is_swapped=np.array([sample.pair.is_swapped for sample in samples], np.int64),
        )


class BertDataset:
    """A split of a data set or of a blend, as a series of samples.

    samples_per_epoch: samples until the first data set of the blend begins anew.
    """

    def __init__(
        self,
        series: Series,
        parts: Sequence[Blocks],
        *,
        marks: Marks,
        masking: Masking,
        short_seq_prob: float,
    ) -> None:
        self.samples_per_epoch = series.samples_per_epoch
        self.parts = tuple(parts)
        self._series = series
        self._marks = marks
        self._masking = masking
        self._short_seq_prob = short_seq_prob

    def batch(self, numbers: Sequence[int]) -> BertBatch:
        """The samples of these numbers, in their order.

        Raises ValueError past the end of a split that is not endless, and for ids outside the
        vocabulary.
        """
        return self._marks.batch(self.samples(numbers), self.parts[0].length + SPECIAL)

    def samples(self, numbers: Sequence[int]) -> list[BertSample]:
        """As batch(), with what became of each."""
        samples: dict[int, BertSample] = {}
        for drawn in self._series.locate(numbers):
            part = self.parts[drawn.source]
            for row, place in zip(drawn.rows.tolist(), drawn.places.tolist(), strict=True):
                samples[row] = self._draw(part, place, numbers[row])
        return [samples[row] for row in range(len(numbers))]

    def _draw(self, part: Blocks, place: int, number: int) -> BertSample:
        """The sample of this number, from a place in the numbers of a data set."""
        key = (self._series.seed % 2**64 << 64) + number
        rng = np.random.Generator(np.random.Philox(key=key))
        block, is_spare = part.draw(place, rng)
        pair = draw_pair(block, part.length, self._short_seq_prob, rng)
        tokens = [part.data.tokens[each.start : each.stop] for each in (pair.first, pair.second)]
        stands = [each.astype(np.int64) for each in tokens]
        vocab_size = len(self._masking.is_continuation)
        check_highest_id(part.data.prefix, max(int(each.max()) for each in stands), vocab_size)
        chosen = self._masking.choose(stands, rng)
        reads = [
            self._masking.hide(ids, where, rng) for ids, where in zip(stands, chosen, strict=True)
        ]
        return BertSample(pair=pair, is_spare=is_spare, stands=stands, chosen=chosen, reads=reads)


def open_bert_splits(
    corpus: Corpus,
    tokenizer: BertTokenizer,
    *,
    split: str,
    seq_length: int,
    seed: int,
    mask_prob: float,
    short_seq_prob: float,
    max_ngram_size: int,
) -> tuple[BertDataset | None, BertDataset | None, BertDataset | None]:
    """(training, validation, test), None for a weight of 0; --split cuts each data set of a blend.

    Raises ValueError, naming the flag, for a split without documents or without any of two
    sentences, for documents that are not cut into sentences, for ones with end marks, and where
    there is no room for two segments.
    """
    if seq_length < SPECIAL + 2:
        raise ValueError(
            f"--seq-length {seq_length} has no room for two segments and their marks; "
            f"--seq-length {SPECIAL + 2} would work"
        )
    for source in corpus.sources:
        _refuse_marks(source)
    marks = Marks(pad=tokenizer.pad, cls=tokenizer.cls, sep=tokenizer.sep)
    masking = Masking(
        mask=tokenizer.mask,
        ordinary=np.delete(
            np.arange(tokenizer.vocab_size),
            [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask],
        ),
        is_continuation=tokenizer.is_continuation,
        mask_prob=mask_prob,
        max_ngram_size=max_ngram_size,
    )

    def cut(data: IndexedDataset, documents: range, name: str) -> Blocks:
        blocks = Blocks(data, documents, seq_length - SPECIAL)
        blocks.check(name)
        return blocks

    training, validation, test = (
        BertDataset(*opened, marks=marks, masking=masking, short_seq_prob=short_seq_prob)
        if opened is not None
        else None
        for opened in open_series(corpus, split, seed, cut)
    )
    return training, validation, test


def _refuse_marks(source: Source) -> None:
    if source.description is not None and source.description.eod is not None:
        raise ValueError(
            f"--data-path: the documents of {source.data.prefix} end with the mark "
            f"{source.description.eod}, which BERT does not read; one that "
            "tools/preprocess_data.py wrote without --append-eod would work"
        )
