"""MNLI and QQP (section 5.3, table 5): the class of a pair of texts.

A sequence is [CLS] first text [SEP] second text [SEP]. Of a pair that is too long the longer text
loses its end until both fit, as in BERT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import UsageError
from megatron.data.wordpiece import BertTokenizer
from tasks.checks import (
    ChecksConfig,
    InputChecks,
    LabelMap,
    check_apart,
    check_classes,
    majority,
)
from tasks.examples import Example
from tasks.finetuning import FinetuneSettings, Finetuning, name_conventions
from tasks.pair_files import Form, read_pairs
from tasks.pairs import SPECIAL, PairExamples, encode, shape_of

# The order of the paper's authors, which is that of the alphabet. Others count from entailment.
MNLI_FORM = Form(
    ("sentence1", "sentence2", "gold_label"),
    LabelMap(
        ("contradiction", "entailment", "neutral"),
        cure=": which class a number means is not agreed upon (the paper's authors count "
        "contradiction, entailment, neutral; others entailment, neutral, contradiction); "
        "the names would work",
    ),
    "GLUE's train.tsv, dev_matched.tsv and dev_mismatched.tsv of MNLI would work, or JSON of "
    "objects with text_a, text_b and label",
    none="-",  # of pairs on which those who labelled them did not agree
)
QQP_FORM = Form(
    ("question1", "question2", "is_duplicate"),
    LabelMap(("not_duplicate", "duplicate"), {"0": 0, "1": 1}),
    "GLUE's train.tsv and dev.tsv of QQP would work, or JSON of objects with text_a, text_b and "
    "label",
)
CONVENTIONS = {
    "pairs": "with a label",
    "majority_accuracy": "accuracy of one who always names the class that is most frequent here",
    "accuracy": "the share of pairs whose class has the highest score; of equal scores the first "
    "class's counts",
    "f1": "of the second class, duplicate: 2 x hits / (pairs of the class + pairs said to be of "
    "it); 0 where that is 0 / 0",
}


@dataclass(frozen=True, kw_only=True)
class GlueSettings(FinetuneSettings):
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_length < SPECIAL + 2:
            raise UsageError(
                "--seq-length",
                self.seq_length,
                f"at least {SPECIAL + 2}: two texts and {SPECIAL} special tokens",
                works=("--seq-length", "128"),
            )


@dataclass(frozen=True, kw_only=True)
class Classified(Finetuning):
    head = "classifier"

    labels: tuple[str, ...]
    train: Sequence[Example]
    evaluations: Mapping[str, PairExamples]
    best: tuple[str, str]
    notes: Mapping[str, Any]
    with_f1: bool

    @property
    def conventions(self) -> Mapping[str, str]:
        meanings = {each: CONVENTIONS[each] for each in CONVENTIONS if self.with_f1 or each != "f1"}
        return name_conventions(self.evaluations, meanings)

    def figures(self, name: str, logits: Sequence[NDArray[np.float32]]) -> Mapping[str, Any]:
        right = self.evaluations[name].classes
        said = np.stack(logits).argmax(axis=1)
        figures = {
            "pairs": len(right),
            "majority_accuracy": majority(right),
            "accuracy": float((said == right).mean()),
        }
        return {**figures, "f1": f1(said == 1, right == 1)} if self.with_f1 else figures


def f1(said: NDArray[np.bool_], right: NDArray[np.bool_]) -> float:
    count = int(said.sum() + right.sum())
    return 2 * int((said & right).sum()) / count if count else 0.0


@dataclass(frozen=True, kw_only=True)
class MNLISettings(GlueSettings):
    """The 336M model's settings in table 6."""

    epochs: int = 10
    lr: float = 1e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """What to train on: GLUE's train.tsv of MNLI (columns sentence1, sentence2, gold_label), or
    JSON of {"text_a", "text_b", "label"}: a list, or one a line. Labels are contradiction,
    entailment and neutral; pairs with "-" are left out. Without it a fine-tuned model is
    evaluated."""

    valid_data: tuple[Path, ...]
    """What to evaluate on, after every epoch: files of the same formats, dev_matched.tsv and
    dev_mismatched.tsv. One with matched or mismatched in its name gives the figures that begin with
    it (dev_matched.tsv: matched_accuracy), other ones of several those of their name (a.tsv:
    a_accuracy); a single other one has no such word (accuracy)."""


