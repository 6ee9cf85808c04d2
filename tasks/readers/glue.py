"""MNLI and QQP (section 5.3, table 5): the class of a pair of texts.

A sequence is [CLS] first text [SEP] second text [SEP]. If it is too long, tokens are cut from the
end of the longer text until both fit, as in BERT.

Files of labelled pairs of texts: GLUE's .tsv as released, and JSON.

.tsv: a header names the columns, of which three are read; quotes are not special. JSON: the
objects are {"text_a", "text_b", "label"}, or have the columns' names as keys; they are the values
of one object, or one per line. The content decides which format it is.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.checks import at_least
from megatron.data.tokenizer import BertTokenizer
from megatron.errors import UsageError
from tasks.protocol import (
    ChecksConfig,
    Example,
    FinetuneSettings,
    Finetuning,
    Logits,
    by_evaluation,
    figure_name,
)
from tasks.readers.inputs import (
    SPECIAL,
    InputChecks,
    PairExamples,
    Place,
    check_apart,
    encode,
    majority,
    read_marked,
    shape_of,
)

SIMPLE = ("text_a", "text_b", "label")
MOST_BAD = 0.01  # share of the rows; in GLUE's QQP a line end splits about one in 100,000


@dataclass(frozen=True)
class LabelMap:
    """Maps labels in the files to classes."""

    names: tuple[str, ...]  # of the classes, in the order of their ids
    others: Mapping[str, int] = field(default_factory=dict)  # further spellings, such as "1"
    cure: str = ""  # message for a number that is not one of these spellings

    def id_of(self, label: object, place: Place) -> int:
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


@dataclass(frozen=True)
class PairFormat:
    """Contents of a task's files."""

    columns: tuple[str, str, str]  # names for the first text, the second text and the label
    labels: LabelMap
    cure: str  # for messages: which files would work
    none: str | None = None  # value that stands for "no label"; such pairs are left out
    with_f1: bool = False


@dataclass
class Pairs:
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    unlabelled: int = 0
    bad: list[str] = field(default_factory=list)
    """The rows that were left out: location and error of each."""


def read_pairs(flag: str, file: Path, form: PairFormat) -> Pairs:
    """Warns of rows that are left out because they lack a column or a text.

    Raises ValueError or OSError, naming flag, file and line, if more than one row in a hundred is
    left out, and for a label that is not in the map.
    """
    text = read_marked(flag, file, form.cure)
    place = Place(f"{flag} {file}", form.cure)
    is_json = text.lstrip()[:1] in ("{", "[")
    rows = parse_json(place, text, form) if is_json else parse_tsv(place, text, form)
    pairs, count = Pairs(), 0
    for where, row in rows:
        count += 1
        if isinstance(row, str):  # the row's error
            pairs.bad.append(f"{where}: {row}")
            continue
        first, second, label = row
        if not first.strip() or not second.strip():
            pairs.bad.append(f"{where}: a text is blank")
        elif form.none is not None and label == form.none:
            pairs.unlabelled += 1
        else:
            pairs.ids.append(form.labels.id_of(label, where))
            pairs.first.append(first)
            pairs.second.append(second)
    if bad := pairs.bad:
        message = f"{place}: {len(bad)} of {count} rows are left out: {'; '.join(bad[:3])}"
        message += "; ..." if len(bad) > 3 else ""
        if len(bad) > MOST_BAD * count:
            raise ValueError(f"{message}; up to {MOST_BAD:.0%} would be let pass: {form.cure}")
        warnings.warn(message, stacklevel=2)
    if not pairs.ids:
        raise place.error(f" has no pair with a label in {count} rows")
    return pairs


def parse_tsv(place: Place, text: str, form: PairFormat) -> Iterator[tuple[Place, list[Any] | str]]:
    """(place, [text, text, label] or an error message) of each row."""
    lines = text.removesuffix("\n").split("\n")
    header = [name.strip() for name in lines[0].split("\t")]
    numbers = _find_columns(place, header, form)
    for number, line in enumerate(lines[1:], start=2):
        where, row = place.at(f"line {number}"), line.split("\t")
        if len(row) == len(header):
            yield where, [row[each].strip() for each in numbers]
        else:
            yield where, f"{len(row)} columns in place of the header's {len(header)}"


