"""Input to extract: files of lines and archives, and single files, which may be millions.

Names of single files are in a listing on disk, not in memory; a range of it is one piece of work.
"""

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

from megatron.data.files import atomic_writer
from megatron.data.json_lines import OPENERS, bare_name, find_shards, warn_not_read
from megatron.errors import UsageError
from tools.corpus.files import Unit, cut
from tools.corpus.settings import say

Format = Literal["wikiextractor", "openwebtext", "wet", "text", "jsonl", "json"]
LINES = ("jsonl", "wikiextractor")  # formats whose files can be cut
TEXTS = ("text", "openwebtext")
PATTERNS = {"wikiextractor": "wiki_*", "wet": "*.wet*"}
TAR_ENDINGS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".tar": lambda raw: raw,
    ".tgz": OPENERS[".gz"],
    ".txz": OPENERS[".xz"],
}
PACKED = OPENERS | TAR_ENDINGS


@dataclass(frozen=True)
class Part:
    """A piece of the input: a range of a file of lines, a whole file, or a range of a listing."""

    unit: Unit
    name: str
    """The file's path under --input; empty for a listing."""
    bytes: int
    """Bytes to read; for a listing, those of its files."""


class Loose(NamedTuple):
    """The single files of a folder, or one single file."""

    root: Path
    """The folder, or the file."""
    unit: Unit
    """Represents all of them: their number, their bytes, and when the newest was changed."""


def is_packed(name: str) -> bool:
    """Whether the name is that of an archive or of a compressed file."""
    return PurePosixPath(name).suffix in PACKED


def is_lines(name: str) -> bool:
    """Whether the name is that of a file of JSON lines, which is not text."""
    return bare_name(name).endswith(".jsonl")


def find_parts(
    paths: Sequence[Path], format: Format, unit_bytes: int
) -> tuple[list[Part], list[Loose]]:
    """(parts, single files) of the input.  Raises ValueError, naming --input, if it has none."""
    if format == "jsonl":
        return _parts([(path, path.name) for path in find_shards(paths)], unit_bytes), []
    files: list[tuple[Path, str]] = []
    loose: list[Loose] = []
    for path in paths:
        if not path.exists():
            raise UsageError("--input", path, "a file or folder that is there")
        files += _fitting(path, format)
        if format in PATTERNS and path.is_dir():
            pattern = PATTERNS[format]
            others = (name for name, _ in walk(path) if not PurePosixPath(name).match(pattern))
            works = f"--format {format} reads files named {pattern}"
            warn_not_read(f"--input {path}", others, works)
        if format not in PATTERNS and (single := _loose(path)):
            loose.append(single)
        names = [path.name] if path.is_file() else (name for name, _ in walk(path))
        if format in TEXTS and (lines := next(filter(is_lines, names), None)):
            file = path / lines if path.is_dir() else path
            allowed = f"jsonl for {file}, which is no text but JSON lines"
            raise UsageError("--format", format, allowed, works=("--format", "jsonl"))
    parts = _parts(files, unit_bytes if format in LINES else sys.maxsize)
    if not parts and not loose:
        names = ", ".join(map(str, paths))
        wanted = f"{PATTERNS[format]} " if format in PATTERNS else ""
        raise ValueError(f"--input {names} holds no file {wanted}with anything in it")
    return parts, loose


def _fitting(path: Path, format: Format) -> Iterator[tuple[Path, str]]:
    """(file, path under --input) of archives, or of files that match the format's pattern."""
    if path.is_file():
        if format in PATTERNS or is_packed(path.name):
            yield path, path.name
        return
    for name, _ in walk(path):
        file = path / name
        if file.match(PATTERNS[format]) if format in PATTERNS else is_packed(name):
            yield file, name


def _parts(files: Sequence[tuple[Path, str]], unit_bytes: int) -> list[Part]:
    names = {str(path): name for path, name in files}
    for path, _ in files:
        if not path.stat().st_size:
            say(f"warning: --input {path} is empty")
    units = cut([path for path, _ in files], unit_bytes)
    return [Part(unit, names[unit.file], unit.stop - unit.start) for unit in units]


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(path in the folder, status) of all files but hidden ones, sorted; one folder in memory.

    Links to folders are not followed; a link that leads nowhere has its own status.
    """
    for name in sorted(os.listdir(folder)):  # noqa: PTH208, names alone are a third of the memory
        if name.startswith("."):
            continue
        path = folder / name
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            for below, found in walk(path):
                yield f"{name}/{below}", found
        elif not (stat.S_ISLNK(status.st_mode) and path.is_dir()):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
            yield name, status


def walk_loose(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The single files of a folder, or the one that `root` is."""
    files = walk(root) if root.is_dir() else [(root.name, root.stat())]
    return ((name, status) for name, status in files if not is_packed(name))


def _loose(root: Path) -> Loose | None:
    count = total = newest = 0
    for _, status in walk_loose(root):
        count += 1
        total += status.st_size
        newest = max(newest, status.st_mtime_ns)
    return Loose(root, Unit(0, str(root), 0, count, total, newest)) if count else None


def write_listing(
    loose: Sequence[Loose], unit_bytes: int, listing: Path
) -> list[tuple[int, int, int]]:
    """Write lines of [number of root, path], to be read in ranges of about --unit of files.

    Returns for each range its first byte, its last byte + 1, and the bytes of its files.
    """
    ranges = []
    with atomic_writer(listing) as lines:
        start = stop = size = 0
        for number, each in enumerate(loose):
            for name, status in walk_loose(each.root):
                stop += lines.write(json.dumps([number, name]).encode() + b"\n")
                size += status.st_size
                if size >= unit_bytes:
                    ranges.append((start, stop, size))
                    start, size = stop, 0
        if stop > start:
            ranges.append((start, stop, size))
    return ranges


def listed_parts(listing: Path, ranges: Sequence[tuple[int, int, int]]) -> list[Part]:
    """ranges: as write_listing returned them."""
    status = listing.stat()
    return [
        Part(Unit(k, str(listing), start, stop, status.st_size, status.st_mtime_ns), "", size)
        for k, (start, stop, size) in enumerate(ranges)
    ]


def group(parts: Sequence[Part], unit_bytes: int) -> Iterator[list[Part]]:
    """Groups of neighbours of up to --unit bytes; a larger part is a group by itself."""
    together: list[Part] = []
    size = 0
    for part in parts:
        if together and size + part.bytes > unit_bytes:
            yield together
            together, size = [], 0
        together.append(part)
        size += part.bytes
    if together:
        yield together