class MNLI:
    """MNLI (section 5.3, table 5): whether a sentence follows from another one, or contradicts it.

    Files whose names have mismatched or matched in them are evaluations of that name.
    """

    Settings: ClassVar = MNLISettings

    @staticmethod
    def prepare(
        settings: GlueSettings, manifest: dict[str, Any], tokenizer: BertTokenizer
    ) -> Classified:
        return prepare(settings, manifest, tokenizer, MNLI_FORM)


@dataclass(frozen=True, kw_only=True)
class QQPSettings(GlueSettings):
    """The 336M model's settings in table 6."""

    epochs: int = 12
    lr: float = 5e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """What to train on: GLUE's train.tsv of QQP (columns question1, question2, is_duplicate), or
    JSON of {"text_a", "text_b", "label"}: a list, or one a line. Labels are 0 or not_duplicate, 1
    or duplicate. Without it a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """What to evaluate on, after every epoch: files of the same formats, dev.tsv. A single one
    gives accuracy and f1, of several each gives figures that begin with its name (a.tsv:
    a_accuracy)."""


class QQP:
    """QQP (section 5.3, table 5): whether two questions ask the same."""

    Settings: ClassVar = QQPSettings

    @staticmethod
    def prepare(
        settings: GlueSettings, manifest: dict[str, Any], tokenizer: BertTokenizer
    ) -> Classified:
        return prepare(settings, manifest, tokenizer, QQP_FORM)


def prepare(
    settings: GlueSettings, manifest: dict[str, Any], tokenizer: BertTokenizer, form: Form
) -> Classified:
    """Raises ValueError or OSError, naming the flag, for what cannot be trained or evaluated."""
    check_apart(settings.train_data, settings.valid_data)
    positions = manifest["config"]["model"]["max_position_embeddings"]
    checks = InputChecks(settings.checks, tokenizer, settings.seq_length, positions)
    evaluations, counted = {}, {}
    for name, file in name_files(settings.valid_data).items():
        evaluations[name], counted[name] = read("--valid-data", [file], form, checks)
    notes: dict[str, Any] = {"labels": form.labels.by_id, "input": {"valid": counted}}
    examples: Sequence[Example] = []
    if settings.train_data:
        examples, notes["input"]["train"] = read("--train-data", settings.train_data, form, checks)
    return Classified(
        labels=form.labels.names,
        train=examples,
        evaluations=evaluations,
        best=(next(iter(evaluations)), "accuracy"),
        notes=notes,
        with_f1=form is QQP_FORM,
    )


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """The evaluation that each file is: mismatched or matched where its name says so, or else
    "" of the only one and the name without its ending of several."""
    named: dict[str, Path] = {}
    for file in files:
        found = next((each for each in ("mismatched", "matched") if each in file.stem), None)
        name = found or (file.stem if len(files) > 1 else "")
        if name in named:
            raise UsageError(
                "--valid-data", f"{named[name]} {file}", f"of other names: both would be {name}"
            )
        named[name] = file
    return named


def read(
    flag: str, files: Sequence[Path], form: Form, checks: InputChecks
) -> tuple[PairExamples, dict[str, Any]]:
    """The pairs of these files, and what was counted."""
    parts = [read_pairs(flag, file, form) for file in files]
    first, second = ([t for p in parts for t in getattr(p, n)] for n in ("first", "second"))
    shape = shape_of(checks.tokenizer, checks.seq_length)
    classes = np.concatenate([part.classes for part in parts])
    examples = PairExamples(
        encode(first, checks.tokenizer), encode(second, checks.tokenizer), classes, shape
    )
    place = f"{flag} {' '.join(map(str, files))}"
    trained = flag == "--train-data"
    tokens = np.concatenate([examples.first.tokens, examples.second.tokens])
    return examples, {
        "pairs": len(examples),
        "unlabelled_rows_left_out": sum(part.unlabelled for part in parts),
        "bad_rows_left_out": sum(len(part.bad) for part in parts),
        "classes": check_classes(place, classes, form.labels.names, trained=trained),
        **checks.check(place, [*first, *second], tokens, examples.whole),
    }
