"""RACE (section 5.3, table 5): the right one of four answers to a question about a passage.

A sequence is [CLS] question and option [SEP] passage [SEP], in the order of the paper's authors.
The option replaces every "_" of the question; a question without "_" is followed by a blank and
the option. The end of the passage is cut where the sequence is too long.

RACE as released: folders middle/ and high/ with one JSON object per file, a passage and its
questions: {"article": text, "questions": [text, ...], "options": [[text, text, text, text], ...],
"answers": ["A" to "D", ...]}; other keys are not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import positive
from megatron.data.tokenizer import BertTokenizer
from megatron.errors import UsageError
from tasks.protocol import (
    ChecksConfig,
    Example,
    FinetuneSettings,
    Finetuning,
    Logits,
    by_evaluation,
)
from tasks.readers.inputs import (
    SPECIAL,
    WARN_CUT_QUESTIONS,
    InputChecks,
    Place,
    Ragged,
    Shape,
    check_apart,
    check_cut,
    encode,
    majority,
    read_json,
    shape_of,
)

CURE = (
    "a folder as released, with middle/ and high/ of .txt files, which `tar xf RACE.tar.gz` "
    "unpacks, would work"
)
LEVELS = ("middle", "high")
LETTERS = ("A", "B", "C", "D")  # of the options
OPTIONS = len(LETTERS)


@dataclass(frozen=True)
class RaceQuestion:
    text: str
    options: Sequence[str]  # four
    right: int  # index of the right option

    @property
    def filled(self) -> list[str]:
        """The question filled in with each option."""
        if "_" in self.text:
            return [self.text.replace("_", option) for option in self.options]
        return [f"{self.text} {option}" for option in self.options]


@dataclass(frozen=True)
class RacePassage:
    article: str
    questions: Sequence[RaceQuestion]

    @property
    def texts(self) -> Iterator[str]:
        """The article, and each question and its options."""
        yield self.article
        for question in self.questions:
            yield question.text
            yield from question.options


def find_levels(flag: str, path: Path, split: str) -> dict[str, Path]:
    """The folder of each level that exists: inside the path, or the path itself.

    split: train, dev or test; the folder to use if the path, or RACE/ inside it, has such folders.
    Raises ValueError or OSError, naming the flag, where no level is found.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{flag} {path}: no such folder; {CURE}")
    if path.resolve().name in LEVELS:
        return {path.resolve().name: path}
    for folder in (path, path / split, path / "RACE" / split):
        if found := {name: folder / name for name in LEVELS if (folder / name).is_dir()}:
            return found
    raise ValueError(f"{flag} {path} has neither middle/ nor high/; {CURE}")


