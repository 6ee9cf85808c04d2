"""The two segments of a sample: where a block of sentences is cut, and what is left out of it."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from megatron.data.pairs import Pair, draw_pair, lengths_kept


def pairs(block: list[int], length: int, short: float, count: int) -> list[Pair]:
    rng = np.random.default_rng(1)
    return [draw_pair(np.array(block), length, short, rng) for _ in range(count)]


def test_the_cut_is_any_start_of_a_sentence_and_half_of_the_pairs_are_swapped() -> None:
    """4,000 pairs; each share within 4 standard deviations."""
    found = Counter()
    for pair in pairs([100, 103, 108, 110], 20, 0.0, 4000):
        assert (pair.truncated, pair.is_short) == (0, False)
        found[pair.first, pair.second, pair.is_swapped] += 1
    cuts = [range(100, 103), range(103, 110)], [range(100, 108), range(108, 110)]
    expected = {(*cut, False) for cut in cuts} | {(*cut[::-1], True) for cut in cuts}
    assert set(found) == expected
    assert all(abs(count - 1000) < 110 for count in found.values())


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((10, 4), (6, 4)),
        ((4, 10), (4, 6)),
        ((9, 9), (5, 5)),
        ((100, 6), (5, 5)),
        ((5, 6), (5, 5)),
        ((1, 10**7), (1, 9)),
        ((3, 7), (3, 7)),
    ],
)
def test_the_longer_segment_is_shortened(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    ends = [1000, 1000 + lengths[0], 1000 + sum(lengths)]
    for pair in pairs(ends, 10, 0.0, 50):
        sides = [pair.first, pair.second][:: -1 if pair.is_swapped else 1]
        assert tuple(map(len, sides)) == kept
        assert ends[0] <= sides[0].start < sides[0].stop <= ends[1]
        assert ends[1] <= sides[1].start < sides[1].stop <= ends[2]
        assert pair.truncated == sum(lengths) - sum(kept)


def test_shortening_is_that_of_a_loop_over_tokens() -> None:
    """As the original BERT: the longer of the two, the second of equals, until both fit."""
    for room, a, b in product((0, 1, 6, 7), range(12), range(12)):
        first, second = a, b
        while first + second > room:
            if first > second:
                first -= 1
            else:
                second -= 1
        assert lengths_kept(a, b, room) == (first, second), (a, b, room)


def test_tokens_are_lost_at_the_front_and_at_the_end_alike() -> None:
    """60 of 100 tokens, each by a coin: 30 at the front, within 4 standard deviations."""
    fronts = [
        min(each.first.start, each.second.start) for each in pairs([0, 100, 140], 80, 0.0, 1000)
    ]
    assert np.mean(fronts) == pytest.approx(30, abs=4 * np.sqrt(15 / 1000))
    assert np.std(fronts) == pytest.approx(np.sqrt(15), rel=0.1)


def test_short_samples_are_runs_of_sentences_within_a_target() -> None:
    """Sentences of 2 tokens: a target of t takes t // 2 of them, but two at least."""
    bounds = list(range(0, 101, 2))
    found = pairs(bounds, 100, 1.0, 5000)
    assert all(each.is_short and not each.truncated for each in found)
    lengths = [len(each.first) + len(each.second) for each in found]
    expected = [max(4, t // 2 * 2) for t in range(2, 101)]
    assert np.mean(lengths) == pytest.approx(np.mean(expected), abs=4 * 29 / np.sqrt(5000))
    assert (min(lengths), max(lengths)) == (4, 100)
    starts = Counter(min(each.first.start, each.second.start) for each in found)
    assert {0, 96} <= set(starts) <= set(bounds[:-2])
    share = np.mean([each.is_short for each in pairs(bounds, 100, 0.1, 5000)])
    assert share == pytest.approx(0.1, abs=0.017)
