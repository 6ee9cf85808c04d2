"""RACE as released: middle/ and high/, in them a JSON object a file, a passage and its questions.

{"article": text, "questions": [text, ...], "options": [[text, text, text, text], ...],
"answers": ["A" to "D", ...]}; further keys are not read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CURE = "a folder as released, with middle/ and high/ of .txt files, would work"
LEVELS = ("middle", "high")
LETTERS = ("A", "B", "C", "D")  # of the options
ARCHIVES = (".tar", ".gz", ".xz", ".tgz", ".txz", ".zip")


@dataclass(frozen=True)
class Question:
    text: str
    options: Sequence[str]  # four
    right: int  # number of the right one

    @property
    def filled(self) -> list[str]:
        """The question with each option."""
        if "_" in self.text:
            return [self.text.replace("_", option) for option in self.options]
        return [f"{self.text} {option}" for option in self.options]


@dataclass(frozen=True)
class Passage:
    article: str
    questions: Sequence[Question]

    @property
    def texts(self) -> Iterator[str]:
        """The article, and each question and its options."""
        yield self.article
        for question in self.questions:
            yield question.text
            yield from question.options


def find_levels(flag: str, path: Path, split: str) -> dict[str, Path]:
    """The folder of each level that is there: in the path, or the path itself.

    split: which of train, dev and test to take where the path holds these, or RACE/ that does.
    Raises ValueError or OSError, naming the flag, where there is neither.
    """
    if path.is_file():
        raise ValueError(f"{flag} {path} is a file; {_unpack(path)}")
    if not path.is_dir():
        raise FileNotFoundError(f"{flag} {path}: no such folder; {CURE}")
    if path.resolve().name in LEVELS:
        return {path.resolve().name: path}
    for folder in (path, path / split, path / "RACE" / split):
        if found := {name: folder / name for name in LEVELS if (folder / name).is_dir()}:
            return found
    archives = sorted(each for each in path.iterdir() if each.suffix in ARCHIVES)
    if archives:
        own = [each for each in archives if split in each.name] or archives
        raise ValueError(f"{flag} {path} holds an archive; {_unpack(own[0])}")
    raise ValueError(f"{flag} {path} has neither middle/ nor high/; {CURE}")


def _unpack(file: Path) -> str:
    if file.suffix not in ARCHIVES:
        return CURE
    return f"what `{'unzip' if file.suffix == '.zip' else 'tar xf'} {file}` unpacks would work"


def read_levels(flag: str, folders: Sequence[Path]) -> tuple[list[Passage], dict[str, int]]:
    """(the passages of these folders, what was counted of those that are no good)."""
    read = [read_level(flag, folder) for folder in folders]
    counts = {key: sum(counted[key] for _, counted in read) for key in read[0][1]}
    return [passage for passages, _ in read for passage in passages], counts


def read_level(flag: str, folder: Path) -> tuple[list[Passage], dict[str, int]]:
    """(the passages of a folder's .txt files, in the order of their names, what was counted).

    Warns of passages without a question, which are two of the release, and of texts that are
    blank. Raises ValueError, naming file and question, for what is not as released.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"{flag} {folder} holds no .txt file; {CURE}")
    passages, blank = [], []
    for file in files:
        passage = _read_passage(f"{flag} {file}", file)
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


def _read_passage(place: str, file: Path) -> Passage:
    try:
        record = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{place} is not one JSON object ({error}); {CURE}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} is no JSON object; {CURE}")
    if missing := [k for k in ("article", "questions", "options", "answers") if k not in record]:
        raise ValueError(f"{place} has no {' and no '.join(map(repr, missing))}; {CURE}")
    article = _text(place, "its article", record["article"])
    lists = [record[key] for key in ("questions", "options", "answers")]
    if not all(isinstance(each, list) for each in lists) or len(set(map(len, lists))) > 1:
        counts = [len(each) if isinstance(each, list) else type(each).__name__ for each in lists]
        raise ValueError(
            f"{place} has {counts[0]} questions, {counts[1]} lists of options and {counts[2]} "
            "answers; one of each a question would work"
        )
    rows = enumerate(zip(*lists, strict=True), start=1)
    return Passage(article, [_question(f"{place}, question {n}", *row) for n, row in rows])


def _question(place: str, text: Any, options: Any, answer: Any) -> Question:
    if not isinstance(options, list) or len(options) != len(LETTERS):
        count = len(options) if isinstance(options, list) else type(options).__name__
        raise ValueError(f"{place}: {count} options; {len(LETTERS)} would work")
    if answer not in LETTERS:
        raise ValueError(f"{place}: the answer {answer!r} is not one of {', '.join(LETTERS)}")
    return Question(
        _text(place, "its text", text),
        [_text(place, "an option", each) for each in options],
        LETTERS.index(answer),
    )


def _text(place: str, what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: {what} is {type(value).__name__}; text would work")
    return value
