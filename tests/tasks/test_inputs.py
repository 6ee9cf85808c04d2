"""The input of fine-tuned tasks: pairs as BERT reads them, and the checks of the input."""

import string
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokenizer import BertWordPieceCase
from tasks.protocol import ChecksConfig
from tasks.readers import inputs
from tasks.readers.glue import check_classes
from tasks.score import make_batch
from tests.refusals import field_of, refusal
from tests.tasks.made import wordpiece

UPPER = string.ascii_uppercase
TOKENIZER = wordpiece("cat", "dog", "sits")
CASED = wordpiece(*UPPER, *(f"##{each}" for each in UPPER), kind=BertWordPieceCase)


def tokens(count: int, first: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


LONGEST = inputs.Shape(1, 2, 11)
SECOND = inputs.Shape(1, 2, 10, cut="second", first=4)


@pytest.mark.parametrize(
    ("shape", "first", "second", "kept"),
    [
        (LONGEST, 10, 3, (5, 3)), (LONGEST, 3, 10, (3, 5)), (LONGEST, 10, 10, (4, 4)),
        (LONGEST, 0, 9, (0, 8)), (SECOND, 6, 9, (4, 3)), (SECOND, 1, 9, (1, 6)),
    ],
)  # fmt: skip
def test_long_pairs_are_cut(
    shape: inputs.Shape, first: int, second: int, kept: tuple[int, int]
) -> None:
    found = shape.join(tokens(first, 100), tokens(second, 200))
    a, b = kept
    assert found.tokens.tolist() == [1, *tokens(a, 100), 2, *tokens(b, 200), 2]
    assert found.second == a + 2


def test_pair_examples() -> None:
    first = inputs.encode(["cat", "the dog", "the cat sits"], TOKENIZER)
    second = inputs.encode(["dog", "cat", "the dog sits"], TOKENIZER)
    examples = inputs.PairExamples(
        first, second, np.array([2, 0, 1]), inputs.shape_of(TOKENIZER, 8)
    )
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
    texts = ["cat", "", "the\vdog \t\x85sits.\u3000", "dog dog", "a"]  # white space of any kind
    assert inputs.encode(texts, TOKENIZER).starts.tolist() == [0, 1, 1, 5, 7, 8]
    parts = inputs.encode(many := texts * (inputs.AT_ONCE // 4), TOKENIZER)
    assert len(parts) == len(many) > inputs.AT_ONCE
    expected = TOKENIZER.encode_batch([" ".join(text.split()) for text in many])
    assert [row.tolist() for row in parts] == expected
    assert parts.lengths.tolist() == [1, 0, 4, 2, 1] * (inputs.AT_ONCE // 4)
    assert np.shares_memory(parts[2], parts.tokens)
    assert (len(inputs.encode([], TOKENIZER)), parts.tokens.dtype) == (0, np.int32)


MIXED = ["The cat sits here.", "A dog is there."] * 20
LOWER = [text.lower() for text in MIXED]
LENGTHS = [10] * 7 + [40, 50, 90]
Check = Callable[[], dict[str, Any]]


def casing(texts: list[str], *, allow: bool = False, tokenizer: Any = CASED) -> Check:
    return lambda: inputs.check_casing("a", texts, tokenizer, allow)


def unknown(count: int) -> Check:
    """So many of 100 tokens, of which 5 may be."""
    ids = np.array([TOKENIZER.unknown] * count + [7] * (100 - count))
    return lambda: inputs.check_unknown("a", ids, TOKENIZER, 0.05)


def cut(seq_length: int, positions: int, most: float, lengths: list[int] = LENGTHS) -> Check:
    return lambda: inputs.check_truncation("a", np.array(lengths), seq_length, positions, most)


def classes(ids: list[int], *, trained: bool = True) -> Check:
    return lambda: check_classes("a", np.array(ids), ("no", "yes", "maybe"), trained=trained)


def all_of(**settings: Any) -> Check:
    """Lower-case text with unknown tokens, some of it cut, before all checks of a task."""
    checks = inputs.InputChecks(ChecksConfig(**settings), CASED, 8, 16)
    ids = np.array(CASED.encode("the 日"))
    return lambda: checks.check("a", LOWER, ids, np.array([4, 9]))


# A check, and the counts that it returns, or None where it raises; whether it warns.
PASSES, WARNS = False, True
CHECKS: dict[str, tuple[Check, bool, list[Any] | None]] = {
    "no capitals": (casing(LOWER), PASSES, None),
    "no capitals, allowed": (casing(LOWER, allow=True), WARNS, [40, 0]),
    "few capitals": (casing([*MIXED[:10], *LOWER]), WARNS, [50, 10]),
    "capitals": (casing(MIXED), PASSES, [40, 40]),
    "all capitals": (casing([text.upper() for text in MIXED]), PASSES, [40, 40]),
    "too few texts to judge": (casing(LOWER[:19]), PASSES, [19, 0]),
    "no letters": (casing(["1 + 1 = 2", "你好", ""] * 20), PASSES, [0, 0]),
    "lower-case vocabulary": (casing(LOWER, tokenizer=TOKENIZER), PASSES, [40, 0]),
    "many unknown": (unknown(6), PASSES, None),
    "some unknown": (unknown(5), WARNS, [100, 5]),
    "one unknown": (unknown(1), PASSES, [100, 1]),
    "some cut": (cut(64, 128, 0.25), WARNS, [10, 1, 90, 25.0]),
    "some cut at all positions": (cut(64, 64, 0.25), WARNS, [10, 1, 90, 25.0]),
    "many cut": (cut(32, 64, 0.25), PASSES, None),
    "many cut, allowed": (cut(32, 64, 0.30), WARNS, [10, 3, 90, 25.0]),
    "none cut": (cut(90, 90, 0), PASSES, [10, 0, 90, 25.0]),
    "few cut": (cut(32, 64, 0.25, [32] * 95 + [33] * 5), PASSES, [100, 5, 33, 32.0]),
    "all classes": (classes([0, 2, 1]), PASSES, [1, 1, 1]),
    "a class is missing": (classes([0, 2]), WARNS, [1, 0, 1]),
    "one class to learn": (classes([2, 2]), PASSES, None),
    "one class to evaluate": (classes([2, 2], trained=False), WARNS, [0, 0, 2]),
    "everything allowed": (
        all_of(allow_lower_case=True, max_unknown=1, max_truncated=1),
        WARNS,
        [40, 0, 2, 1, 2, 1, 9, 6.5],
    ),
    "casing not allowed": (all_of(max_unknown=1, max_truncated=1), PASSES, None),
    "unknown not allowed": (all_of(allow_lower_case=True, max_truncated=1), WARNS, None),
    "cut not allowed": (all_of(allow_lower_case=True, max_unknown=1), WARNS, None),
}


@pytest.mark.parametrize("row", CHECKS)
def test_checks(row: str) -> None:
    check, warns, counts = CHECKS[row]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if counts is None:
            refusal(check)
        else:
            assert [*check().values()] == counts
    assert bool(warned) == warns


def test_length_and_share_that_pass() -> None:
    message = str(refusal(cut(32, 64, 0.25)))
    assert "--seq-length 64" in message
    assert "--max-truncated 0.30" in message
    assert "--max-truncated 0.34" in str(refusal(cut(32, 64, 0.25, [8, 8, 40])))
    ids = np.array([TOKENIZER.unknown] * 3 + [7] * 55)  # 5.2 %
    refused = refusal(lambda: inputs.check_unknown("a", ids, TOKENIZER, 0.05))
    assert "--max-unknown 0.06" in str(refused)


def test_data_given_twice(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    refusal(lambda: inputs.check_apart([a, b, tmp_path / "." / "a"], []), field="--train-data")
    assert field_of(refusal(lambda: inputs.check_apart([a], [b, b]))) == "--valid-data"
    with pytest.warns(UserWarning, match=f"^--valid-data {b} "):
        inputs.check_apart([a, b], [b])
