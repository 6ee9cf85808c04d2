"""Two segments of one document by number, as BERT reads them: [CLS] a [SEP] b [SEP].

A block of sentences is found by its number, without a table. L: tokens that a sample has room for.
Two sorted series of token offsets are merged: the starts of the documents, and the multiples of L.
The number of elements before a document follows from its number and its first token alone. So a
search in the .idx finds the document of an element, and the element's index in it. A document of n
tokens has ceil(n / L) elements, or one more.

A document is cut into ceil(n / L) blocks of about equally many tokens, or fewer if there are not
two sentences for each. Its first elements number its blocks, so that every sentence is in exactly
one block. The remaining elements are spare: at most one in a document with enough sentences, so few
if documents are long. A document of one sentence has no block and is skipped, because BERT learns
from pairs.
"""

import warnings
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import IndexedDataset

SPECIAL = 3  # [CLS] and two [SEP]
SAMPLED_DOCUMENTS = 256  # documents of a split that are checked when it is opened
MAX_DRAWS = 64  # for a spare number, before its neighbours are tried


class Blocks:
    """Blocks of some documents of a data set; len() is the length of the merged series."""

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
        tokens, sentences = int(bounds[-1] - bounds[0]), len(bounds) - 1
        count = min(-(-tokens // self.length), sentences // 2)
        if index >= count:
            return None
        first, last = _cuts(bounds - bounds[0], count)[index : index + 2]
        return bounds[first : last + 1]

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
        """ValueError if no checked document has two sentences, a warning if few have."""
        single, count = self.one_sentence(SAMPLED_DOCUMENTS)
        of = f"--data-path: of {count} documents of the {split} split of {self.data.prefix}"
        if single == count:
            raise ValueError(
                f"{of} none has two sentences; whole documents, cut by tools/preprocess_data.py "
                "--split-sentences, would work"
            )
        if single > count / 2:
            warnings.warn(f"{of} {single} have one sentence only and are skipped", stacklevel=2)

    def _before(self, document: int) -> int:
        """Elements of the merged series before those of this document."""
        tokens = self.data.first_token(document) - self._start
        return document - self.documents.start - (-tokens // self.length)


def _cuts(bounds: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """Sentence at which each block begins, and the number of sentences: int64 [blocks + 1].

    bounds: where the sentences start, from 0 on, and where the last one ends. Each cut is the start
    nearest to an equal share of the tokens, if that leaves every block two sentences.
    """
    sentences, number = len(bounds) - 1, np.arange(blocks + 1)
    shares = number[1:-1] * bounds[-1] // blocks
    after = np.searchsorted(bounds, shares)
    nearest = after - (shares - bounds[after - 1] < bounds[after] - shares)
    cuts = np.concatenate([[0], nearest, [sentences]])
    apart = np.maximum.accumulate(cuts - 2 * number) + 2 * number
    return np.minimum(apart, sentences - 2 * (blocks - number))


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
    kept = lengths_kept(len(first), len(second), length)
    truncated = len(first) + len(second) - sum(kept)
    first, second = (
        _shorten(each, keep, rng) for each, keep in zip((first, second), kept, strict=True)
    )
    return Pair(
        first=first, second=second, is_swapped=is_swapped, is_short=is_short, truncated=truncated
    )


def lengths_kept(first: int, second: int, room: int) -> tuple[int, int]:
    """The two lengths, shortened: until they fit, the longer (the second if equal) loses one."""
    first = min(first, max(room - second, room - room // 2))
    return first, min(second, room - first)


def _shorten(tokens: range, keep: int, rng: np.random.Generator) -> range:
    front = int((rng.random(len(tokens) - keep) < 0.5).sum())
    return tokens[front : front + keep]