def read_level(flag: str, folder: Path) -> tuple[list[RacePassage], dict[str, int]]:
    """(passages of a folder's .txt files, in the order of their names; counts for the record).

    Warns of passages without a question, of which the release has two, and of blank texts.
    Raises ValueError, naming file and question, where the format is not that of the release.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"{flag} {folder} holds no .txt file; {CURE}")
    passages, blank = [], []
    for file in files:
        passage = _read_passage(flag, file)
        passages.append(passage)
        if any(not text.strip() for text in passage.texts):
            blank.append(file)
    without = [file for file, each in zip(files, passages, strict=True) if not each.questions]
    for found, what in ((without, "no question, and is left out"), (blank, "a blank text")):
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            warnings.warn(f"{flag} {found[0]} has {what}{more}", stacklevel=2)
    kept = [each for each in passages if each.questions]
    if not kept:
        raise ValueError(f"{flag} {folder} holds no question in {len(files)} files; {CURE}")
    counts = {
        "passages_without_a_question_left_out": len(without),
        "passages_with_a_blank_text": len(blank),
    }
    return kept, counts


def _read_passage(flag: str, file: Path) -> RacePassage:
    place, record = Place(f"{flag} {file}", CURE), read_json(flag, file, CURE)
    article = place.take(record, "article", str)
    keys = ("questions", "options", "answers")
    lists = [place.take(record, key, list) for key in keys]
    if len(set(map(len, lists))) > 1:
        counts = ", ".join(f"{len(each)} {key}" for key, each in zip(keys, lists, strict=True))
        raise ValueError(f"{place} has {counts}; one of each a question would work")
    questions = []
    for number, (text, options, answer) in enumerate(zip(*lists, strict=True), start=1):
        where = f"{place}, question {number}"
        texts = [text, *options] if isinstance(options, list) else []
        if len(texts) != 1 + OPTIONS or not all(isinstance(each, str) for each in texts):
            raise ValueError(f"{where}: a text and {OPTIONS} options, each a text, would work")
        if answer not in LETTERS:
            raise ValueError(f"{where}: the answer {answer!r} is not one of {', '.join(LETTERS)}")
        questions.append(RaceQuestion(text, options, LETTERS.index(answer)))
    return RacePassage(article, questions)


ENOUGH = 20  # so many equal answers occur by chance in less than one of 10^11 cases
CONVENTIONS = {
    "questions": "of four options each, of the level of schools that the name begins with, or of "
    "all levels that were read",
    "majority_accuracy": "accuracy of one who always names the letter that is right most often",
    "accuracy": "the share of questions whose right option has the highest score; of options with "
    "equal scores the first one counts",
}


@dataclass(frozen=True, kw_only=True)
class Settings(FinetuneSettings):
    """In a folder with train/ and dev/, --train-data reads train/ and --valid-data dev/."""

    hyper_parameters = (*FinetuneSettings.hyper_parameters, "max_qa_length")

    train_data: tuple[Path, ...] = ()
    """Training data: folders as released, with middle/, high/ or both (RACE/train), or folders of
    these names. They hold one .txt file per passage, JSON of {"article", "questions", "options",
    "answers"}. If a folder holds train/, that is used. Without this flag a fine-tuned model is
    evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch: folders of the same kind (RACE/dev; if a folder
    holds dev/, that is used). The figures of a level begin with its name (middle_accuracy);
    accuracy is over all levels read."""

    max_qa_length: int | None = None
    """Tokens kept of a question with an option; a quarter of --seq-length if not given (for 512 the
    128 of the paper's authors)."""

    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_qa_length")
        if self.kept_qa + SPECIAL >= self.seq_length:
            shortest = self.max_qa_length + SPECIAL + 1 if self.max_qa_length else 16
            raise UsageError(
                "--seq-length",
                self.seq_length,
                f"above --max-qa-length {self.kept_qa} and {SPECIAL} special tokens",
                works=("--seq-length", str(shortest)),
            )

    @property
    def kept_qa(self) -> int:
        return self.max_qa_length or -(-self.seq_length // 4)


@dataclass(frozen=True)
class Questions(Sequence[Example]):
    """Questions with their four options; a passage is encoded once for all of its questions."""

    passages: Ragged
    options: Ragged  # each with its question; four rows per question
    passage_of: NDArray[np.int64]  # [questions]
    right: NDArray[np.int64]  # [questions], index of the right option
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
        """[4 x questions], the lengths of the sequences before cutting."""
        passages = self.passages.lengths[self.passage_of]
        return self.options.lengths + np.repeat(passages, OPTIONS) + SPECIAL


@dataclass(frozen=True, kw_only=True)
class Race(Finetuning):
    head = "choice"
    labels = ()
    best = "accuracy"

    train: Sequence[Example]
    evaluations: Mapping[str, Questions]
    notes: Mapping[str, Any]

    @property
    def conventions(self) -> Mapping[str, str]:
        return by_evaluation(dict.fromkeys(["", *self.evaluations], CONVENTIONS))

    def score(self, logits: Logits) -> Mapping[str, Any]:
        right = {name: self.evaluations[name].right for name in logits}
        hits = {name: np.stack(rows).argmax(axis=1) == right[name] for name, rows in logits.items()}
        # All levels together, under names without a prefix.
        right[""] = np.concatenate([*right.values()])
        hits[""] = np.concatenate([*hits.values()])
        return by_evaluation(
            {
                name: {
                    "questions": len(right[name]),
                    "majority_accuracy": majority(right[name]),
                    "accuracy": float(hits[name].mean()),
                }
                for name in right
            }
        )


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: BertTokenizer) -> Race:
    """Raises ValueError or OSError, naming the flag, for data that cannot be used."""
    train = find_all("--train-data", settings.train_data, "train")
    valid = find_all("--valid-data", settings.valid_data, "dev")
    check_apart(*([path for paths in each.values() for path in paths] for each in (train, valid)))
    positions = manifest["config"]["model"]["max_position_embeddings"]
    checks = InputChecks(settings.checks, tokenizer, settings.seq_length, positions)
    shape = shape_of(tokenizer, settings.seq_length, cut="second", first=settings.kept_qa)
    evaluations, counted = {}, {}
    for level, folders in valid.items():
        evaluations[level], counted[level] = read_questions("--valid-data", folders, shape, checks)
    notes: dict[str, Any] = {"max_qa_length": settings.kept_qa, "input": {"valid": counted}}
    folders = [folder for each in train.values() for folder in each]
    examples: Sequence[Example] = []
    if folders:
        examples, notes["input"]["train"] = read_questions("--train-data", folders, shape, checks)
    return Race(train=examples, evaluations=evaluations, notes=notes)


def find_all(flag: str, paths: Sequence[Path], split: str) -> dict[str, list[Path]]:
    """The folders of each level that exists, middle first."""
    found = [find_levels(flag, path, split) for path in paths]
    levels = {level: [each[level] for each in found if level in each] for level in LEVELS}
    return {level: folders for level, folders in levels.items() if folders}


def read_questions(
    flag: str, folders: Sequence[Path], shape: Shape, checks: InputChecks
) -> tuple[Questions, dict[str, Any]]:
    """(the questions of these folders, counts for the record)."""
    read = [read_level(flag, folder) for folder in folders]
    left_out = {key: sum(counted[key] for _, counted in read) for key in read[0][1]}
    passages = [passage for found, _ in read for passage in found]
    questions = [question for passage in passages for question in passage.questions]
    examples = Questions(
        encode([passage.article for passage in passages], checks.tokenizer),
        encode([text for question in questions for text in question.filled], checks.tokenizer),
        np.repeat(np.arange(len(passages)), [len(passage.questions) for passage in passages]),
        np.array([question.right for question in questions]),
        shape,
    )
    place = f"{flag} {' '.join(map(str, folders))}"
    assert shape.first is not None
    # Most of the cut text is the option itself: without it the four sequences of a question without
    # a blank to fill would be equal.
    limit = ("--max-qa-length", shape.first, shape.length - SPECIAL - 1)
    texts = (text for passage in passages for text in passage.texts)
    tokens = np.concatenate([examples.passages.tokens, examples.options.tokens])
    return examples, {
        "folders": [str(folder) for folder in folders],
        "passages": len(passages),
        **left_out,
        "questions": len(examples),
        "answers": count_answers(place, examples.right),
        **checks.check(place, texts, tokens, examples.whole),
        "truncated_options": check_cut(
            place,
            "questions with an option",
            examples.options.lengths,
            limit,
            WARN_CUT_QUESTIONS,
            checks.config.max_truncated,
        ),
    }


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
