"""The yardsticks of the evaluation, `tasks/ngram.py`."""

import math
import re
from pydoc_data.topics import topics

import numpy as np
import pytest

from tasks.ngram import (
    FALLBACK_DISCOUNTS,
    Bigram,
    Unigram,
    bigram_perplexity,
    discounts,
    unigram_perplexity,
)
from tests.refusals import refusal


def words_as_tokens() -> tuple[np.ndarray, int]:
    """Real text: words of pydoc topics, ids in order of sight, 0 ends; how many ids there are."""
    ids: dict[str, int] = {}
    documents = [
        [ids.setdefault(word, len(ids) + 1) for word in re.findall(r"\w+|[^\w\s]", text)] + [0]
        for _, text in sorted(topics.items())
    ]
    train = np.concatenate([np.array(d, np.uint16) for d in documents[1::5] + documents[2::5]])
    return train, len(ids) + 1


def test_probabilities_of_every_context_sum_to_one() -> None:
    train, vocabulary = words_as_tokens()
    model = Bigram.fit(train, vocabulary)
    every = np.arange(vocabulary)
    seen, unseen = np.unique(train), np.setdiff1d(every, train)
    assert len(unseen) > 100
    for previous in [*seen[:: len(seen) // 40], *unseen[::50]]:
        probability = model.probability(np.full(vocabulary, previous), every)
        assert probability.min() > 0
        assert probability.sum() == pytest.approx(1, abs=1e-12)
    unigram = Unigram.fit(train, vocabulary).probability
    assert unigram.min() > 0
    assert unigram.sum() == pytest.approx(1, abs=1e-12)


def test_discounts_follow_chen_and_goodman() -> None:
    counts = np.repeat([0, 1, 2, 3, 4, 9], [7, 50, 20, 12, 8, 3])
    y = 50 / (50 + 2 * 20)
    expected = [0, 1 - 2 * y * 20 / 50, 2 - 3 * y * 12 / 20, 3 - 4 * y * 8 / 12]
    assert discounts(counts) == pytest.approx(expected)


def test_a_case_computed_by_hand() -> None:
    """Documents "1 2", "1 2", "1 1" over the ids 0 (end), 1, 2, 3; fallback discounts."""
    train = np.array([1, 2, 0, 1, 2, 0, 1, 1, 0])
    assert (discounts(np.array([3, 2, 2, 1, 1])) == FALLBACK_DISCOUNTS).all()
    # bigrams: 0>1 three times, 1>2 and 2>0 twice, 1>1 and 1>0 once
    # contexts of 0: {2, 1}, of 1: {0, 1}, of 2: {1}; discounts 1, 1, 0.5 of 5 are spread over 4
    lower = np.array([1, 1, 0.5, 0]) / 5 + 2.5 / 5 / 4
    model = Bigram.fit(train, 4)
    assert model.lower.probability == pytest.approx(lower)

    def p(previous: int, word: int) -> float:
        return float(model.probability(np.array([previous]), np.array([word]))[0])

    assert p(0, 1) == pytest.approx((3 - 1.5) / 3 + 1.5 / 3 * lower[1])
    assert p(1, 2) == pytest.approx((2 - 1) / 4 + (1 + 0.5 + 0.5) / 4 * lower[2])
    assert p(1, 3) == pytest.approx((1 + 0.5 + 0.5) / 4 * lower[3])
    assert p(3, 2) == pytest.approx(lower[2])
    heldout = np.array([1, 2, 0, 3, 0])  # predicted from 0, 1, 2, 0, 3
    steps = [p(0, 1), p(1, 2), p(2, 0), p(0, 3), p(3, 0)]
    expected = math.exp(-sum(map(math.log, steps)) / 5)
    assert bigram_perplexity(train, heldout, 4) == pytest.approx(expected)


def test_streams_that_do_not_fit_are_refused() -> None:
    outside, endless, empty = np.array([3, 0]), np.array([0, 1]), np.array([], np.int64)
    refusal(lambda: unigram_perplexity(outside, np.array([1, 0]), 3))
    assert "--no-append-eod" in str(refusal(lambda: bigram_perplexity(endless[::-1], endless, 3)))
    refusal(lambda: unigram_perplexity(np.array([1, 0]), empty, 3))
