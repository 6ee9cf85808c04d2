"""Reads whole input files of the tasks; errors name the file and what would work instead."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

MARK = codecs.BOM_UTF8.decode()
ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ")  # first bytes of zip, gzip and xz files


def read_utf8(flag: str, file: Path, cure: str) -> str:
    """The text of a file, with a byte-order mark if it has one.

    Raises OSError where there is no such file, ValueError where it is empty, an archive or not
    UTF-8; the message names flag, file and line, and ends in `cure`, which says what would work.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{flag} {file} is a folder; {cure}")
    if not file.is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file; {cure}")
    content = file.read_bytes()
    if content.startswith(ARCHIVES):
        raise ValueError(f"{flag} {file} is an archive; unpack it: {cure}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{flag} {file}, line {line}, is not UTF-8; {cure}") from error
    if not text.removeprefix(MARK).strip():
        raise ValueError(f"{flag} {file} is empty; {cure}")
    return text


def read_marked(flag: str, file: Path, cure: str) -> str:
    """The text of a file, without a byte-order mark."""
    return read_utf8(flag, file, cure).removeprefix(MARK)


def read_text(flag: str, file: Path, cure: str) -> str:
    """The text of a file that a model reads as it is. Raises ValueError, too, where an editor has
    added a byte-order mark or carriage returns, which the model would read."""
    text = read_utf8(flag, file, cure)
    for mark, what in ((MARK, "a byte-order mark"), ("\r\n", "a carriage return")):
        if mark in text:
            line = text.count("\n", 0, text.index(mark)) + 1
            raise ValueError(f"{flag} {file}, line {line}, has {what}; {cure}")
    return text


def read_json(flag: str, file: Path, cure: str) -> Any:
    """Contents of a JSON file."""
    try:
        return json.loads(read_marked(flag, file, cure))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {file} is not JSON ({error}); {cure}") from error
