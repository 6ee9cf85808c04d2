"""What fine-tuned tasks refuse or tell: casing, [UNK], truncation, label maps, data given twice."""

import string
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.wordpiece import BertTokenizer, BertWordPieceCase, BertWordPieceLowerCase
from tasks.checks import (
    ChecksConfig,
    InputChecks,
    LabelMap,
    check_apart,
    check_casing,
    check_classes,
    check_truncation,
    check_unknown,
)
from tests.data.samples import write_wordpiece

MIXED = ["The cat sits here.", "A dog is there."] * 20
LOWER = [text.lower() for text in MIXED]


@pytest.fixture
def lower_case(tmp_path: Path) -> BertTokenizer:
    return BertWordPieceLowerCase(write_wordpiece(tmp_path))


@pytest.fixture
def cased(tmp_path: Path) -> BertTokenizer:
    upper = string.ascii_uppercase
    return BertWordPieceCase(write_wordpiece(tmp_path, *upper, *(f"##{each}" for each in upper)))


def test_text_without_capitals_is_refused_by_a_vocabulary_that_has_them(
    cased: BertTokenizer,
) -> None:
    with pytest.raises(ValueError, match=r"--train-data a: 0 of 40 texts \(0.0%\).*--allow-lower"):
        check_casing("--train-data a", LOWER, cased, allow=False)
    with pytest.warns(UserWarning, match=r"0 of 40 texts"):
        check_casing("--train-data a", LOWER, cased, allow=True)


def test_text_with_few_capitals_is_told_with_the_number(cased: BertTokenizer) -> None:
    with pytest.warns(UserWarning, match=r"10 of 50 texts \(20.0%\) have a capital"):
        counts = check_casing("a", [*MIXED[:10], *LOWER], cased, allow=False)
    assert counts == {"texts_with_letters": 50, "texts_with_capitals": 10}


@pytest.mark.filterwarnings("error")
def test_casing_that_fits_or_cannot_be_judged_passes(
    cased: BertTokenizer, lower_case: BertTokenizer
) -> None:
    check_casing("a", MIXED, cased, allow=False)
    check_casing("a", [text.upper() for text in MIXED], cased, allow=False)
    check_casing("a", MIXED, lower_case, allow=False)
    check_casing("a", LOWER, lower_case, allow=False)
    check_casing("a", LOWER[:19], cased, allow=False)
    numbers = check_casing("a", ["1 + 1 = 2", "你好", ""] * 20, cased, allow=False)
    assert numbers == {"texts_with_letters": 0, "texts_with_capitals": 0}


