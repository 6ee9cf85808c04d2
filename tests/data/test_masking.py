"""Whole-word n-gram masking: what is chosen, and that its statistics are the ones stated."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.bert import Masking

SPECIAL = [0, 1, 2, 3]  # the last one is [MASK]
VOCABULARY = 1000
CONTINUATIONS = np.arange(VOCABULARY) >= 500


def masking(mask_prob: float = 0.15, max_ngram_size: int = 3) -> Masking:
    return Masking(
        mask=3,
        ordinary=np.delete(np.arange(VOCABULARY), SPECIAL),
        is_continuation=CONTINUATIONS,
        mask_prob=mask_prob,
        max_ngram_size=max_ngram_size,
    )


def text(words: int, mean: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Pieces of that many words, of 1 piece or more; mean: pieces of a word."""
    ends = np.cumsum(rng.geometric(1 / mean, words))
    ids = rng.integers(500, VOCABULARY, ends[-1])
    ids[np.concatenate([[0], ends[:-1]])] = rng.integers(4, 500, words)
    return ids


def starts(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where words begin: a segment begins with one, whatever it is cut from."""
    begins = ~CONTINUATIONS[ids]
    begins[0] = True
    return begins


def runs(words: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of words that are to be predicted."""
    edges = np.flatnonzero(np.diff(words.astype(int), prepend=0, append=0))
    return (edges[1::2] - edges[::2]).tolist()


@pytest.mark.parametrize("mean", [1.0, 1.3, 5.0])
@pytest.mark.parametrize("sizes", [(400, 2), (30, 20), (6, 9)])
def test_the_share_of_tokens_is_mask_prob_for_short_samples_and_long_words(
    sizes: Sequence[int], mean: float
) -> None:
    """Within 3 standard deviations: a predicted word more or less in 10, with its pieces."""
    rng, counts = np.random.default_rng(1), np.zeros(2)
    rounds = 60_000 // sum(sizes)
    for _ in range(rounds):
        segments = [text(size, mean, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        counts += [sum(int(each.sum()) for each in chosen), sum(map(len, segments))]
    words = 0.15 * sum(sizes) * rounds
    pieces = 1 + (mean - 1) / mean  # (E[x^2] / E[x]^2) of a geometric number, at most
    assert counts[0] / counts[1] == pytest.approx(0.15, rel=3 * np.sqrt(2 * pieces / words))


@pytest.mark.parametrize("size", [16, 250])
@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_n_grams_of_n_words_are_as_often_as_1_by_n(longest: int, size: int) -> None:
    rng, lengths = np.random.default_rng(2), []
    for _ in range(30_000 // size):
        segments = [text(size, 1.3, rng), text(size, 1.3, rng)]
        chosen = masking(max_ngram_size=longest).choose(segments, rng)
        for ids, where in zip(segments, chosen, strict=True):
            lengths += runs(where[starts(ids)])
    weights = 1 / np.arange(1, longest + 1)
    expected = np.concatenate([[0], weights / weights.sum()])
    found = np.bincount(lengths) / len(lengths)
    assert found == pytest.approx(expected, abs=3 * np.sqrt(0.25 / len(lengths)))


def test_words_are_predicted_whole() -> None:
    rng = np.random.default_rng(3)
    for size in range(1, 80):
        segments = [text(size, 2.5, rng)[size % 3 :], text(20, 2.5, rng)]
        segments = [each for each in segments if len(each)]
        for ids, chosen in zip(segments, masking().choose(segments, rng), strict=True):
            of_words = np.split(chosen, np.flatnonzero(starts(ids))[1:])
            assert all(word.all() or not word.any() for word in of_words)


def test_every_word_away_from_the_ends_of_a_segment_is_as_likely() -> None:
    """0.15 each within 4 standard deviations; by the ends less, as n-grams stay inside."""
    rng, words = np.random.default_rng(4), np.zeros(60)
    ids, count = np.full(60, 4), 10_000
    for _ in range(count):
        words += masking().choose([ids], rng)[0]
    inner = words[4:-4] / count
    assert np.all(abs(inner - inner.mean()) < 4 * np.sqrt(0.15 * 0.85 / count))
    assert inner.mean() == pytest.approx(0.153, abs=0.002)
    assert words.mean() / count == pytest.approx(0.15, abs=0.001)


def test_the_count_of_a_sample_varies_little() -> None:
    """Of 400 words 60 are predicted: k is 36 or 37, and lengths are as their shares say but for 1.

    Drawn one by one, 36 lengths alone would vary by 4.6 words.
    """
    rng, ids = np.random.default_rng(5), np.full(400, 4)
    counts = [int(masking().choose([ids], rng)[0].sum()) for _ in range(500)]
    assert np.mean(counts) == pytest.approx(60, abs=0.2)
    assert np.std(counts) < 1.3


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 2), (3, 4)])
def test_at_least_one_n_gram_however_short_the_sample(sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        segments = [text(size, 1.5, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        words = [each[starts(ids)] for ids, each in zip(segments, chosen, strict=True)]
        assert sum(len(runs(each)) for each in words) == 1
        assert [each.shape for each in chosen] == [ids.shape for ids in segments]


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_the_highest_mask_prob_has_room(longest: int) -> None:
    """N-grams that do not touch can cover half of the words; long ones leave a little over."""
    rng, share = np.random.default_rng(7), []
    for _ in range(300):
        segments = [text(100, 1.0, rng), text(150, 1.0, rng)]
        share += [each.mean() for each in masking(0.5, longest).choose(segments, rng)]
    assert np.mean(share) == pytest.approx(0.5, rel=0.03)


def test_what_hides_a_token_is_drawn_80_10_10() -> None:
    rng = np.random.default_rng(8)
    ids, chosen = rng.integers(4, VOCABULARY, 400_000), rng.random(400_000) < 0.5
    read = masking().hide(ids, chosen, rng)
    assert np.array_equal(read[~chosen], ids[~chosen])
    was, now = ids[chosen], read[chosen]
    shares = [(now == 3).mean(), ((now != 3) & (now != was)).mean(), (now == was).mean()]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.003)
    # Among 996 ids, each is as likely and none is special.
    drawn = np.bincount(now[(now != 3) & (now != was)], minlength=VOCABULARY)
    assert not drawn[SPECIAL].any()
    mean = drawn.sum() / (VOCABULARY - len(SPECIAL))
    assert np.all(abs(drawn[4:] - mean) < 5.5 * np.sqrt(mean))


def test_what_is_drawn_depends_on_the_stream_alone() -> None:
    ids = text(200, 1.3, np.random.default_rng(9))
    first, again, other = (
        masking().choose([ids], np.random.default_rng(seed))[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("mask_prob", [0.0, 0.6])
def test_a_share_that_cannot_be(mask_prob: float) -> None:
    with pytest.raises(ValueError, match=f"--mask-prob {mask_prob} .* --mask-prob 0.15 would work"):
        masking(mask_prob)
