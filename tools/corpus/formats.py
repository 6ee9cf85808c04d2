"""Readers of the formats in which corpora are published; records have at least {"text"}.

Readers are generators in bounded memory.  Content that is no document becomes a Fault with its
location; no content of a file ends a run.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

from megatron.data.json_lines import (
    LONGEST_LINE,
    Damage,
    damage,
    open_shard,
    parse_json,
    read_lines,
    read_shard,
)
from tools.corpus.files import Record
from tools.corpus.parts import PACKED, TAR_ENDINGS, Part, is_lines, is_packed

BUFFER = 1 << 20  # bytes that are decompressed at a time


class Fault(NamedTuple):
    file: str
    offset: int
    """Byte of the decompressed file, or of the open archive, at which it was found."""
    content: bytes
    reason: str


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


Item = Record | Fault
Parse = Callable[[bytes, str], Record]  # takes (content of a file, its name)


def parse_fields(line: bytes, key: str) -> Record:
    """Like parse_record, but accepts an empty text."""
    record = parse_json(line)
    if isinstance(record, dict) and isinstance(record.get(key), str):
        return record
    raise ValueError(f'no "{key}" string')


def read_json_lines(part: Part, key: str) -> Iterator[Item]:
    """Read a range of a file of JSON lines with their text under `key`, or of a text file."""
    for line in read_shard(part.unit.file, part.unit.start, part.unit.stop, key=key):
        try:
            if line.fault:
                raise ValueError(line.fault)
            yield parse_fields(line.content, key)
        except ValueError as error:
            reason = line.fault or str(error)
            yield Fault(part.unit.file, line.offset, line.content, reason)


def parse_text(content: bytes, name: str) -> Record:
    if is_lines(name):
        raise ValueError("JSON lines, which --format jsonl reads")
    return {"text": content.decode("utf-8-sig"), "id": name}


def json_parser(key: str) -> Parse:
    """Parser of files of one JSON object each; the id is the object's, or else the path."""

    def parse(content: bytes, name: str) -> Record:
        record = parse_fields(content, key)
        return record if record.get("id") else record | {"id": name}

    return parse


def read_listed(part: Part, roots: tuple[str, ...], parse: Parse) -> Iterator[Item]:
    """Read files in folders.  part: range of a listing of lines [number of root, path]."""
    for line in read_lines(part.unit.file, part.unit.start, part.unit.stop):
        number, name = json.loads(line.content)
        file = os.path.join(roots[number], name)  # noqa: PTH118, names need not be UTF-8
        try:
            with open(file, "rb") as stream:  # noqa: PTH123
                yield from _read_document(stream, os.fstat(stream.fileno()).st_size, name, parse)
        except ValueError as error:
            yield Fault(file, 0, b"", str(error))
        except OSError as error:
            yield Fault(file, 0, b"", f"cannot be read ({error.strerror})")


def read_packed(part: Part, parse: Parse) -> Iterator[Item]:
    """A compressed file, or the files in an archive and in the archives that it holds."""
    file = part.unit.file
    with open(file, "rb") as raw:  # noqa: PTH123
        yield from _unpack(raw, file, part.name, parse)


def _read_document(stream: IO[bytes], size: int, name: str, parse: Parse) -> Iterator[Record]:
    """Parse a file.  Raises ValueError, with the reason, if it holds no document."""
    if size > LONGEST_LINE:
        raise ValueError(f"file of {size} bytes, over {LONGEST_LINE}")
    name = name.encode(errors="backslashreplace").decode()  # a name need not be UTF-8
    yield parse(stream.read(size), name)


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
        yield from _read_document(io.BytesIO(content), len(content), bare, parse)
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
                if not member.isdir():
                    yield from _read_member(archive, member, file, name, parse)
            if _has_content(archive.fileobj):
                yield Fault(file, archive.offset, b"", f"{name}: more follows the archive's end")
    except (*damage(), tarfile.TarError) as error:
        reason = f"{name}: archive damaged or cut short, the rest is lost ({error})"
        yield Fault(file, offset, b"", Damage(reason))


def _has_content(stream: Any) -> bool:
    return any(block.strip(b"\0") for block in iter(lambda: stream.read(BUFFER), b""))


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, file: str, name: str, parse: Parse
) -> Iterator[Item]:
    name = f"{name}/{member.name.removeprefix('./')}"
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None:
        yield Fault(file, member.offset_data, b"", f"{name}: a link or device, no file")
        return
    if is_packed(name):
        yield from _unpack(stream, file, name, parse)
        return
    try:
        yield from _read_document(stream, member.size, name, parse)
    except ValueError as error:
        yield Fault(file, member.offset_data, b"", f"{name}: {error}")


def read_wet(part: Part) -> Iterator[Item]:
    """The `conversion` records of a WET file: text, id, url and time of the page."""
    file, offset = part.unit.file, 0
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
