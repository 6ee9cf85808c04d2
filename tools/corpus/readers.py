"""Reads the formats in which corpora are published; records have at least {"text"}.

The input is files of lines, archives, and single files, which may be millions: their names are in
a listing on disk, not in memory, and a range of it is one piece of work.  Readers are generators in
bounded memory.  Content that is no document becomes a Fault with its location; no content of a file
ends a run.
"""

import contextlib
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

from megatron.data.json_lines import (
    LONGEST_LINE,
    OPENERS,
    Damage,
    bare_name,
    damage,
    find_shards,
    open_shard,
    parse_json,
    read_lines,
    read_shard,
    warn_not_read,
)
from megatron.errors import UsageError
from tools.corpus.files import Record, Unit, cut, scratch_writer
from tools.corpus.settings import say

Format = Literal["wikiextractor", "openwebtext", "wet", "text", "jsonl", "json"]
LINES = ("jsonl", "wikiextractor")  # formats whose files can be cut
KEYED = (*LINES, "json")  # formats of JSON objects
TEXTS = ("text", "openwebtext")
PATTERNS = {"wikiextractor": "wiki_*", "wet": "*.wet*"}
TAR_ENDINGS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".tar": lambda raw: raw,
    ".tgz": OPENERS[".gz"],
    ".txz": OPENERS[".xz"],
}
PACKED = OPENERS | TAR_ENDINGS
BUFFER = 1 << 20  # bytes that are decompressed at a time


@dataclass(frozen=True)
class SourceSplit:
    """A piece of the input: a range of a file of lines, a whole file, or a range of a listing."""

    unit: Unit
    name: str
    """The file's path under --input; empty for a listing."""
    bytes: int
    """Bytes to read; for a listing, those of its files."""


class LooseFiles(NamedTuple):
    """The single files of a folder, or one single file."""

    root: Path
    """The folder, or the file."""
    unit: Unit
    """Represents all of them: their number, their bytes, and when the newest was changed."""


class Fault(NamedTuple):
    file: str
    offset: int
    """Byte of the decompressed file, or of the open archive, at which it was found."""
    content: bytes
    reason: str


Item = Record | Fault
Parse = Callable[[bytes, str], Record]  # takes (content of a file, its name)


def is_packed(name: str) -> bool:
    """Whether the name is that of an archive or of a compressed file."""
    return PurePosixPath(name).suffix in PACKED