def _find_columns(place: Place, header: Sequence[str], form: PairFormat) -> list[int]:
    for names in (form.columns, SIMPLE):
        if all(header.count(name) == 1 for name in names):
            return [header.index(name) for name in names]
    *texts, label = form.columns
    shown = ", ".join(header)[:200]
    if all(name in header for name in texts) and label not in header:
        raise place.error(f" has no column {label}, like a test set, whose labels are not public")
    names = ", ".join(form.columns)
    raise place.error(
        f", line 1, should be a header with the columns {names} once each, and is {shown!r}"
    )


def parse_json(place: Place, text: str, form: PairFormat) -> Iterator[tuple[Place, list[Any]]]:
    """(place, [text, text, label]) of each object."""
    try:
        whole = json.loads(text)
    except ValueError as error:
        whole, reason = None, error  # objects line by line, or nothing that can be read
    if isinstance(whole, dict) and all(isinstance(each, dict) for each in whole.values()):
        records = [(place.at(f"item {name}"), record) for name, record in whole.items()]
    else:
        lines = enumerate(text.split("\n"), start=1)
        records = [(place.at(f"line {number}"), line) for number, line in lines if line.strip()]
    for where, record in records:
        if isinstance(record, str):
            try:
                record = json.loads(record)
            except ValueError as error:
                if where == records[0][0]:  # no line is an object, so the file was meant as one
                    raise place.error(f" is not JSON ({reason})") from error
                raise where.error(f" is not JSON ({error})") from error
        is_simple = isinstance(record, dict) and all(name in record for name in SIMPLE)
        is_of_columns = isinstance(record, dict) and form.columns[0] in record and not is_simple
        *texts, label = form.columns if is_of_columns else SIMPLE
        row = [where.take(record, key, str) for key in texts]
        if label not in record:
            raise where.error(f" has no {label}")
        yield where, [*row, record[label]]


OBJECTS = "JSON objects of text_a, text_b and label, one per line or the values of one object"
# The order of the paper's authors, which is alphabetical. Others start with entailment.
MNLI_FORMAT = PairFormat(
    ("sentence1", "sentence2", "gold_label"),
    LabelMap(
        ("contradiction", "entailment", "neutral"),
        cure=": which class a number means is not agreed upon (the paper's authors count "
        "contradiction, entailment, neutral; others entailment, neutral, contradiction); "
        "the names would work",
    ),
    f"GLUE's train.tsv, dev_matched.tsv and dev_mismatched.tsv of MNLI would work, or {OBJECTS}",
    none="-",  # for pairs on which the annotators did not agree
)
QQP_FORMAT = PairFormat(
    ("question1", "question2", "is_duplicate"),
    LabelMap(("not_duplicate", "duplicate"), {"0": 0, "1": 1}),
    f"GLUE's train.tsv and dev.tsv of QQP would work, or {OBJECTS}",
    with_f1=True,
)
CONVENTIONS = {
    "pairs": "with a label",
    "majority_accuracy": "accuracy of one who always names the class that is most frequent here",
    "accuracy": "the share of pairs whose class has the highest score; of equal scores the first "
    "class's counts",
    "f1": "of the second class, duplicate: 2 x hits / (pairs of the class + pairs predicted to be "
    "of it); 0 where that is 0 / 0",
}


@dataclass(frozen=True, kw_only=True)
class GlueSettings(FinetuneSettings):
    form: ClassVar[PairFormat]

    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, seq_length=SPECIAL + 2)  # a token of each text


