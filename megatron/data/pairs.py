"""Two segments of a block of sentences, as BERT reads them: [CLS] first [SEP] second [SEP]."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPECIAL = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """first, second: tokens of the data set, in the order in which they stand in the sample."""

    first: range
    second: range
    is_swapped: bool
    """Whether `second` comes before `first` in the document."""
    is_short: bool
    """Whether a target below the room there is was drawn."""
    truncated: int
    """Tokens of the sentences that did not fit."""


def draw_pair(
    block: NDArray[np.int64], length: int, short_seq_prob: float, rng: np.random.Generator
) -> Pair:
    """Draw where a block is cut in two, as the original BERT does.

    block: int64 [sentences + 1], where its sentences start, and its end. With probability
    short_seq_prob only a run of its sentences is taken, of a target drawn from 2 to `length` tokens
    or the least number above it that two sentences have. Each start of a sentence but the first is
    as likely to be the cut; half of the pairs are swapped. A pair of more than `length` tokens
    loses tokens of the longer segment, each at the front or at the end.
    """
    is_short = rng.random() < short_seq_prob
    if is_short:
        block = _draw_run(block, 2 + int(rng.random() * (length - 1)), rng)
    cut = 1 + int(rng.random() * (len(block) - 2))
    ordered = range(int(block[0]), int(block[cut])), range(int(block[cut]), int(block[-1]))
    is_swapped = bool(rng.random() < 0.5)
    pair = ordered[::-1] if is_swapped else ordered
    kept = lengths_kept(len(pair[0]), len(pair[1]), length)
    first, second = (_shorten(each, keep, rng) for each, keep in zip(pair, kept, strict=True))
    return Pair(
        first=first,
        second=second,
        is_swapped=is_swapped,
        is_short=is_short,
        truncated=len(pair[0]) + len(pair[1]) - sum(kept),
    )


def _draw_run(block: NDArray[np.int64], target: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At least two sentences, from a drawn one on and then before it as far as the target goes."""
    start = int(rng.random() * (len(block) - 2))
    stop = int(np.searchsorted(block, block[start] + target, "right")) - 1
    stop = max(stop, start + 2)
    start = min(start, int(np.searchsorted(block, block[stop] - target)))
    return block[start : stop + 1]


def lengths_kept(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two lengths: until they fit, the longer loses one, of equals the second."""
    first = min(first, max(room - second, room - room // 2))
    return first, min(second, room - first)


def _shorten(tokens: range, keep: int, rng: np.random.Generator) -> range:
    lost = len(tokens) - keep
    front = int((rng.random(lost) < 0.5).sum())
    return tokens[front : front + keep]