def test_many_unknown_tokens_are_refused_and_some_told(lower_case: BertTokenizer) -> None:
    unknown = lower_case.unknown
    assert lower_case.encode("日") == [unknown]
    with pytest.raises(
        ValueError, match=r"6 of 100 tokens \(6.0%\) are \[UNK\].*--max-unknown 0.0"
    ):
        check_unknown("a", np.array([unknown] * 6 + [7] * 94), lower_case, 0.05)
    with pytest.warns(UserWarning, match=r"5 of 100 tokens"):
        counts = check_unknown("a", np.array([unknown] * 5 + [7] * 95), lower_case, 0.05)
    assert counts == {"tokens": 100, "unknown_tokens": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_unknown("a", np.array([unknown] + [7] * 99), lower_case, 0.05)


def test_much_truncation_is_refused_with_the_flags_that_help() -> None:
    lengths = np.array([10] * 7 + [40, 50, 90])
    with pytest.raises(ValueError, match="would cut") as refused:
        check_truncation("a", lengths, 32, 64, 0.25)
    assert str(refused.value) == (
        "a: 3 of 10 sequences (30.0%) are longer than --seq-length 32 and are cut; --seq-length 64 "
        "would cut 1, or --max-truncated 0.30 would let them be cut"
    )
    with pytest.warns(
        UserWarning, match="--seq-length 128 and are cut|--seq-length 90 would cut no"
    ):
        counts = check_truncation("a", lengths, 64, 128, 0.25)
    assert counts == {"sequences": 10, "truncated": 1, "longest": 90, "mean_length": 25.0}
    with pytest.warns(UserWarning, match="the model has no more than 64 positions"):
        check_truncation("a", lengths, 64, 64, 0.25)


@pytest.mark.filterwarnings("error")
def test_a_sequence_of_just_the_length_is_not_cut() -> None:
    counts = check_truncation("a", np.array([32] * 95 + [33] * 5), 32, 64, 0.25)
    assert counts["truncated"] == 5


@pytest.mark.filterwarnings("ignore")
def test_all_checks_of_a_task_are_made(cased: BertTokenizer) -> None:
    def checks(**settings: Any) -> InputChecks:
        return InputChecks(ChecksConfig(**settings), cased, 8, 16)

    tokens, lengths = np.array(cased.encode("the 日")), np.array([4, 9])
    allowed = {"allow_lower_case": True, "max_unknown": 1, "max_truncated": 1}
    counts = checks(**allowed).check("a", LOWER, tokens, lengths)
    assert counts == {
        "texts_with_letters": 40, "texts_with_capitals": 0, "tokens": 2, "unknown_tokens": 1,
        "sequences": 2, "truncated": 1, "longest": 9, "mean_length": 6.5,
    }  # fmt: skip
    for name, message in (
        ("allow_lower_case", "capital letter"),
        ("max_unknown", r"\[UNK\]"),
        ("max_truncated", "--seq-length 9 would cut none"),
    ):
        strict = checks(**{key: value for key, value in allowed.items() if key != name})
        with pytest.raises(ValueError, match=message):
            strict.check("a", LOWER, tokens, lengths)


LABELS = LabelMap(("no", "yes"), {"0": 0}, ": names would work")


def test_labels_are_found_by_name_and_by_further_spelling() -> None:
    assert [LABELS.id_of(each, "line 2") for each in ("no", "yes", "0", 0)] == [0, 1, 0, 0]
    assert LABELS.by_id == {"0": "no", "1": "yes"}


@pytest.mark.parametrize("label", ["Yes", "", " yes", None, True, False, ["yes"], {"yes": 1}])
def test_a_label_that_is_not_in_the_map_is_named(label: object) -> None:
    with pytest.raises(ValueError, match=r"^line 2: the label .* is not one of no, yes, 0$"):
        LABELS.id_of(label, "line 2")


@pytest.mark.parametrize("label", [1, "1", -1, "-1", 0.5])
def test_a_number_in_place_of_a_name_is_refused_with_the_reason(label: object) -> None:
    with pytest.raises(ValueError, match=r"is not one of no, yes, 0: names would work"):
        LABELS.id_of(label, "line 2")


def test_a_class_without_examples_is_told_and_one_class_is_nothing_to_learn() -> None:
    names = ("no", "yes", "maybe")
    assert check_classes("a", np.array([0, 2, 1]), names, trained=True) == {
        "no": 1, "yes": 1, "maybe": 1,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="a: no example is yes; a model cannot learn it"):
        check_classes("a", np.array([0, 2]), names, trained=True)
    with pytest.raises(ValueError, match="a: all 2 examples are maybe"):
        check_classes("a", np.array([2, 2]), names, trained=True)
    with pytest.warns(UserWarning, match="no or yes; the figures say nothing of it"):
        check_classes("a", np.array([2, 2]), names, trained=False)


def test_data_that_is_given_twice_is_refused_and_of_both_sides_told(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(ValueError, match="--train-data .*is given twice"):
        check_apart([a, b, tmp_path / "." / "a"], [])
    with pytest.raises(ValueError, match="--valid-data .*is given twice"):
        check_apart([a], [b, b])
    with pytest.warns(UserWarning, match=f"--valid-data {b} is trained on as well"):
        check_apart([a, b], [b])
