"""Checks against input that would silently train or measure something other than intended.

Each check returns its counts, for the record. It warns where a count is higher than in good data,
and raises ValueError, with the flag that would help, where it is far higher.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import share
from megatron.data.text_checks import MAX_UNKNOWN, count_casing, judge_casing, judge_unknown
from megatron.data.tokenizer import BertTokenizer, BertWordPieceLowerCase
from megatron.errors import UsageError
from tasks.protocol import BESIDE

# RACE cut at the paper's 512 tokens has to pass: 7 % of its sequences are longer, and 10 % of
# those of the high schools. At 384 tokens it would be 42 %.
WARN_TRUNCATED = 0.05
# For questions, whose end matters more than that of a passage. In RACE's development set no
# question with its option has over 48 tokens (the paper keeps 128); in SQuAD's none has over 64.
WARN_CUT_QUESTIONS = 0.01


@dataclass(frozen=True, kw_only=True)
class ChecksConfig:
    max_truncated: float = field(default=0.25, metadata=BESIDE)
    """Largest share of the sequences that may be cut at --seq-length; more is an error."""

    max_unknown: float = field(default=MAX_UNKNOWN, metadata=BESIDE)
    """Largest share of the tokens that may be [UNK]; more is an error."""

    allow_lower_case: bool = field(default=False, metadata=BESIDE)
    """Accept text without capitals though the model's vocabulary has them."""

    def __post_init__(self) -> None:
        share(self, "max_truncated", "max_unknown")


@dataclass(frozen=True)
class InputChecks:
    """The checks of a task's sequences."""

    config: ChecksConfig
    tokenizer: BertTokenizer
    seq_length: int
    positions: int  # the model's number of positions

    def check(
        self, place: str, texts: Iterable[str], tokens: NDArray[Any], lengths: NDArray[Any]
    ) -> dict[str, Any]:
        """place: flag and file, for messages; texts: the texts in the sequences; tokens: the tokens
        of these texts; lengths: [N], lengths of the sequences before cutting."""
        config = self.config
        return {
            **check_casing(place, texts, self.tokenizer, config.allow_lower_case),
            **check_unknown(place, tokens, self.tokenizer, config.max_unknown),
            **check_truncation(
                place, lengths, self.seq_length, self.positions, config.max_truncated
            ),
        }


def check_truncation(
    place: str, lengths: NDArray[Any], seq_length: int, positions: int, most: float
) -> dict[str, Any]:
    """lengths: [N], lengths of the sequences before cutting; positions: the model's number of
    positions; most: --max-truncated; place: flag and file, for the message."""
    longest, count = int(lengths.max()), int((lengths > seq_length).sum())
    share = count / len(lengths)
    message = (
        f"{place}: {count} of {len(lengths)} sequences ({share:.1%}) are longer than --seq-length "
        f"{seq_length} and are cut"
    )
    cure = f"the model has no more than {positions} positions"
    if seq_length < positions:
        better = min(longest, positions)
        left = int((lengths > better).sum())
        cure = f"--seq-length {better} would cut {left or 'none'}"
    check_cut(message, share, cure, WARN_TRUNCATED, most)
    return {
        "sequences": len(lengths),
        "truncated": count,
        "longest": longest,
        "mean_length": round(float(lengths.mean()), 1),
    }


def check_cut(message: str, share: float, cure: str, warn_above: float, most: float) -> None:
    """Warn if the share that is cut is above `warn_above`; raise ValueError if it is above `most`,
    which is --max-truncated. message: what is cut, and how many."""
    if share > most:
        allowed = f"--max-truncated {np.ceil(100 * share) / 100:.2f} would let them be cut"
        raise ValueError(f"{message}; {cure}, or {allowed}")
    if share > warn_above:
        warnings.warn(f"{message}; {cure}", stacklevel=3)


def check_unknown(
    place: str, tokens: NDArray[Any], tokenizer: BertTokenizer, most: float
) -> dict[str, int]:
    """tokens: the ids of all texts, without special tokens; most: --max-unknown."""
    count = int((tokens == tokenizer.unknown).sum())
    works = "a model of this language or script"
    if message := judge_unknown(place, count, len(tokens), most, works):
        warnings.warn(message, stacklevel=2)
    return {"tokens": len(tokens), "unknown_tokens": count}


def check_casing(
    place: str, texts: Iterable[str], tokenizer: BertTokenizer, allow: bool
) -> dict[str, int]:
    """Check that text for a vocabulary with capitals has some. allow: --allow-lower-case."""
    casing = count_casing(texts)
    works = f"a model of {BertWordPieceLowerCase.kind}"
    if message := judge_casing(place, casing, tokenizer, allow=allow, works=works):
        warnings.warn(message, stacklevel=2)
    return {"texts_with_letters": casing.texts, "texts_with_capitals": casing.with_capitals}


def check_apart(train: Sequence[Path], valid: Sequence[Path]) -> None:
    """Raise UsageError if a path is given twice; warn of data in both training and evaluation."""
    for name, paths in (("--train-data", train), ("--valid-data", valid)):
        once = {path.resolve(): path for path in paths}
        if len(once) < len(paths):
            works = (name, *map(str, once.values()))
            raise UsageError(name, " ".join(map(str, paths)), "different paths", works=works)
    for path in {each.resolve() for each in train} & {each.resolve() for each in valid}:
        warnings.warn(
            f"--valid-data {path} is trained on as well: its figures say what the model has "
            "learned by heart",
            stacklevel=2,
        )


@dataclass(frozen=True)
class LabelMap:
    """Maps labels in the files to classes."""

    names: tuple[str, ...]  # of the classes, in the order of their ids
    others: Mapping[str, int] = field(default_factory=dict)  # further spellings, such as "1"
    cure: str = ""  # message for a number that is not one of these spellings

    def id_of(self, label: object, place: str) -> int:
        """The class id of a label. Raises ValueError, naming the place, for an unknown label."""
        is_number = isinstance(label, int | float) and not isinstance(label, bool)
        spelt = str(label) if is_number else label
        if isinstance(spelt, str):
            if spelt in self.others:
                return self.others[spelt]
            if spelt in self.names:
                return self.names.index(spelt)
            is_number = is_number or spelt.lstrip("-").isdigit()
        why = self.cure if is_number else ""
        known = ", ".join([*self.names, *self.others])
        raise ValueError(f"{place}: the label {label!r} is not one of {known}{why}")

    @property
    def by_id(self) -> dict[str, str]:
        """For the record: {"0": name, ...}."""
        return {str(number): name for number, name in enumerate(self.names)}


def majority(right: NDArray[np.int64]) -> float:
    """Share of the most frequent class: the accuracy of always predicting it."""
    return float(np.bincount(right).max() / len(right))


def check_classes(
    place: str, ids: NDArray[Any], names: Sequence[str], *, trained: bool
) -> dict[str, int]:
    """Number of examples per class. trained: whether a single class is an error (training data)."""
    counts = np.bincount(ids, minlength=len(names)).tolist()
    found = [name for name, count in zip(names, counts, strict=True) if count]
    if trained and len(found) == 1:
        raise ValueError(
            f"{place}: all {len(ids)} examples are {found[0]}, so that there is nothing to learn; "
            f"data with {' and '.join(names)} would work"
        )
    if missing := [name for name in names if name not in found]:
        message = "a model cannot learn it" if trained else "the figures say nothing of it"
        warnings.warn(f"{place}: no example is {' or '.join(missing)}; {message}", stacklevel=2)
    return dict(zip(names, counts, strict=True))
