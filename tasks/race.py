"""RACE (section 5.3, table 5): the right one of four answers to a question about a passage.

A sequence is [CLS] question and option [SEP] passage [SEP], as the paper's authors order them: the
option stands in place of every "_" of the question, or after a blank behind a question without
one. A passage loses its end where the sequence is too long.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import UsageError, positive
from megatron.data.wordpiece import BertTokenizer
from tasks.checks import (
    TELL_CUT_QUESTIONS,
    ChecksConfig,
    InputChecks,
    check_apart,
    majority,
    tell_cut,
)
from tasks.examples import Example
from tasks.finetuning import FinetuneSettings, Finetuning, name_conventions
from tasks.pairs import SPECIAL, Ragged, Shape, encode, shape_of
from tasks.race_files import LETTERS, LEVELS, Passage, find_levels, read_levels

OPTIONS = len(LETTERS)
ENOUGH = 20  # questions whose answers are all the same one by chance in less than one of 10^11
CONVENTIONS = {
    "questions": "of four options each, of the level of schools that the name begins with, or of "
    "all levels that were read",
    "majority_accuracy": "accuracy of one who always names the letter that is right most often",
    "accuracy": "the share of questions whose right option has the highest score; of options with "
    "equal scores the first one counts",
}


@dataclass(frozen=True, kw_only=True)
class Settings(FinetuneSettings):
    """Of a folder that holds train/ and dev/ --train-data and --valid-data take their own each."""

    train_data: tuple[Path, ...] = ()
    """What to train on: folders as released, that hold middle/, high/ or both (RACE/train), or
    folders of these names; in them a .txt file a passage, JSON of {"article", "questions",
    "options", "answers"}. Of a folder that holds train/ that is taken. Without it a fine-tuned
    model is evaluated."""

    valid_data: tuple[Path, ...]
    """What to evaluate on, after every epoch: folders of the same kind (RACE/dev; of one that holds
    dev/ that is taken). Each level gives the figures that begin with its name (middle_accuracy);
    accuracy is of all that was read."""

    max_qa_length: int | None = None
    """Tokens kept of a question with an option; a quarter of --seq-length if not given, which of
    512 is the 128 of the paper's authors."""

    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_qa_length")
        if self.kept_qa + SPECIAL >= self.seq_length:
            raise UsageError(
                "--seq-length",
                self.seq_length,
                f"above --max-qa-length {self.kept_qa} and {SPECIAL} special tokens",
                works=("--seq-length", str(4 * (self.kept_qa + SPECIAL))),
            )

    @property
    def kept_qa(self) -> int:
        return self.max_qa_length or -(-self.seq_length // 4)


@dataclass(frozen=True)
class Questions(Sequence[Example]):
    """Questions with their four options; a passage is encoded once for all of its questions."""

    passages: Ragged
    options: Ragged  # each with its question; four rows a question
    passage_of: NDArray[np.int64]  # [questions]
    right: NDArray[np.int64]  # [questions], the right option
    shape: Shape

    def __len__(self) -> int:
        return len(self.right)

    def __getitem__(self, number: int) -> Example:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        passage = self.passages[self.passage_of[number]]
        rows = range(OPTIONS * number, OPTIONS * (number + 1))
        sequences = tuple(self.shape.join(self.options[row], passage) for row in rows)
        return Example(sequences, (int(self.right[number]),))

    @property
    def whole(self) -> NDArray[np.int64]:
        """[4 x questions], the lengths that the sequences would have with nothing cut."""
        passages = self.passages.lengths[self.passage_of]
        return self.options.lengths + np.repeat(passages, OPTIONS) + SPECIAL


@dataclass(frozen=True, kw_only=True)
class Race(Finetuning):
    head = "choice"
    labels = ()
    best = ("", "accuracy")

    train: Sequence[Example]
    evaluations: Mapping[str, Questions]
    notes: Mapping[str, Any]

    @property
    def conventions(self) -> Mapping[str, str]:
        return name_conventions(["", *self.evaluations], CONVENTIONS)

    def figures(self, name: str, logits: Sequence[NDArray[np.float32]]) -> Mapping[str, Any]:
        right = self.evaluations[name].right
        hits = np.stack(logits).argmax(axis=1) == right
        return {
            "questions": len(right),
            "majority_accuracy": majority(right),
            "accuracy": float(hits.mean()),
        }

    def combined(self, figures: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        counts = [each["questions"] for each in figures.values()]
        accuracies = [each["accuracy"] for each in figures.values()]
        return {
            "questions": sum(counts),
            "majority_accuracy": majority(
                np.concatenate([each.right for each in self.evaluations.values()])
            ),
            "accuracy": float(np.average(accuracies, weights=counts)),
        }


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: BertTokenizer) -> Race:
    """Raises ValueError or OSError, naming the flag, for what cannot be trained or evaluated."""
    train = find_all("--train-data", settings.train_data, "train")
    valid = find_all("--valid-data", settings.valid_data, "dev")
    check_apart(*([path for paths in each.values() for path in paths] for each in (train, valid)))
    positions = manifest["config"]["model"]["max_position_embeddings"]
    checks = InputChecks(settings.checks, tokenizer, settings.seq_length, positions)
    shape = shape_of(tokenizer, settings.seq_length, cut="second", first=settings.kept_qa)
    evaluations, counted = {}, {}
    for level, folders in valid.items():
        evaluations[level], counted[level] = read("--valid-data", folders, shape, checks)
    notes: dict[str, Any] = {"max_qa_length": settings.kept_qa, "input": {"valid": counted}}
    folders = [folder for each in train.values() for folder in each]
    examples: Sequence[Example] = []
    if folders:
        examples, notes["input"]["train"] = read("--train-data", folders, shape, checks)
    return Race(train=examples, evaluations=evaluations, notes=notes)


def find_all(flag: str, paths: Sequence[Path], split: str) -> dict[str, list[Path]]:
    """The folders of each level that is there, middle first."""
    found = [find_levels(flag, path, split) for path in paths]
    levels = {level: [each[level] for each in found if level in each] for level in LEVELS}
    return {level: folders for level, folders in levels.items() if folders}


def read(
    flag: str, folders: Sequence[Path], shape: Shape, checks: InputChecks
) -> tuple[Questions, dict[str, Any]]:
    """The questions of these folders, and what was counted."""
    passages, left_out = read_levels(flag, folders)
    examples = make_questions(passages, checks.tokenizer, shape)
    place = f"{flag} {' '.join(map(str, folders))}"
    texts = (text for passage in passages for text in passage.texts)
    tokens = np.concatenate([examples.passages.tokens, examples.options.tokens])
    return examples, {
        "folders": [str(folder) for folder in folders],
        "passages": len(passages),
        **left_out,
        "questions": len(examples),
        "answers": count_answers(place, examples.right),
        **checks.check(place, texts, tokens, examples.whole),
        "truncated_options": check_options(place, examples.options.lengths, shape, checks),
    }


def check_options(place: str, lengths: NDArray[np.int64], shape: Shape, checks: InputChecks) -> int:
    """How many questions with an option lose their end, as check_truncation tells of sequences.

    lengths: [4 x questions]. What is lost is mostly the option itself: of a question without a
    blank to fill the four would be one and the same.
    """
    assert shape.first is not None
    count, longest = int((lengths > shape.first).sum()), int(lengths.max())
    share = count / len(lengths)
    said = (
        f"{place}: {count} of {len(lengths)} questions with an option ({share:.1%}) are longer "
        f"than --max-qa-length {shape.first} and lose their end"
    )
    better = min(longest, shape.length - SPECIAL - 1)
    left = int((lengths > better).sum())
    cure = f"--max-qa-length {better} would cut {left or 'none'}"
    most = checks.config.max_truncated
    tell_cut(said, share, cure, tell=TELL_CUT_QUESTIONS, most=most)
    return count


def count_answers(place: str, right: NDArray[np.int64]) -> dict[str, int]:
    """How often each letter is right; warns where it is always the same one."""
    counts = dict(zip(LETTERS, np.bincount(right, minlength=OPTIONS).tolist(), strict=True))
    if len(right) >= ENOUGH and max(counts.values()) == len(right):
        warnings.warn(
            f"{place}: the answer to all {len(right)} questions is {LETTERS[right[0]]}, as if the "
            "answers had been lost",
            stacklevel=2,
        )
    return counts


def make_questions(
    passages: Sequence[Passage], tokenizer: BertTokenizer, shape: Shape
) -> Questions:
    questions = [question for passage in passages for question in passage.questions]
    return Questions(
        encode([passage.article for passage in passages], tokenizer),
        encode([text for question in questions for text in question.filled], tokenizer),
        np.repeat(np.arange(len(passages)), [len(passage.questions) for passage in passages]),
        np.array([question.right for question in questions]),
        shape,
    )
