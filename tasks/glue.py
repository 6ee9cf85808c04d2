"""MNLI and QQP (section 5.3, table 5): the class of a pair of texts.

A sequence is [CLS] first text [SEP] second text [SEP]. If it is too long, tokens are cut from the
end of the longer text until both fit, as in BERT.

Files of labelled pairs of texts: GLUE's .tsv as released, and JSON.

.tsv: a header names the columns, of which three are read; quotes are not special. JSON: the
objects are {"text_a", "text_b", "label"}, or have the columns' names as keys; they are the values
of one object, the items of a list, or one per line. The content decides which format it is.
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

from megatron.data.tokenizer import BertTokenizer
from megatron.errors import UsageError
from tasks.checks import ChecksConfig, InputChecks, LabelMap, check_apart, check_classes, majority
from tasks.pairs import SPECIAL, PairExamples, encode, shape_of
from tasks.protocol import Example, FinetuneSettings, Finetuning, name_conventions
from tasks.reading import read_marked

SIMPLE = ("text_a", "text_b", "label")
MOST_BAD = 0.01  # share of the rows; in GLUE's QQP a line end splits about one in 100,000


@dataclass(frozen=True)
class Form:
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


def read_pairs(flag: str, file: Path, form: Form) -> Pairs:
    """Warns of rows that are left out because they lack a column or a text.

    Raises ValueError or OSError, naming flag, file and line, if more than one row in a hundred is
    left out, and for a label that is not in the map.
    """
    text = read_marked(flag, file, form.cure)
    place = f"{flag} {file}"
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
        raise ValueError(f"{place} has no pair with a label in {count} rows; {form.cure}")
    return pairs


def parse_tsv(place: str, text: str, form: Form) -> Iterator[tuple[str, list[Any] | str]]:
    """(location, [text, text, label] or an error message) of each row."""
    lines = text.removesuffix("\n").split("\n")
    header = [name.strip() for name in lines[0].split("\t")]
    numbers = _find_columns(place, header, form)
    for number, line in enumerate(lines[1:], start=2):
        where, row = f"{place}, line {number}", line.split("\t")
        if len(row) == len(header):
            yield where, [row[each].strip() for each in numbers]
        else:
            yield where, f"{len(row)} columns in place of the header's {len(header)}"


def _find_columns(place: str, header: Sequence[str], form: Form) -> list[int]:
    for names in (form.columns, SIMPLE):
        if all(header.count(name) == 1 for name in names):
            return [header.index(name) for name in names]
    *texts, label = form.columns
    shown = ", ".join(header)[:200]
    if all(name in header for name in texts) and label not in header:
        raise ValueError(
            f"{place} has no column {label}, like a test set, whose labels are not public; "
            f"{form.cure}"
        )
    raise ValueError(
        f"{place}, line 1, should be a header with the columns {', '.join(form.columns)} once "
        f"each, and is {shown!r}; {form.cure}"
    )


def parse_json(place: str, text: str, form: Form) -> Iterator[tuple[str, list[Any] | str]]:
    """(location, [text, text, label]) of each object."""
    for where, record in _json_records(place, text, form):
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no JSON object but {type(record).__name__}; {form.cure}")
        keys = next((each for each in (SIMPLE, form.columns) if set(each) <= set(record)), None)
        if keys is None:
            missing = [key for key in SIMPLE if key not in record]
            raise ValueError(f"{where} has no {' and no '.join(missing)}; {form.cure}")
        for key in keys[:2]:
            if not isinstance(record[key], str):
                kind = type(record[key]).__name__
                raise ValueError(f"{where}: {key} is {kind}; text would work")
        yield where, [record[key] for key in keys]


def _json_records(place: str, text: str, form: Form) -> Iterator[tuple[str, Any]]:
    first = text.lstrip().partition("\n")[0]
    if _is_record(first):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{place}, line {number}", _parse(f"{place}, line {number}", line, form)
        return
    whole = _parse(place, text, form)
    rows = whole.items() if isinstance(whole, dict) else enumerate(whole)
    for name, record in rows:
        yield f"{place}, item {name}", record


def _is_record(line: str) -> bool:
    """Whether the line is a whole JSON object, and not an object of objects."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and not all(isinstance(x, dict) for x in record.values())


def _parse(place: str, text: str, form: Form) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error}); {form.cure}") from error


# The order of the paper's authors, which is alphabetical. Others start with entailment.
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
    none="-",  # for pairs on which the annotators did not agree
)
QQP_FORM = Form(
    ("question1", "question2", "is_duplicate"),
    LabelMap(("not_duplicate", "duplicate"), {"0": 0, "1": 1}),
    "GLUE's train.tsv and dev.tsv of QQP would work, or JSON of objects with text_a, text_b and "
    "label",
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
    form: ClassVar[Form]

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
        predicted = np.stack(logits).argmax(axis=1)
        figures = {
            "pairs": len(right),
            "majority_accuracy": majority(right),
            "accuracy": float((predicted == right).mean()),
        }
        return {**figures, "f1": f1(predicted == 1, right == 1)} if self.with_f1 else figures


def f1(predicted: NDArray[np.bool_], right: NDArray[np.bool_]) -> float:
    count = int(predicted.sum() + right.sum())
    return 2 * int((predicted & right).sum()) / count if count else 0.0


@dataclass(frozen=True, kw_only=True)
class MNLISettings(GlueSettings):
    """The 336M model's settings in table 6."""

    form = MNLI_FORM
    epochs: int = 10
    lr: float = 1e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """Training data: GLUE's train.tsv of MNLI (columns sentence1, sentence2, gold_label), or JSON
    of {"text_a", "text_b", "label"}: a list, or one object per line. Labels are contradiction,
    entailment and neutral; pairs with "-" are left out. Without this flag a fine-tuned model is
    evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch: files of the same formats, dev_matched.tsv and
    dev_mismatched.tsv. If a name contains matched or mismatched, its figures begin with that word
    (matched_accuracy). Otherwise, figures begin with the file's name if there are several files
    (a.tsv: a_accuracy), and have no such prefix for a single file (accuracy)."""


@dataclass(frozen=True, kw_only=True)
class QQPSettings(GlueSettings):
    """The 336M model's settings in table 6."""

    form = QQP_FORM
    epochs: int = 12
    lr: float = 5e-5
    global_batch_size: int = 128

    train_data: tuple[Path, ...] = ()
    """Training data: GLUE's train.tsv of QQP (columns question1, question2, is_duplicate), or JSON
    of {"text_a", "text_b", "label"}: a list, or one object per line. Labels are 0 or not_duplicate,
    1 or duplicate. Without this flag a fine-tuned model is evaluated."""

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
        best=(next(iter(evaluations)), "accuracy"),
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
    flag: str, files: Sequence[Path], form: Form, checks: InputChecks
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
