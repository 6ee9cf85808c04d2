"""jsonl in and out of the corpus steps: streamed, bad lines set aside, files put in place whole."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import tyro
from tqdm import tqdm

Record = dict[str, Any]
BAD_LINES_SHOWN = 5
BAD_LINES_KEPT = 1000


class Count:
    """Documents, and the UTF-8 bytes of their text (not of the jsonl around it)."""

    def __init__(self) -> None:
        self.documents = 0
        self.bytes = 0

    def add(self, text: str) -> None:
        self.documents += 1
        self.bytes += len(text.encode())


class Funnel:
    """What went into a step, what came out, and what was dropped for which reason."""

    def __init__(self, step: str, **settings: Any) -> None:
        self.step = step
        self.settings = settings
        self.input = Count()
        self.output = Count()
        self.dropped: dict[str, Count] = {}
        self.bad_lines: list[dict[str, Any]] = []

    def drop(self, text: str, reason: str) -> None:
        self.dropped.setdefault(reason, Count()).add(text)

    def set_aside(self, path: Path, number: int, line: bytes, reason: str) -> None:
        """Count a line that holds no document and note where; show the first few on stderr."""
        bad = self.dropped.setdefault("bad line", Count())
        bad.documents += 1
        bad.bytes += len(line)
        if bad.documents <= BAD_LINES_KEPT:
            self.bad_lines.append({"file": str(path), "line": number, "reason": reason})
        if bad.documents <= BAD_LINES_SHOWN:
            tqdm.write(f"warning: {path}:{number}: {reason}: line set aside", file=sys.stderr)

    def check_output(self, cure: str) -> None:
        """ValueError, with the counts by reason, where every document was dropped."""
        if not self.output.documents:
            reasons = ", ".join(f"{n.documents} {why}" for why, n in self.dropped.items())
            raise ValueError(
                f"{self.step}: all {self.input.documents} documents were dropped: {reasons}; {cure}"
            )

    def write(self, path: Path, **more: Any) -> None:
        """Write the report as JSON; `more` are keys of the step's own."""
        report = {
            "step": self.step,
            "settings": self.settings,
            "input": vars(self.input),
            "output": vars(self.output),
            "dropped": {reason: vars(count) for reason, count in self.dropped.items()},
            "bad_lines": self.bad_lines,
            **more,
        }
        with placed(path) as file:
            file.write(json.dumps(report, indent=1).encode())


@contextlib.contextmanager
def placed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it has been written to the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with staged.open("wb") as file:
            yield file
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def bar(step: str, total: int) -> "tqdm[Any]":
    """A progress bar over `total` bytes."""
    return tqdm(total=total, desc=step, unit="B", unit_scale=True)


def keyed_hash(key: str, name: str) -> bytes:
    """A fair coin in 16 bytes, the same on every machine; other keys toss independently."""
    return hashlib.blake2b(name.encode(), key=key.encode()[:64], digest_size=16).digest()


def parse_line(line: bytes) -> Record:
    """The record of one line.  ValueError with the reason if it holds no text."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('no "text" string')
    if not record["text"].strip():
        raise ValueError('empty "text"')
    try:
        record["text"].encode()
    except UnicodeEncodeError:
        raise ValueError('half a surrogate pair in "text"') from None
    return record


def read_records(paths: Sequence[Path], funnel: Funnel) -> Iterator[Record]:
    """Stream the documents of `paths`, with a progress bar over their bytes.

    Lines without a document are set aside in the funnel; blank lines are no lines.
    ValueError if the files hold no document at all.
    """
    total = sum(path.stat().st_size for path in paths)
    with bar(funnel.step, total) as progress:
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    progress.update(len(line))
                    if not line.strip():
                        continue
                    try:
                        record = parse_line(line)
                    except ValueError as error:
                        funnel.set_aside(path, number, line, str(error))
                        continue
                    funnel.input.add(record["text"])
                    yield record
    if not funnel.input.documents:
        raise ValueError(no_documents(paths, funnel.bad_lines))


def no_documents(paths: Sequence[Path], bad_lines: Sequence[dict[str, Any]]) -> str:
    """The message for input without a single document: what is wrong, where, what would work."""
    names = ", ".join(map(str, paths))
    where = "the input is empty"
    if bad_lines:
        where = "{file}:{line}: {reason}".format(**bad_lines[0])
    return f'--input {names} holds no document: {where}; each line has to be {{"text": "..."}}'


def write_record(file: IO[bytes], record: Record, funnel: Funnel) -> None:
    funnel.output.add(record["text"])
    file.write(json.dumps(record).encode() + b"\n")


def document_id(record: Record) -> str:
    """The document's id; its text where it has none."""
    return str(record.get("id", record["text"]))


def run(step: Callable[..., None]) -> None:
    """Run a step as a program, flags from its signature; a user's error ends it with status 2."""
    try:
        tyro.cli(step)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
