"""Documents that are read one by one, for padded samples of one document each.

A source of documents implements the protocol `Documents`; `open_documents` opens the source that a
path of --data-path names. Offsets of JSON lines are found once; a line is read and parsed when it
is asked for.
"""

import os
import warnings
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.data.cache import Entries, scan_once
from megatron.data.files import DataError, sha256, with_suffix
from megatron.data.json_lines import OPENERS, is_text, parse_line, parse_record, read_lines
from megatron.data.map_style import (
    DATA_PATH,
    DATASET_NAME,
    check_no_choice,
    names_map_style,
    open_map_style,
)
from megatron.errors import UsageError

ENDINGS = (".jsonl", ".json")


class Documents(Protocol):
    """Texts by number."""

    name: str
    """Name of the file, for messages."""
    num_documents: int
    content: str
    """Identity of the texts, "SHA-256 ..."; a resumed run must find the same."""

    def text(self, number: int) -> str:
        """Text of the document of this number, in range(num_documents); safe in any thread."""
        ...

    def location(self, number: int) -> str:
        """Location of the document of this number, for messages."""
        ...


def names_documents(path: str) -> bool:
    """Whether a path of --data-path names documents, not the prefix of a .bin and .idx pair."""
    if names_map_style(path):
        return not with_suffix(path, ".idx").is_file()
    stem = path.removesuffix(Path(path).suffix) if Path(path).suffix in OPENERS else path
    return stem.endswith(ENDINGS)


def open_documents(
    path: str, *, key: str = "text", split: str | None = None, config: str | None = None
) -> Documents:
    """The documents at a path of --data-path.

    key: key of the text in a JSON line, or its column. split: the split of a folder that holds
    several, by default "train"; config: likewise its configuration. Raises UsageError for a path
    without documents.
    """
    if names_map_style(path):
        return open_map_style(path, column=key, split=split, config=config)
    if not names_documents(path):
        allowed = "a file named *.parquet or *.jsonl, as {} reads them"
        if with_suffix(path, ".idx").is_file():
            allowed += ", and no .bin and .idx pair, of packed tokens"
        works = (DATASET_NAME, path) if is_text(path) else ()
        raise UsageError(DATA_PATH, path, allowed, "--pad", works=works)
    if (ending := Path(path).suffix) in OPENERS:
        allowed = "decompressed, so that a single line can be read"
        raise UsageError(DATA_PATH, path, allowed, works=path.removesuffix(ending))
    if not Path(path).is_file():
        raise UsageError(DATA_PATH, path, "a file that exists")
    check_no_choice(f"--data-path {path}", split=split, config=config)
    return JsonLines(path, key)


class JsonLines:
    """The texts of a file of JSON lines, in its order; lines without text are left out.

    One pass over the file finds and checks its lines, and hashes the file.
    """

    def __init__(self, path: str, key: str) -> None:
        """Warns of lines without text; raises UsageError if none has text."""
        self.name, self._key = path, key
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        opened = os.fstat(self._descriptor)
        lines = scan_once(Path(path), [Path(path)], [key], partial(_scan, path, key))
        stamps = [(s.st_ino, s.st_size, s.st_mtime_ns) for s in (opened, Path(path).stat())]
        if stamps[0] != stamps[1]:
            raise DataError(f"--data-path {path} changes while it is read; a finished file works")
        self._starts, self._sizes = lines["starts"], lines["sizes"]
        self.num_documents = len(self._starts)
        self.num_bytes = int(self._sizes.sum(dtype=np.int64))
        self.content = f"SHA-256 {lines['digest']}, key {key}"
        bad, first_bad = lines["bad"], lines["first_bad"]
        with Path(path).open("rb") as stream:
            start = stream.read(100).strip()
            stream.seek(-min(100, Path(path).stat().st_size), os.SEEK_END)
            is_array = start.startswith(b"[") and stream.read().rstrip().endswith(b"]")
        if bad and self.num_documents <= 1 and is_array:  # its last line may be a document
            allowed = "a file of JSON lines, not of one JSON array"
            raise UsageError(DATA_PATH, path, allowed, works=(DATASET_NAME, path))
        if not self.num_documents:
            allowed = "a file with lines such as {}, or read by another {}{}"
            others = f'{{"{key}": "some text"}}', "--json-key", f" ({first_bad})" if bad else ""
            raise UsageError(DATA_PATH, path, allowed, *others)
        if bad:
            warnings.warn(
                f"--data-path {path}: {bad} of {bad + self.num_documents} lines hold no document "
                f"and are left out; the first is {first_bad}",
                stacklevel=3,
            )

    def text(self, number: int) -> str:
        """Raises DataError if the file has changed since it was opened."""
        size, start = int(self._sizes[number]), int(self._starts[number])
        content = os.pread(self._descriptor, size, start)
        try:
            return str(parse_record(content, self._key)[self._key])
        except ValueError as error:
            raise DataError(
                f"--data-path {self.name}: the line at byte {start} has changed since the file was "
                f"opened ({error}); a file that stays as it is works"
            ) from error

    def location(self, number: int) -> str:
        """Lines are counted from 1."""
        return f"{self.name}, line {_line_number(self.name, int(self._starts[number]))}"


def _scan(path: str, key: str) -> Entries:
    """starts: int64 [documents], byte at which each line starts. sizes: int32 [documents], bytes of
    each line without its end. digest: SHA-256, in hex, of the whole file. bad: number of lines
    without a document; first_bad: the first of them, and why."""
    starts, sizes, bad, first_bad = array("q"), array("i"), 0, ""
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(sha256, Path(path))
        for line in read_lines(path):
            try:
                parse_line(line, key)
            except ValueError as error:
                first_bad = first_bad or f"line {_line_number(path, line.offset)}: {error}"
                bad += 1
            else:
                starts.append(line.offset)
                sizes.append(len(line.content))
    yield "starts", np.frombuffer(starts, np.int64)
    yield "sizes", np.frombuffer(sizes, np.int32)
    yield from {"digest": digest.result(), "bad": bad, "first_bad": first_bad}.items()


def _line_number(path: str, offset: int) -> int:
    """Number, from 1, of the line that starts at this byte."""
    number = 1
    with Path(path).open("rb") as stream:
        while offset and (piece := stream.read(min(offset, 1 << 20))):
            number += piece.count(b"\n")
            offset -= len(piece)
    return number
