"""Pairs of texts as BERT reads them: marks, token types, and what is cut where."""

import numpy as np
import pytest

from tasks.readers.inputs import AT_ONCE, PairExamples, Shape, encode, shape_of
from tasks.score import make_batch
from tests.tasks.made import wordpiece

TOKENIZER = wordpiece("cat", "dog", "sits")


def tokens(count: int, first: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def test_a_pair_is_cls_first_sep_second_sep() -> None:
    first, second = (encode([text], TOKENIZER)[0] for text in ("The cat", "the dog sits."))
    found = shape_of(TOKENIZER, 32).join(first, second)
    assert TOKENIZER.decode(found.tokens.tolist()) == "[CLS] the cat [SEP] the dog sits. [SEP]"
    assert found.second == 4, "the second segment begins after the first [SEP]"
    assert found.tokens.dtype == np.int32
    assert (found.tokens[0], found.tokens[3], found.tokens[-1]) == (
        TOKENIZER.cls, TOKENIZER.sep, TOKENIZER.sep,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(10, 3, (5, 3)), (3, 10, (3, 5)), (10, 10, (4, 4)), (0, 9, (0, 8))],
)
def test_the_longer_text_loses_its_end(first: int, second: int, kept: tuple[int, int]) -> None:
    shape = Shape(1, 2, 11)
    found = shape.join(tokens(first, 100), tokens(second, 200))
    a, b = kept
    expected = [1, *tokens(a, 100), 2, *tokens(b, 200), 2]
    assert found.tokens.tolist() == expected
    assert found.second == a + 2


def test_only_the_second_text_is_cut_where_that_is_asked_for() -> None:
    shape = Shape(1, 2, 10, cut="second", first=4)
    found = shape.join(tokens(6, 100), tokens(9, 200))
    assert found.tokens.tolist() == [1, 100, 101, 102, 103, 2, 200, 201, 202, 2]
    short = shape.join(tokens(1, 100), tokens(9, 200))
    assert short.tokens.tolist() == [1, 100, 2, *range(200, 206), 2]


def test_examples_are_made_one_at_a_time_and_make_a_batch() -> None:
    first = encode(["cat", "the dog", "the cat sits"], TOKENIZER)
    second = encode(["dog", "cat", "the dog sits"], TOKENIZER)
    examples = PairExamples(first, second, np.array([2, 0, 1]), shape_of(TOKENIZER, 8))
    assert [each.label for each in examples] == [(2,), (0,), (1,)]
    assert [each.longest for each in examples] == [5, 6, 8]
    assert examples.whole.tolist() == [5, 6, 9]
    with pytest.raises(IndexError):
        examples[-1]
    batch = make_batch(list(examples))
    assert batch.tokens.shape == (3, 8)
    assert batch.token_types.tolist()[1] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert batch.num_tokens == 5 + 6 + 8


def test_texts_encoded_in_portions_have_the_same_tokens() -> None:
    texts = ["cat", "", "the dog sits.", "dog dog", "a"]
    assert encode(texts, TOKENIZER).starts.tolist() == [0, 1, 1, 5, 7, 8]
    parts = encode(many := texts * (AT_ONCE // 4), TOKENIZER)
    assert len(parts) == len(many) > AT_ONCE
    assert [row.tolist() for row in parts] == TOKENIZER.encode_batch(many)
    assert parts.lengths.tolist() == [1, 0, 4, 2, 1] * (AT_ONCE // 4)
    assert np.shares_memory(parts[2], parts.tokens)
    assert (len(encode([], TOKENIZER)), parts.tokens.dtype) == (0, np.int32)


def test_white_space_of_any_kind_parts_words() -> None:
    rows = encode(["the cat sits", "the\ncat \t sits", " the\x0bcat\x85sits\u3000"], TOKENIZER)
    assert len(rows[0]) == 3
    assert rows[0].tolist() == rows[1].tolist() == rows[2].tolist()
