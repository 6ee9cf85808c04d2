"""Writes shards of JSON lines, plain or compressed, each whole or not at all."""

import contextlib
import gzip
import hashlib
import io
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron.data.files import atomic_writer
from megatron.data.json_lines import OPENERS, is_text
from megatron.libraries import Library

zstd = Library("backports.zstd", "--compress gzip")

Compression = Literal["none", "gzip", "zstd"]
ENDINGS: dict[Compression, str] = {"none": "", "gzip": ".gz", "zstd": ".zst"}


@dataclass(frozen=True)
class Unit:
    """The lines of `file` that begin at the bytes `start` to `stop` - 1; all lines if it is
    compressed, or one document.

    size and modified show whether the file has changed since it was examined.
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


def is_whole(file: Path | str) -> bool:
    """Whether the file can only be read from start to end: compressed, or one document."""
    return Path(file).suffix in OPENERS or is_text(file)


def cut(
    shards: Sequence[Path], unit_bytes: int, is_one: Callable[[Path], bool] = is_whole
) -> list[Unit]:
    """The units of all shards, in order; an empty shard has none.  is_one: whether a file is one
    unit, whatever its length."""
    units: list[Unit] = []
    for path in shards:
        status = path.stat()
        size = status.st_size
        ranges = [(0, size)] if size else []
        if not is_one(path):
            pieces = max(1, -(-size // unit_bytes))
            bounds = [size * k // pieces for k in range(pieces + 1)]
            ranges = [pair for pair in itertools.pairwise(bounds) if pair[0] < pair[1]]
        units += [
            Unit(len(units) + k, str(path), start, stop, size, status.st_mtime_ns)
            for k, (start, stop) in enumerate(ranges)
        ]
    return units


class ShardWriter:
    """Writes lines to a file, plain or compressed: the same lines give the same bytes."""

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
        """The shard's facts for a manifest."""
        checksum = self._sha256.hexdigest()
        return {
            "name": self.name,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": checksum,
        }


class _Sink(io.RawIOBase):
    """The file that a compressor writes to."""

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
    with atomic_writer(folder / full) as file:
        writer = ShardWriter(file, full, compression)
        yield writer
        writer.close()


def concatenate(parts: Iterable[Path], target: Path) -> None:
    """Write files one after another to `target`."""
    with atomic_writer(target) as file:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)
