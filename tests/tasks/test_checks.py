"""The checks of a task's input: what they count, tell and refuse."""

import string
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokenizer import BertTokenizer, BertWordPieceCase, BertWordPieceLowerCase
from tasks.protocol import ChecksConfig
from tasks.readers.glue import check_classes
from tasks.readers.inputs import (
    InputChecks,
    check_apart,
    check_casing,
    check_truncation,
    check_unknown,
)
from tests.data.samples import write_wordpiece
from tests.refusals import field_of, refusal

MIXED = ["The cat sits here.", "A dog is there."] * 20
LOWER = [text.lower() for text in MIXED]
UPPER = string.ascii_uppercase


@pytest.fixture
def lower_case(tmp_path: Path) -> BertTokenizer:
    return BertWordPieceLowerCase(write_wordpiece(tmp_path))


@pytest.fixture
def cased(tmp_path: Path) -> BertTokenizer:
    return BertWordPieceCase(write_wordpiece(tmp_path, *UPPER, *(f"##{each}" for each in UPPER)))


def outcome(check: Callable[..., Any], *arguments: Any, **more: Any) -> tuple[str, Any]:
    """(passes, told or refused, the values of what was counted) of a check."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            counted = check("a", *arguments, **more)
        except ValueError:
            return "refused", None
    return "told" if told else "passes", list(counted.values())


def test_a_vocabulary_with_capitals_wants_text_that_has_some(
    cased: BertTokenizer, lower_case: BertTokenizer
) -> None:
    for texts, allow, expected in [
        (LOWER, False, ("refused", None)),
        (LOWER, True, ("told", [40, 0])),
        ([*MIXED[:10], *LOWER], False, ("told", [50, 10])),
        (MIXED, False, ("passes", [40, 40])),
        ([text.upper() for text in MIXED], False, ("passes", [40, 40])),
        (LOWER[:19], False, ("passes", [19, 0])),
        (["1 + 1 = 2", "你好", ""] * 20, False, ("passes", [0, 0])),
    ]:
        assert outcome(check_casing, texts, cased, allow) == expected
        assert outcome(check_casing, texts, lower_case, allow)[0] == "passes"


def test_many_unknown_tokens_are_refused_and_some_told(lower_case: BertTokenizer) -> None:
    assert lower_case.encode("日") == [lower_case.unknown]
    for count, expected in (
        (6, ("refused", None)), (5, ("told", [100, 5])), (1, ("passes", [100, 1])),
    ):  # fmt: skip
        tokens = np.array([lower_case.unknown] * count + [7] * (100 - count))
        assert outcome(check_unknown, tokens, lower_case, 0.05) == expected


def test_much_truncation_is_refused_with_a_length_and_a_share_that_pass() -> None:
    lengths = np.array([10] * 7 + [40, 50, 90])
    for seq_length, positions, most, expected in [
        (64, 128, 0.25, ("told", [10, 1, 90, 25.0])),
        (64, 64, 0.25, ("told", [10, 1, 90, 25.0])),
        (32, 64, 0.30, ("told", [10, 3, 90, 25.0])),
        (90, 90, 0, ("passes", [10, 0, 90, 25.0])),
    ]:
        assert outcome(check_truncation, lengths, seq_length, positions, most) == expected
    message = str(refusal(lambda: check_truncation("a", lengths, 32, 64, 0.25)))
    assert "--seq-length 64" in message
    assert "--max-truncated 0.30" in message
    few = np.array([32] * 95 + [33] * 5)
    assert outcome(check_truncation, few, 32, 64, 0.25) == ("passes", [100, 5, 33, 32.0])


def test_all_checks_of_a_task_are_made(cased: BertTokenizer) -> None:
    tokens, lengths = np.array(cased.encode("the 日")), np.array([4, 9])
    allowed = {"allow_lower_case": True, "max_unknown": 1, "max_truncated": 1}

    def checked(**settings: Any) -> tuple[str, Any]:
        checks = InputChecks(ChecksConfig(**settings), cased, 8, 16)
        return outcome(checks.check, LOWER, tokens, lengths)

    assert checked(**allowed) == ("told", [40, 0, 2, 1, 2, 1, 9, 6.5])
    for name in allowed:
        strict = {key: value for key, value in allowed.items() if key != name}
        assert checked(**strict)[0] == "refused", name


def test_a_class_without_examples_is_told_and_one_class_is_nothing_to_learn() -> None:
    for ids, trained, expected in [
        ([0, 2, 1], True, ("passes", [1, 1, 1])),
        ([0, 2], True, ("told", [1, 0, 1])),
        ([2, 2], True, ("refused", None)),
        ([2, 2], False, ("told", [0, 0, 2])),
    ]:
        found = outcome(check_classes, np.array(ids), ("no", "yes", "maybe"), trained=trained)
        assert found == expected


def test_data_that_is_given_twice_is_refused_and_of_both_sides_told(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    twice = refusal(lambda: check_apart([a, b, tmp_path / "." / "a"], []))
    assert (field_of(twice), field_of(refusal(lambda: check_apart([a], [b, b])))) == (
        "--train-data", "--valid-data",
    )  # fmt: skip
    with pytest.warns(UserWarning, match=f"^--valid-data {b} "):
        check_apart([a, b], [b])
