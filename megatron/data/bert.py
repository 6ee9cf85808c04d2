"""BERT's samples (paper, section 5.2): a pure function of (seed, sample number), masks included.

A sample is two segments of one document, filled up with padding. BERT predicts the order of the
segments and some of their words (Masking, below):

    tokens       [CLS] first  [SEP] second [SEP] [PAD] ...     some of them masked
    token_types    0     0      0     1      1     0
    is_real      True                       True  False

Each epoch reads the blocks of sentences in its own order; a blend reads them from several data sets
(order.py). A spare number is replaced by another block, drawn at random. So an epoch, or a whole
validation split, has every block at least once and some blocks again, with another cut and other
masks. All blocks are drawn with the same probability, so that a mean over the split is fair. Each
sample number has its own generator: every epoch draws anew, while every evaluation reads the same
samples. Only uniform numbers are drawn: numpy's other draws may differ between its versions.

b: samples of a batch; s: tokens of a sample (--seq-length), of which 3 are marks.
"""

import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from megatron.data.batch import Array, TextBatch
from megatron.data.indexed import IndexedDataset, check_highest_id
from megatron.data.order import Series, open_series
from megatron.data.sources import Corpus
from megatron.data.tokenizer import BertTokenizer
from megatron.errors import UsageError

SPECIAL = 3  # [CLS] and two [SEP]
SAMPLED_DOCUMENTS = 256  # documents of a split that are checked when it is opened
MAX_DRAWS = 64  # for a spare number, before its neighbours are tried
MASKED_MULTIPLE = 16  # rows to be predicted are padded to it, so that kernels meet few sizes

