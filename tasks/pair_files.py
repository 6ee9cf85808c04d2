"""Files of labelled pairs of texts: GLUE's .tsv as released, and JSON.

.tsv: a header names the columns, of which three are read; quotes are not special. JSON: the
objects are {"text_a", "text_b", "label"}, or have the columns' names as keys; they are the values
of one object, the items of a list, or one a line. Which it is, the content tells.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.checks import LabelMap
from tasks.reading import read_marked

SIMPLE = ("text_a", "text_b", "label")
MOST_BAD = 0.01  # of the rows; GLUE's own QQP has about one of 100,000 that a line end has torn


@dataclass(frozen=True)
class Form:
    """What the files of a task hold."""

    columns: tuple[str, str, str]  # of the first text, the second one and the label
    labels: LabelMap
    cure: str  # which files would work
    none: str | None = None  # the label of pairs that have none, which are left out


@dataclass
class Pairs:
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    unlabelled: int = 0
    bad: list[str] = field(default_factory=list)
    """What is wrong with each row that was left out, and where it stands."""

    @property
    def classes(self) -> NDArray[np.int64]:
        return np.array(self.ids, np.int64)


def read_pairs(flag: str, file: Path, form: Form) -> Pairs:
    """Warns of rows that are left out because a column or a text of theirs is missing.

    Raises ValueError or OSError, naming flag, file and line, where these are more than one in a
    hundred, and for a label that is not in the map.
    """
    text = read_marked(flag, file, form.cure)
    place = f"{flag} {file}"
    is_json = text.lstrip()[:1] in ("{", "[")
    rows = parse_json(place, text, form) if is_json else parse_tsv(place, text, form)
    pairs, count = Pairs(), 0
    for where, row in rows:
        count += 1
        _add(pairs, where, row, form)
    _tell_bad(place, pairs.bad, count, form.cure)
    if not pairs.ids:
        raise ValueError(f"{place} has no pair with a label in {count} rows; {form.cure}")
    return pairs


def _add(pairs: Pairs, where: str, row: list[Any] | str, form: Form) -> None:
    """row: texts and label, or what is wrong with it."""
    if isinstance(row, str):
        pairs.bad.append(f"{where}: {row}")
        return
    first, second, label = row
    if not first.strip() or not second.strip():
        pairs.bad.append(f"{where}: a text is blank")
    elif form.none is not None and label == form.none:
        pairs.unlabelled += 1
    else:
        pairs.ids.append(form.labels.id_of(label, where))
        pairs.first.append(first)
        pairs.second.append(second)


def _tell_bad(place: str, bad: Sequence[str], count: int, cure: str) -> None:
    if not bad:
        return
    said = f"{place}: {len(bad)} of {count} rows are left out: {'; '.join(bad[:3])}"
    said += "; ..." if len(bad) > 3 else ""
    if len(bad) > MOST_BAD * count:
        raise ValueError(f"{said}; up to {MOST_BAD:.0%} would be let pass: {cure}")
    warnings.warn(said, stacklevel=3)


def parse_tsv(place: str, text: str, form: Form) -> Iterator[tuple[str, list[Any] | str]]:
    """(where it stands, its texts and label, or what is wrong with it) of each row."""
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
            f"{place} has no column {label}, as of a test set, whose labels are not public; "
            f"{form.cure}"
        )
    raise ValueError(
        f"{place}, line 1, should be a header with the columns {', '.join(form.columns)} once "
        f"each, and is {shown!r}; {form.cure}"
    )


def parse_json(place: str, text: str, form: Form) -> Iterator[tuple[str, list[Any] | str]]:
    """(where it stands, its texts and label) of each object."""
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
    """Whether the line is an object by itself, and no object of objects."""
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
