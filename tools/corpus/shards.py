"""Shards of JSON lines: finding them, cutting them into units of work, reading and writing them.

A unit is a range of bytes of a plain file, or a whole compressed one; how a corpus is cut into
units does not depend on how many workers there are.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import lzma
import shutil
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from backports import zstd

from megatron.config.checks import UsageError

LONGEST_LINE = 32 << 20  # bytes; a longer one is set aside without being held in memory
MANIFEST = "manifest.json"
WORK = ".work"
Compression = Literal["none", "gzip", "zstd"]
ENDINGS: dict[Compression, str] = {"none": "", "gzip": ".gz", "zstd": ".zst"}

OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": zstd.ZstdFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
DAMAGED = "damaged or cut short"  # of the fault, for the books to tell it from a bad line
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)


@dataclass(frozen=True)
class Unit:
    """The lines of `file` that begin at the bytes `start` to `stop` - 1; all if it is compressed.

    size and modified tell whether the file is still the one that was looked at.
    """

    number: int
    file: str
    start: int
    stop: int
    size: int
    modified: int

    @property
    def name(self) -> str:
        return f"{self.number:05}"


class Line(NamedTuple):
    offset: int
    """Byte of the (decompressed) file at which the line starts."""
    content: bytes
    """Without its line end; only the beginning if there is a fault."""
    fault: str | None
    """Why the line cannot be read as it stands."""


def find_shards(paths: Sequence[Path], endings: Sequence[str] = (".jsonl", ".json")) -> list[Path]:
    """The files among `paths` and the shards in the folders among them, in order.

    endings: what a shard in a folder is called, before .gz or .zst.  Raises ValueError, naming
    --input, where there is nothing, and for the output of a step that has not finished.
    """
    shards: list[Path] = []
    for path in paths:
        if path.is_dir():
            shards += _in_folder(path, endings)
        elif path.is_file():
            shards.append(path)
        else:
            raise UsageError("--input", path, "a file or folder that is there")
    if not shards:
        raise UsageError("--input", None, "followed by files of JSON lines, or folders of them")
    return shards


NOT_SHARDS = {MANIFEST, "run.json", "rejected.jsonl", "duplicates.jsonl"}


def _in_folder(folder: Path, endings: Sequence[str]) -> list[Path]:
    if (folder / WORK).exists() and not (folder / MANIFEST).exists():
        raise UsageError(
            "--input",
            folder,
            "the output of a step that has finished; its command again finishes it",
        )
    names = tuple(ending + more for ending in endings for more in ("", *OPENERS))
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.endswith(names) and path.name not in NOT_SHARDS
    ]
    if not found:
        raise ValueError(
            f"--input {folder} holds no file named *{', *'.join(endings)}, with or without "
            f"{', '.join(OPENERS)}{_below(folder, names)}"
        )
    return found


def _below(folder: Path, names: tuple[str, ...]) -> str:
    """Which folder in the folder has shards, if one does."""
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(path.name.endswith(names) for path in below.iterdir()):
            return f"; {below} does, and --input {below} would work"
    return ""


def cut(shards: Sequence[Path], unit_bytes: int) -> list[Unit]:
    """The units of all shards, in order; an empty shard is none."""
    units: list[Unit] = []
    for path in shards:
        status = path.stat()
        size = status.st_size
        ranges = [(0, size)] if size else []
        if path.suffix not in OPENERS:
            pieces = max(1, -(-size // unit_bytes))
            bounds = [size * k // pieces for k in range(pieces + 1)]
            ranges = [pair for pair in itertools.pairwise(bounds) if pair[0] < pair[1]]
        units += [
            Unit(len(units) + k, str(path), start, stop, size, status.st_mtime_ns)
            for k, (start, stop) in enumerate(ranges)
        ]
    return units


def open_shard(path: Path | str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """A binary stream of the file's content, decompressed if its name says so."""
    return _open_shard(Path(path))


@contextlib.contextmanager
def _open_shard(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        yield OPENERS.get(path.suffix, lambda plain: plain)(raw)


def read_lines(unit: Unit, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """The lines of the unit that are not blank, in bounded memory.

    A line longer than `longest`, and what cannot be decompressed, come as one line with a fault.
    """
    compressed = Path(unit.file).suffix in OPENERS
    with open_shard(unit.file) as stream:
        offset = unit.start
        if unit.start:  # the line that goes over the boundary belongs to the unit before
            stream.seek(unit.start - 1)
            offset += _skip_line(stream, unit.stop - unit.start + 1) - 1
        try:
            while compressed or offset < unit.stop:
                line = stream.readline(longest + 1)
                if not line:
                    return
                length, fault = len(line), None
                if length > longest and not line.endswith(b"\n"):
                    length += _skip_line(stream)
                    line, fault = line[:200], f"line of {length} bytes, over {longest}"
                if not offset and line.startswith(codecs.BOM_UTF8):
                    offset, line, length = 3, line[3:], length - 3
                if line and not line.isspace():
                    yield Line(offset, line.rstrip(b"\r\n"), fault)
                offset += length
        except DAMAGE as error:
            if not compressed or getattr(error, "errno", None):  # the disk's, not the content's
                raise
            yield Line(offset, b"", f"{DAMAGED}, the rest is lost ({error})")


def _skip_line(stream: IO[bytes], enough: int = sys.maxsize) -> int:
    """Read on to the end of the line, or until `enough` bytes are read; how many were."""
    skipped = 0
    while skipped < enough and (piece := stream.readline(1 << 20)):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


@contextlib.contextmanager
def placed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it has been written to the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with staged.open("wb") as file:
            yield file
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


class ShardWriter:
    """Lines into a file, plain or compressed: the same lines give the same bytes."""

    def __init__(self, file: IO[bytes], name: str, compression: Compression) -> None:
        self.name = name
        self.documents = 0
        self.bytes = 0
        self._file = file
        self._sha256 = hashlib.sha256()
        self._stream: Any = None
        if compression == "gzip":  # no name and no time in its header
            self._stream = gzip.GzipFile("", "wb", 6, _Sink(self._put), mtime=0)
        elif compression == "zstd":
            self._stream = zstd.ZstdFile(_Sink(self._put), "wb")

    def _put(self, content: bytes) -> int:
        self._sha256.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    def write(self, line: bytes) -> None:
        """line: one document, without its line end."""
        (self._stream.write if self._stream else self._put)(line + b"\n")
        self.documents += 1

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    @property
    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        checksum = self._sha256.hexdigest()
        return {
            "name": self.name,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": checksum,
        }


class _Sink(io.RawIOBase):
    """What a compressor writes into."""

    def __init__(self, put: Callable[[bytes], int]) -> None:
        self._put = put

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return self._put(bytes(content))


@contextlib.contextmanager
def write_shard(
    folder: Path, name: str, compression: Compression, kind: str = ".jsonl"
) -> Iterator[ShardWriter]:
    """A shard folder/name.jsonl (or .jsonl.gz, .jsonl.zst) that appears when it is whole."""
    full = f"{name}{kind}{ENDINGS[compression]}"
    with placed(folder / full) as file:
        writer = ShardWriter(file, full, compression)
        yield writer
        writer.close()


def concatenate(parts: Iterable[Path], target: Path) -> None:
    """Put files one after another."""
    with placed(target) as file:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)


def checksum(file: Path) -> str:
    """SHA-256, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