@dataclass(frozen=True, kw_only=True)
class Classified(Finetuning):
    head = "classifier"

    labels: tuple[str, ...]
    train: Sequence[Example]
    evaluations: Mapping[str, PairExamples]
    best: str
    notes: Mapping[str, Any]
    with_f1: bool

    @property
    def conventions(self) -> Mapping[str, str]:
        meanings = {each: CONVENTIONS[each] for each in CONVENTIONS if self.with_f1 or each != "f1"}
        return by_evaluation(dict.fromkeys(self.evaluations, meanings))

    def score(self, logits: Logits) -> Mapping[str, Any]:
        found = {}
        for name, rows in logits.items():
            right = self.evaluations[name].classes
            predicted = np.stack(rows).argmax(axis=1)
            found[name] = {
                "pairs": len(right),
                "majority_accuracy": majority(right),
                "accuracy": float((predicted == right).mean()),
            }
            if self.with_f1:
                found[name]["f1"] = f1(predicted == 1, right == 1)
        return by_evaluation(found)


def f1(predicted: NDArray[np.bool_], right: NDArray[np.bool_]) -> float:
    count = int(predicted.sum() + right.sum())
    return 2 * int((predicted & right).sum()) / count if count else 0.0


@dataclass(frozen=True, kw_only=True)
class MNLISettings(GlueSettings):
    """The 336M model's settings in table 6."""

    form = MNLI_FORMAT
    epochs: int = 10
    lr: float = 1e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """Training data: GLUE's train.tsv of MNLI (columns sentence1, sentence2, gold_label), or JSON
    objects {"text_a", "text_b", "label"}, one per line or the values of one object. Labels are
    contradiction, entailment and neutral; pairs with "-" are left out. Without this flag a
    fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch: files of the same formats, dev_matched.tsv and
    dev_mismatched.tsv. If a name contains matched or mismatched, its figures begin with that word
    (matched_accuracy). Otherwise, figures begin with the file's name if there are several files
    (a.tsv: a_accuracy), and have no such prefix for a single file (accuracy)."""


@dataclass(frozen=True, kw_only=True)
class QQPSettings(GlueSettings):
    """The 336M model's settings in table 6."""

    form = QQP_FORMAT
    epochs: int = 12
    lr: float = 5e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """Training data: GLUE's train.tsv of QQP (columns question1, question2, is_duplicate), or JSON
    objects {"text_a", "text_b", "label"}, one per line or the values of one object. Labels are 0 or
    not_duplicate, 1 or duplicate. Without this flag a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch: files of the same formats, dev.tsv. A single file
    gives accuracy and f1. With several files, the figures of each begin with its name (a.tsv:
    a_accuracy)."""


def prepare(
    settings: GlueSettings, manifest: dict[str, Any], tokenizer: BertTokenizer
) -> Classified:
    """Raises ValueError or OSError, naming the flag, for data that cannot be used."""
    form = settings.form
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
        best=figure_name(next(iter(evaluations)), "accuracy"),
        notes=notes,
        with_f1=form.with_f1,
    )


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """The files by name of their evaluation: mismatched or matched if the file's name contains it;
    otherwise "" for a single file, and the file's name without suffix if there are several."""
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
    flag: str, files: Sequence[Path], form: PairFormat, checks: InputChecks
) -> tuple[PairExamples, dict[str, Any]]:
    """(the pairs of these files, counts for the record)."""
    parts = [read_pairs(flag, file, form) for file in files]
    first, second = ([t for p in parts for t in getattr(p, n)] for n in ("first", "second"))
    shape = shape_of(checks.tokenizer, checks.seq_length)
    classes = np.array([each for part in parts for each in part.ids], np.int64)
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


class MNLI:
    """MNLI (section 5.3, table 5): whether a sentence follows from another one, or contradicts it.

    Files whose names contain mismatched or matched are evaluations of that name.
    """

    Settings = MNLISettings
    prepare = staticmethod(prepare)


class QQP:
    """QQP (section 5.3, table 5): whether two questions ask the same thing."""

    Settings = QQPSettings
    prepare = staticmethod(prepare)