# Shares of the tokens to be predicted that become [MASK], or a random id; the others stay.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True, kw_only=True)
class BertBatch(TextBatch):
    per_token: ClassVar = ("tokens", "token_types", "labels", "loss_mask")

    token_types: Array
    """int64 [b, s]: 1 for the second segment and the mark after it, else 0."""
    is_real: Array
    """bool [b, s]: False where there is padding."""
    labels: Array = None
    """int64 [b, s]: the tokens before masking, also where nothing is to be predicted."""
    loss_mask: Array = None
    """float32 [b, s]: 1 where a token is to be predicted, else 0."""
    is_swapped: Array = None
    """int64 [b]: 1 where the second segment comes before the first in the document, else 0."""

    # The k masked tokens: index of each among all b x s, and labels. Entries that do not count pad
    # k, so that the same sizes of matmuls recur.
    masked: Array = field(init=False, default=None)
    """int64 [k]"""
    masked_labels: Array = field(init=False, default=None)
    """int64 [k]"""
    is_counted: Array = field(init=False, default=None)
    """bool [k]"""

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            return
        masked = np.flatnonzero(self.loss_mask)
        size = max(1, -(-len(masked) // MASKED_MULTIPLE)) * MASKED_MULTIPLE
        filled = np.pad(masked, (0, size - len(masked)))
        vars(self).update(
            masked=filled,
            masked_labels=self.labels.reshape(-1)[filled],
            is_counted=np.arange(size) < len(masked),
        )

    def trimmed(self) -> Self:
        names = ("masked", "masked_labels", "is_counted")
        return self.with_arrays(**{name: getattr(self, name)[self.is_counted] for name in names})


@dataclass(kw_only=True)
class RandomPairs:
    """Random tokens in two segments without padding, each sample a function of seed and number.

    For every n, mask_prob of all tokens in the first n samples are to be predicted, rounded.
    """

    vocabulary: int
    length: int
    seed: int
    mask_prob: float
    samples_per_epoch: int = sys.maxsize

    def batch(self, numbers: Sequence[int]) -> BertBatch:
        shape = (len(numbers), self.length)
        tokens, is_masked = np.empty(shape, np.int64), np.zeros(shape, np.bool_)
        is_swapped = np.empty(len(numbers), np.int64)
        for row, number in enumerate(numbers):
            rng = np.random.default_rng([self.seed, number])
            tokens[row] = rng.integers(self.vocabulary, size=self.length)
            end, start = (round(self.mask_prob * self.length * n) for n in (number + 1, number))
            is_masked[row, rng.permutation(self.length)[: end - start]] = True
            is_swapped[row] = rng.integers(2)
        return BertBatch(
            tokens=np.where(is_masked, 0, tokens),
            token_types=np.tile(np.arange(self.length) >= self.length // 2, (len(numbers), 1)) * 1,
            is_real=np.ones(shape, np.bool_),
            labels=tokens,
            loss_mask=is_masked.astype(np.float32),
            is_swapped=is_swapped,
        )


class Blocks:
    """Blocks of sentences of some documents of a data set, found by number, without a table.

    Two sorted series of token offsets are merged: the starts of the documents, and the multiples of
    `length`, the tokens that a sample has room for; len() is the length of the merged series. The
    number of elements before a document follows from its number and its first token alone. So a
    search in the .idx finds the document of an element, and the element's index in it. A document
    of n tokens has ceil(n / length) elements, or one more.

    A document is cut into ceil(n / length) blocks of about equally many tokens, or fewer if there
    are not two sentences for each. Its first elements number its blocks, so that every sentence is
    in exactly one block. The remaining elements are spare: at most one in a document with enough
    sentences, so few if documents are long. A document of one sentence has no block and is skipped,
    because BERT learns from pairs.
    """

    def __init__(self, data: IndexedDataset, documents: range, length: int) -> None:
        self.data = data
        self.documents = documents
        self.length = length
        self._start = data.token_range(documents).start
        self._size = self._before(documents.stop)

    def __len__(self) -> int:
        return self._size

    def block(self, number: int) -> NDArray[np.int64] | None:
        """First tokens of the block's sentences, and its end: int64 [sentences + 1]; None if spare.

        They rise. A block has 2 sentences or more; a sentence without tokens does not count. Reads
        the sizes of all sentences of the document.
        """
        document = self.documents[bisect_right(self.documents, number, key=self._before) - 1]
        index = number - self._before(document)
        bounds = self.sentences(document)
        offsets, sentences = bounds - bounds[0], len(bounds) - 1
        count = min(-(-int(offsets[-1]) // self.length), sentences // 2)
        if index >= count:
            return None
        # Each cut is the start of a sentence that is nearest to an equal share of the tokens, if
        # that leaves every block two sentences.
        numbers = np.arange(count + 1)
        shares = numbers[1:-1] * offsets[-1] // count
        after = np.searchsorted(offsets, shares)
        nearest = after - (shares - offsets[after - 1] < offsets[after] - shares)
        cuts = np.concatenate([[0], nearest, [sentences]])
        cuts = np.maximum.accumulate(cuts - 2 * numbers) + 2 * numbers
        cuts = np.minimum(cuts, sentences - 2 * (count - numbers))
        return bounds[cuts[index] : cuts[index + 1] + 1]

    def sentences(self, document: int) -> NDArray[np.int64]:
        """First tokens of the sentences of a document, and its end: int64 [sentences + 1]."""
        sizes = self.data.sequence_sizes(document).astype(np.int64)
        start = self.data.first_token(document)
        return start + np.concatenate([[0], np.cumsum(sizes[sizes > 0])])

    def draw(self, number: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], bool]:
        """(the block of this number, or a drawn one if the number is spare; whether it is spare).

        All blocks are drawn with the same probability. There must be one; see check().
        """
        block = self.block(number)
        is_spare = block is None
        for _ in range(MAX_DRAWS):
            if block is not None:
                return block, is_spare
            number = int(rng.random() * len(self))
            block = self.block(number)
        while block is None:  # hardly any document has two sentences
            number = (number + 1) % len(self)
            block = self.block(number)
        return block, is_spare

    def one_sentence(self, limit: int) -> tuple[int, int]:
        """(documents of one sentence, documents checked): all, or `limit` spread evenly."""
        count = min(limit, len(self.documents))
        checked = [self.documents[i * len(self.documents) // count] for i in range(count)]
        return sum(len(self.sentences(document)) < 3 for document in checked), count

    def check(self, split: str) -> None:
        """UsageError if no checked document has two sentences, a warning if few have."""
        single, count = self.one_sentence(SAMPLED_DOCUMENTS)
        of = f"of {count} documents of the {split} split"
        if single == count:
            allowed = f"whole documents, cut by tools/preprocess_data.py --split-sentences: {of} "
            raise UsageError("--data-path", self.data.prefix, f"{allowed}none has two sentences")
        if single > count / 2:
            text = f"--data-path {self.data.prefix}: {of} {single} have one sentence only"
            warnings.warn(f"{text} and are skipped", stacklevel=2)

    def _before(self, document: int) -> int:
        """Elements of the merged series before those of this document."""
        tokens = self.data.first_token(document) - self._start
        return document - self.documents.start - (-tokens // self.length)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """first, second: tokens of the data set, in the order in which they stand in the sample."""

    first: range
    second: range
    is_swapped: bool
    """Whether `second` comes before `first` in the document."""
    is_short: bool
    """Whether a target length was drawn, which makes the sample shorter."""
    truncated: int
    """Tokens of the sentences that did not fit."""


def draw_pair(
    block: NDArray[np.int64], length: int, short_seq_prob: float, rng: np.random.Generator
) -> Pair:
    """Draw where a block is cut in two, as in the original BERT.

    block: int64 [sentences + 1], the starts of its sentences, and its end. With probability
    short_seq_prob only a run of its sentences is used: as many as fit in a target drawn from 2 to
    `length` tokens, but at least two. Each start of a sentence but the first is equally likely to
    be the cut; half of the pairs are swapped. A pair of more than `length` tokens loses tokens of
    the longer segment, each at its front or its end.
    """
    is_short = rng.random() < short_seq_prob
    if is_short:
        # At least two sentences: from a drawn one on, then backwards, as far as the target allows.
        target = 2 + int(rng.random() * (length - 1))
        start = int(rng.random() * (len(block) - 2))
        stop = int(np.searchsorted(block, block[start] + target, "right")) - 1
        stop = max(stop, start + 2)
        start = min(start, int(np.searchsorted(block, block[stop] - target)))
        block = block[start : stop + 1]
    cut = 1 + int(rng.random() * (len(block) - 2))
    first = range(int(block[0]), int(block[cut]))
    second = range(int(block[cut]), int(block[-1]))
    is_swapped = bool(rng.random() < 0.5)
    if is_swapped:
        first, second = second, first
    total = len(first) + len(second)
    kept = lengths_kept(len(first), len(second), length)
    front = int((rng.random(len(first) - kept[0]) < 0.5).sum())
    first = first[front : front + kept[0]]
    front = int((rng.random(len(second) - kept[1]) < 0.5).sum())
    second = second[front : front + kept[1]]
    return Pair(
        first=first,
        second=second,
        is_swapped=is_swapped,
        is_short=is_short,
        truncated=total - sum(kept),
    )


def lengths_kept(first: int, second: int, room: int) -> tuple[int, int]:
    """The two lengths, shortened: until they fit, the longer (the second if equal) loses one."""
    first = min(first, max(room - second, room - room // 2))
    return first, min(second, room - first)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Whole-word n-gram masking: chooses the tokens to be predicted and replaces them.

    A word is a piece and the continuations after it. An n-gram has 1 to max_ngram_size words, n of
    them with probability in proportion to 1/n; the mean of n is max_ngram_size / (1 + 1/2 + ... +
    1/max_ngram_size). A sample of W words gets k n-grams: mask_prob W / mean, rounded up or down at
    random so that this is the mean of k. So the expected shares are simple, for words of any
    length:

        tokens to be predicted         mask_prob of all but the marks
        n-grams of 1, 2, 3, ... words  as 1 : 1/2 : 1/3 ...
        a token to be predicted        0.8 [MASK], 0.1 a random id, 0.1 itself, drawn independently

    All positions of the n-grams in a segment are equally probable, but n-grams do not touch: a run
    of words to be predicted is one n-gram. A sample of few words (under 11 with the usual settings)
    still gets one n-gram, so its share is larger. An n-gram is shorter if its segment has fewer
    words.
    """

    mask: int
    """Id of [MASK]."""
    ordinary: NDArray[np.int64]
    """Ids that may replace a token."""
    is_continuation: NDArray[np.bool_]
    """[vocabulary]: whether a piece continues the word before it."""
    mask_prob: float
    max_ngram_size: int

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob <= 0.5:
            allowed = "above 0 and at most 0.5"
            raise UsageError("--mask-prob", self.mask_prob, allowed, works=0.15)
        assert self.max_ngram_size >= 1

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Probabilities of n-grams of up to 1, 2, ... words."""
        sums = np.cumsum(1 / np.arange(1, self.max_ngram_size + 1))
        return sums / sums[-1]

    def choose(
        self, segments: Sequence[NDArray[np.int64]], rng: np.random.Generator
    ) -> list[NDArray[np.bool_]]:
        """Whether each token is to be predicted, by segment."""
        words = []  # word number of each piece, from 0
        for segment in segments:
            begins = ~self.is_continuation[segment]
            begins[0] = True  # even where the segment was cut within a word
            words.append(np.cumsum(begins) - 1)
        num_words = [int(word[-1]) + 1 for word in words]
        # N-grams per segment. One offset rounds all counts, so that their sum is rounded, too.
        mean = float(1 + (1 - self._shares).sum())
        expected = np.array(num_words) * self.mask_prob / mean
        expected *= max(1.0, 1 / expected.sum())
        ends = np.floor(np.cumsum(expected) + rng.random()).astype(int)
        # Words of each n-gram, in random order. Each length occurs count x its share times, within
        # 1. Independent draws would have the same mean, but vary more from sample to sample.
        count = int(ends[-1])
        levels = (np.argsort(rng.random(count), kind="stable") + rng.random()) / count
        lengths = np.split(np.searchsorted(self._shares, levels, "right") + 1, ends[:-1])
        return [
            _spread(ngrams, size, rng)[word]
            for ngrams, size, word in zip(lengths, num_words, words, strict=True)
        ]

    def replace(
        self, tokens: NDArray[np.int64], is_masked: NDArray[np.bool_], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """The tokens that the model reads."""
        where = np.flatnonzero(is_masked)
        kind, drawn = rng.random((2, len(where)))
        others = self.ordinary[(drawn * len(self.ordinary)).astype(np.int64)]
        unmasked = np.where(kind < MASK_SHARE + RANDOM_SHARE, others, tokens[where])
        replaced = tokens.copy()
        replaced[where] = np.where(kind < MASK_SHARE, self.mask, unmasked)
        return replaced


def _spread(lengths: NDArray[np.int64], words: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """bool [words]: n-grams of these lengths, none touching; all placements are equally likely."""
    lengths = np.minimum(lengths, words)
    lengths = lengths[np.cumsum(lengths) + np.arange(len(lengths)) <= words]
    free = words - int(lengths.sum())
    # Number of other words before each n-gram: all different, so that no two n-grams touch.
    before = np.sort(np.argsort(rng.random(free + 1), kind="stable")[: len(lengths)])
    ends = before + np.cumsum(lengths)
    steps = np.zeros(words + 1, np.int64)
    steps[ends - lengths] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1]) > 0


@dataclass(frozen=True, kw_only=True)
class BertSample:
    """A sample before it is put into a batch. Each list holds one array [n] per segment."""

    pair: Pair
    is_spare: bool
    """Whether the sample number has no block of its own, so that one was drawn."""
    labels: list[NDArray[np.int64]]
    """Tokens as they are in the document."""
    is_masked: list[NDArray[np.bool_]]
    """Whether each of them is to be predicted."""
    tokens: list[NDArray[np.int64]]
    """Tokens that the model reads."""


@dataclass(kw_only=True, eq=False)
class BertDataset(Series[Blocks]):
    tokenizer: BertTokenizer
    masking: Masking
    short_seq_prob: float

    def batch(self, numbers: Sequence[int]) -> BertBatch:
        """Raises ValueError past the end of a split that is not endless, and for ids outside the
        vocabulary."""
        samples, marks = self.samples(numbers), self.tokenizer
        shape = len(samples), self.splits[0].length + SPECIAL
        labels, types = np.full(shape, marks.pad, np.int64), np.zeros(shape, np.int64)
        is_real, loss_mask = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        labels[:, 0] = marks.cls
        tokens = labels.copy()
        for row, sample in enumerate(samples):
            start = 1
            for segment in (0, 1):
                stop = start + len(sample.labels[segment])
                labels[row, start:stop] = sample.labels[segment]
                tokens[row, start:stop] = sample.tokens[segment]
                loss_mask[row, start:stop] = sample.is_masked[segment]
                labels[row, stop] = tokens[row, stop] = marks.sep
                types[row, start : stop + 1] = segment
                start = stop + 1
            is_real[row, :start] = True
        return BertBatch(
            tokens=tokens,
            token_types=types,
            is_real=is_real,
            labels=labels,
            loss_mask=loss_mask,
            is_swapped=np.array([sample.pair.is_swapped for sample in samples], np.int64),
        )

    def samples(self, numbers: Sequence[int]) -> list[BertSample]:
        """The samples of batch(), each with how it was drawn."""
        samples: dict[int, BertSample] = {}
        for blocks, rows, block_numbers in self.locate(numbers):
            for row, block_number in zip(rows.tolist(), block_numbers.tolist(), strict=True):
                key = (self.seed % 2**64 << 64) + numbers[row]
                rng = np.random.Generator(np.random.Philox(key=key))
                block, is_spare = blocks.draw(block_number, rng)
                pair = draw_pair(block, blocks.length, self.short_seq_prob, rng)
                labels = [
                    blocks.data.read(segment.start, segment.stop).astype(np.int64)
                    for segment in (pair.first, pair.second)
                ]
                highest = max(int(ids.max()) for ids in labels)
                check_highest_id(blocks.data.prefix, highest, len(self.masking.is_continuation))
                is_masked = self.masking.choose(labels, rng)
                tokens = [
                    self.masking.replace(ids, where, rng)
                    for ids, where in zip(labels, is_masked, strict=True)
                ]
                samples[row] = BertSample(
                    pair=pair, is_spare=is_spare, labels=labels, is_masked=is_masked, tokens=tokens
                )
        return [samples[row] for row in range(len(numbers))]


def open_bert_splits(
    corpus: Corpus[IndexedDataset],
    tokenizer: BertTokenizer,
    *,
    split: str,
    seq_length: int,
    seed: int,
    mask_prob: float,
    short_seq_prob: float,
    max_ngram_size: int,
    shuffle: bool = True,
) -> tuple[BertDataset | None, BertDataset | None, BertDataset | None]:
    """See open_series. Raises UsageError also for a split without a document of two sentences, for
    documents that are not split into sentences, and if seq_length has no room for two segments."""
    if seq_length < SPECIAL + 2:
        allowed = f"at least {SPECIAL + 2}, for two segments"
        raise UsageError("--seq-length", seq_length, allowed, works=SPECIAL + 2)
    marks = [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask]
    masking = Masking(
        mask=tokenizer.mask,
        ordinary=np.delete(np.arange(tokenizer.vocab_size), marks),
        is_continuation=tokenizer.is_continuation,
        mask_prob=mask_prob,
        max_ngram_size=max_ngram_size,
    )

    def cut(data: IndexedDataset, documents: range, name: str) -> Blocks:
        blocks = Blocks(data, documents, seq_length - SPECIAL)
        blocks.check(name)
        return blocks

    make = partial(BertDataset, tokenizer=tokenizer, masking=masking, short_seq_prob=short_seq_prob)
    return open_series(corpus, split, seed, cut, make, shuffle=shuffle)
