import random

import numpy as np
import pytest

from tools.corpus import ngrams
from tools.corpus.compiled import HAVE_NUMBA
from tools.corpus.ngrams import NgramSet, Words, fold_table, hash_ngrams, split_words

KERNELS = [False, True] if HAVE_NUMBA else [False]
kernels = pytest.mark.parametrize("use_numba", KERNELS)

CHARACTERS = "abAB1 ,.'-\n\u00a0éÉßẞİ\u0131Σ\u03c3ςДд中\u0301🙂\U0001d538_"


def words_by_hand(text: str) -> list[tuple[int, int, str]]:
    """(start, stop, lower case) of every word."""
    words, start = [], None
    for k, character in enumerate(text + " "):
        if character.isalnum():
            start = k if start is None else start
        elif start is not None:
            words.append((start, k, "".join(each.lower()[0] for each in text[start:k])))
            start = None
    return words


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(CHARACTERS, k=length))


def as_lists(words: Words) -> list[list[int]]:
    return [each.tolist() for each in words]


def test_the_table_folds_every_code_point_as_python_does() -> None:
    expected = [
        ord(character.lower()[0]) if character.isalnum() else 0
        for character in map(chr, range(0x110000))
    ]
    assert fold_table().tolist() == expected


@kernels
def test_words_are_where_a_plain_loop_finds_them(use_numba: bool) -> None:
    names: dict[str, int] = {}
    for seed in range(300):
        rng = random.Random(seed)
        text = random_text(rng, rng.randrange(60))
        found = split_words(text, use_numba)
        expected = words_by_hand(text)
        assert found.starts.tolist() == [start for start, _, _ in expected]
        assert found.ends.tolist() == [stop for _, stop, _ in expected]
        for digest, (_, _, word) in zip(found.hashes.tolist(), expected, strict=True):
            assert names.setdefault(word, digest) == digest
    assert len(set(names.values())) == len(names) > 500


@kernels
def test_a_letter_whose_lower_case_is_longer_shifts_nothing(use_numba: bool) -> None:
    words = split_words("İİ Ab", use_numba)
    assert words.starts.tolist() == [0, 3]
    assert words.ends.tolist() == [2, 5]
    assert words.hashes.tolist() == split_words("ii ab", use_numba).hashes.tolist()


@pytest.mark.skipif(not HAVE_NUMBA, reason="numba is not installed")
def test_compiled_and_plain_give_the_same_hashes() -> None:
    rng = random.Random(0)
    for length in (0, 1, 5, 400, 5000):
        text = random_text(rng, length) + "x" * length
        assert as_lists(split_words(text, True)) == as_lists(split_words(text, False))


@kernels
def test_a_text_in_blocks_has_the_same_words(
    use_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    texts = [" ".join(random_text(rng, 10) for _ in range(30)), "a " * 50, " " * 100]
    whole = [as_lists(split_words(text, use_numba)) for text in texts]
    monkeypatch.setattr(ngrams, "BLOCK", 16)
    assert [as_lists(split_words(text, use_numba)) for text in texts] == whole
    assert split_words("x" * 70, use_numba).ends.tolist() == [32, 64, 70]


@kernels
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ngrams_are_found_where_a_plain_loop_finds_them(use_numba: bool, n: int) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        wanted, text = (
            [rng.choice("abc") for _ in range(rng.randrange(size))] for size in (4 * n, 40)
        )
        gram_set = NgramSet(n, hash_ngrams(split_words(" ".join(wanted)).hashes, n), use_numba)
        grams = {tuple(wanted[k : k + n]) for k in range(len(wanted) - n + 1)}
        words = split_words(" ".join(text)).hashes
        found = gram_set.find(words)
        expected = [k for k in range(len(text) - n + 1) if tuple(text[k : k + n]) in grams]
        assert len(gram_set) == len(grams)
        assert found.positions.tolist() == expected
        hashes = hash_ngrams(words, n)[found.positions]
        assert np.array_equal(gram_set.hashes[found.ids], hashes)
        assert np.array_equal(gram_set.ids(hashes), found.ids)


@kernels
def test_the_bitmap_turns_nothing_away_that_is_in_a_large_set(use_numba: bool) -> None:
    words = np.random.default_rng(0).integers(1 << 64, size=200_000, dtype=np.uint64)
    grams = hash_ngrams(words, 13)
    found = NgramSet(13, grams[::2], use_numba).find(words)
    assert found.positions.tolist() == list(range(0, len(grams), 2))