def is_lines(name: str) -> bool:
    """Whether the name is that of a file of JSON lines, which is not text."""
    return bare_name(name).endswith(".jsonl")


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(path in the folder, status) of all files but hidden ones, sorted, with the names of one
    folder in memory; of a file, its name and status.

    Links to folders are not followed; a link that leads nowhere has its own status.
    """
    if not root.is_dir():
        yield root.name, root.stat()
        return
    for name in sorted(os.listdir(root)):  # noqa: PTH208, names alone are a third of the memory
        if name.startswith("."):
            continue
        path = root / name
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
    return ((name, status) for name, status in walk(root) if not is_packed(name))


def find_input(
    paths: Sequence[Path], format: Format, unit_bytes: int
) -> tuple[list[SourceSplit], list[LooseFiles]]:
    """(splits of files, single files).  Raises UsageError for --input without any."""
    if format == "jsonl":
        return _cut([(path, path.name) for path in find_shards(paths)], unit_bytes), []
    pattern = PATTERNS.get(format)
    files: list[tuple[Path, str]] = []
    loose: list[LooseFiles] = []
    for path in paths:
        if not path.exists():
            raise UsageError("--input", path, "a file or folder that is there")
        count = size = newest = 0
        for name, status in walk(path):
            file = path / name if path.is_dir() else path
            if format in TEXTS and is_lines(name):
                allowed = f"jsonl for {file}, which is no text but JSON lines"
                raise UsageError("--format", format, allowed, works=("--format", "jsonl"))
            if pattern is None and not is_packed(name):
                count += 1
                size += status.st_size
                newest = max(newest, status.st_mtime_ns)
            elif pattern is None or file == path or file.match(pattern):
                files.append((file, name))
        if count:
            loose.append(LooseFiles(path, Unit(0, str(path), 0, count, size, newest)))
        if pattern and path.is_dir():
            others = (name for name, _ in walk(path) if not PurePosixPath(name).match(pattern))
            works = f"--format {format} reads files named {pattern}"
            warn_not_read(f"--input {path}", others, works)
    splits = _cut(files, unit_bytes if format in LINES else sys.maxsize)
    if not splits and not loose:
        named = f" {pattern}" if pattern else ""
        allowed = f"a file{named} with content, or a folder of such files"
        raise UsageError("--input", " ".join(map(str, paths)), allowed)
    return splits, loose


def _cut(files: Sequence[tuple[Path, str]], unit_bytes: int) -> list[SourceSplit]:
    names = {str(path): name for path, name in files}
    for path, _ in files:
        if not path.stat().st_size:
            say(f"warning: --input {path} is empty")
    units = cut([path for path, _ in files], unit_bytes)
    return [SourceSplit(unit, names[unit.file], unit.stop - unit.start) for unit in units]


def write_listing(
    loose: Sequence[LooseFiles], unit_bytes: int, listing: Path
) -> list[tuple[int, int, int]]:
    """Write lines of [number of root, path], to be read in ranges of about --unit of files.

    Returns for each range its first byte, its last byte + 1, and the bytes of its files.
    """
    ranges = []
    with scratch_writer(listing) as lines:
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


def listed(listing: Path, ranges: Sequence[tuple[int, int, int]]) -> list[SourceSplit]:
    """ranges: as write_listing returned them."""
    status = listing.stat()
    return [
        SourceSplit(
            Unit(k, str(listing), start, stop, status.st_size, status.st_mtime_ns), "", size
        )
        for k, (start, stop, size) in enumerate(ranges)
    ]


def read(split: SourceSplit, roots: Sequence[str], format: Format, key: str) -> Iterator[Item]:
    """The documents of a piece of the input.  roots: the folders that a listing refers to."""
    if format in LINES:
        return read_json_lines(split, key)
    if format == "wet":
        return read_wet(split)

    def parse(content: bytes, name: str) -> Record:
        if format == "json":
            record = parse_fields(content, key)
            return record if record.get("id") else record | {"id": name}
        if is_lines(name):
            raise ValueError("JSON lines, which --format jsonl reads")
        return {"text": content.decode("utf-8-sig"), "id": name}

    return read_packed(split, parse) if split.name else read_listed(split, roots, parse)


def parse_fields(line: bytes, key: str) -> Record:
    """Like parse_record, but accepts an empty text."""
    record = parse_json(line)
    if isinstance(record, dict) and isinstance(record.get(key), str):
        return record
    raise ValueError(f'no "{key}" string')


def read_json_lines(split: SourceSplit, key: str) -> Iterator[Item]:
    """Read a range of a file of JSON lines with their text under `key`, or of a text file."""
    for line in read_shard(split.unit.file, split.unit.start, split.unit.stop, key=key):
        try:
            if line.fault:
                raise ValueError(line.fault)
            yield parse_fields(line.content, key)
        except ValueError as error:
            yield Fault(split.unit.file, line.offset, line.content, line.fault or str(error))


def read_listed(split: SourceSplit, roots: Sequence[str], parse: Parse) -> Iterator[Item]:
    """Read files in folders.  split: range of a listing of lines [number of root, path]."""
    for line in read_lines(split.unit.file, split.unit.start, split.unit.stop):
        number, name = json.loads(line.content)
        file = os.path.join(roots[number], name)  # noqa: PTH118, names need not be UTF-8
        try:
            with open(file, "rb") as stream:  # noqa: PTH123
                yield _document(stream, os.fstat(stream.fileno()).st_size, name, parse)
        except ValueError as error:
            yield Fault(file, 0, b"", str(error))
        except OSError as error:
            yield Fault(file, 0, b"", f"cannot be read ({error.strerror})")


def read_packed(split: SourceSplit, parse: Parse) -> Iterator[Item]:
    """A compressed file, or the files in an archive and in the archives that it holds."""
    file = split.unit.file
    with open(file, "rb") as raw:  # noqa: PTH123
        yield from _unpack(raw, file, split.name, parse)


def _document(stream: IO[bytes], size: int, name: str, parse: Parse) -> Record:
    """Parse a file.  Raises ValueError, with the reason, if it holds no document."""
    if size > LONGEST_LINE:
        raise ValueError(f"file of {size} bytes, over {LONGEST_LINE}")
    name = name.encode(errors="backslashreplace").decode()  # a name need not be UTF-8
    return parse(stream.read(size), name)


class Eager(io.RawIOBase):
    """A stream that returns all data before damage; read(n) would lose some of it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read1(len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def tell(self) -> int:
        return self._position


def _unpack(raw: IO[bytes], file: str, name: str, parse: Parse) -> Iterator[Item]:
    """raw: stream of a packed file called `name`, inside `file`."""
    pure = PurePosixPath(name)
    stream = io.BufferedReader(Eager(PACKED[pure.suffix](raw)), BUFFER)
    bare = str(pure.with_suffix(""))
    try:
        if _is_tar(stream) or pure.suffix in TAR_ENDINGS or bare.endswith(".tar"):
            yield from _read_tar(stream, file, bare.removesuffix(".tar"), parse)
            return
        content = stream.read(LONGEST_LINE + 1)
        yield _document(io.BytesIO(content), len(content), bare, parse)
    except damage() as error:
        yield Fault(file, 0, b"", Damage(f"{name}: damaged or cut short ({error})"))
    except ValueError as error:
        yield Fault(file, 0, b"", f"{name}: {error}")


def _is_tar(stream: io.BufferedReader) -> bool:
    """OpenWebText's subsets are archives, though their names end only in .xz."""
    try:
        tarfile.TarInfo.frombuf(stream.peek(512)[:512], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


class Member(tarfile.TarInfo):
    """Raises an error at a damaged header, which tarfile takes for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.SubsequentHeaderError(str(error)) from None


def _read_tar(stream: IO[bytes], file: str, name: str, parse: Parse) -> Iterator[Item]:
    """Read an archive as a stream, without unpacking it to disk."""
    offset = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # it would keep them all
                offset = member.offset_data
                path = f"{name}/{member.name.removeprefix('./')}"
                if member.isdir():
                    continue
                if (content := archive.extractfile(member) if member.isreg() else None) is None:
                    yield Fault(file, offset, b"", f"{path}: a link or device, no file")
                elif is_packed(path):
                    yield from _unpack(content, file, path, parse)
                else:
                    try:
                        yield _document(content, member.size, path, parse)
                    except ValueError as error:
                        yield Fault(file, offset, b"", f"{path}: {error}")
            rest = iter(lambda: archive.fileobj.read(BUFFER), b"")  # type: ignore[union-attr]
            if any(block.strip(b"\0") for block in rest):
                yield Fault(file, archive.offset, b"", f"{name}: more follows the archive's end")
    except (*damage(), tarfile.TarError) as error:
        reason = f"{name}: archive damaged or cut short, the rest is lost ({error})"
        yield Fault(file, offset, b"", Damage(reason))


def read_wet(split: SourceSplit) -> Iterator[Item]:
    """The `conversion` records of a WET file: text, id, url and time of the page."""
    file, offset = split.unit.file, 0
    with open_shard(file) as opened:
        stream = io.BufferedReader(Eager(opened), BUFFER)
        lost = False
        try:
            while line := stream.readline(BUFFER):
                if line.startswith(b"WARC/1."):
                    item = _read_record(stream, file, offset)
                    lost = isinstance(item, Fault)
                elif line.isspace() or lost:
                    item = None
                else:
                    item, lost = Fault(file, offset, line, "no WARC record begins here"), True
                if item is not None:
                    yield item
                offset = stream.tell()
        except damage() as error:
            reason = f"damaged or cut short, the rest is lost ({error})"
            yield Fault(file, offset, b"", Damage(reason))


def _read_record(stream: io.BufferedReader, file: str, offset: int) -> Item | None:
    """Read the record after the line WARC/1.0 at `offset`; None if it is no `conversion`."""
    headers = {}
    while not (line := stream.readline(BUFFER)).isspace() and line:
        name, _, value = line.decode(errors="replace").partition(":")
        headers[name.lower()] = value.strip()
    try:
        length = int(headers.get("content-length", "none"))
        if not 0 <= length <= LONGEST_LINE:
            raise ValueError(f"record of {length} bytes, over {LONGEST_LINE}")
        content = stream.read(length)
        if len(content) < length:
            raise ValueError("record cut short")
        if headers.get("warc-type") != "conversion":
            return None
        text = content.decode()
    except ValueError as error:
        return Fault(file, offset, b"", f"broken WARC record ({error})")
    record = {
        "text": text,
        "id": headers.get("warc-record-id", "").strip("<>").removeprefix("urn:uuid:"),
        "url": headers.get("warc-target-uri"),
        "timestamp": headers.get("warc-date"),
    }
    return {name: value for name, value in record.items() if value is not None}
