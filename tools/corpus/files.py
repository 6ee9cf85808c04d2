"""Files of the corpus: shards of JSON lines, cut, read and written without silent losses, and
counts of their documents."""

import contextlib
import gzip
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, TypeVar

from megatron.data.files import atomic_writer
from megatron.data.json_lines import (
    MANIFEST,
    OPENERS,
    Damage,
    Record,
    is_text,
    parse_line,
    read_shard,
)
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
        pieces = 1 if is_one(path) else max(1, -(-size // unit_bytes))
        bounds = [size * k // pieces for k in range(pieces + 1)]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                unit = Unit(len(units), str(path), start, stop, size, status.st_mtime_ns)
                units.append(unit)
    return units


Item = TypeVar("Item")


def grouped(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int, length: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Groups of neighbours, of up to `most` in size and `length` in number.  A larger item is a
    group by itself."""
    together: list[Item] = []
    size = 0
    for item in items:
        if together and (size + size_of(item) > most or len(together) == length):
            yield together
            together, size = [], 0
        together.append(item)
        size += size_of(item)
    if together:
        yield together


class _Hashed:
    """A file that counts and hashes the bytes that are written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self._file = file

    def write(self, content: Any) -> int:
        self.sha256.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    def flush(self) -> None:
        """For compressors; the file is flushed when it is whole."""


def scratch_writer(path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    """As atomic_writer, but does not wait for the disk: for files that only the running step reads.
    A step of thousands of small files has some 17 of them for each, and a flush takes 10 ms."""
    return atomic_writer(path, flush_content=False, flush_name=False)


class ShardWriter:
    """Writes lines to a file, plain or compressed: the same lines give the same bytes."""

    def __init__(self, file: IO[bytes], name: str, compression: Compression) -> None:
        self.name = name
        self.documents = 0
        self._hashed = _Hashed(file)
        self._stream: Any = self._hashed
        if compression == "gzip":  # no name and no time in its header
            self._stream = gzip.GzipFile("", "wb", 6, self._hashed, mtime=0)
        elif compression == "zstd":
            self._stream = zstd.ZstdFile(self._hashed, "wb")

    def write(self, line: bytes) -> None:
        """line: one document, without its line end."""
        self._stream.write(line + b"\n")
        self.documents += 1

    def close(self) -> None:
        if self._stream is not self._hashed:
            self._stream.close()

    @property
    def facts(self) -> dict[str, Any]:
        """The shard's facts for a manifest."""
        return {
            "name": self.name,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": self._hashed.sha256.hexdigest(),
        }

    @property
    def bytes(self) -> int:
        return self._hashed.bytes


@contextlib.contextmanager
def write_shard(
    folder: Path, name: str, compression: Compression, kind: str = ".jsonl"
) -> Iterator[ShardWriter]:
    """A shard folder/name.jsonl (or .jsonl.gz, .jsonl.zst) that appears when it is whole."""
    full = f"{name}{kind}{ENDINGS[compression]}"
    # The manifest, which comes later, flushes the names of all files in the folder at once: a flush
    # for each of them takes some 5 ms.
    with atomic_writer(folder / full, flush_name=False) as file:
        writer = ShardWriter(file, full, compression)
        yield writer
        writer.close()


def concatenate(parts: Iterable[Path], target: Path) -> None:
    """Write files one after another to `target`."""
    with atomic_writer(target) as file:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)


orjson = Library("orjson")

NO_SOURCE = "unnamed"
BAD_LINE = "bad line"
DAMAGED_FILE = "file cut short or damaged"


class Document(NamedTuple):
    """A line that holds a document."""

    record: Record
    line: bytes
    offset: int
    """Byte of the (decompressed) file at which the line starts."""

    @property
    def text(self) -> str:
        return str(self.record["text"])


def read_documents(
    unit: Unit,
    accounting: "DocumentCounts",
    key: str = "text",
    refused: Callable[[bytes, str], object] = lambda line, reason: None,
) -> Iterator[Document]:
    """The documents of a unit, counted in the accounting, which also records lines without one.

    key: of the text in a line; in the documents it is "text".  refused: called with each line that
    has no document, and the reason.
    """
    for line in read_shard(unit.file, unit.start, unit.stop, key=key):
        try:
            record = parse_line(line, key)
        except ValueError as error:
            accounting.set_aside(unit.file, line.offset, line.content, line.fault or str(error))
            refused(line.content, str(error))
            continue
        if key != "text":
            record["text"] = record.pop(key)
        accounting.enter(record)
        yield Document(record, line.content, line.offset)


def dump_record(record: Record) -> bytes:
    """One line, without its end.  NaN and infinity, which JSON does not have, become null."""
    try:
        return orjson.dumps(record)
    except TypeError:  # numbers past 64 bits
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def document_id(record: Record) -> str:
    """The record's id, or else the first 128 bits of the SHA-256 of its text, in hex."""
    given = record.get("id")
    if given is None or given == "":
        return hashlib.sha256(record["text"].encode()).hexdigest()[:32]
    return str(given)


def source_of(record: Record) -> str:
    return str(record.get("source") or NO_SOURCE)


def keyed_hash(key: str, name: str) -> int:
    """128 fair bits, the same on every machine; other keys give independent bits."""
    digest = hashlib.blake2b(name.encode(), key=key.encode()[:64], digest_size=16).digest()
    return int.from_bytes(digest, "big")


@dataclass
class Count:
    """Documents, and the UTF-8 bytes of their text (not of the jsonl around it)."""

    documents: int = 0
    bytes: int = 0

    def add(self, bytes: int, documents: int = 1) -> None:
        self.documents += documents
        self.bytes += bytes


Counts = dict[str, Count]  # by source


def no_counts() -> Counts:
    return defaultdict(Count)


@dataclass
class DocumentCounts:
    """Documents that a step read, wrote and dropped, by source and reason.

    The counts of units are summed to that of the step; `check` then verifies the sums.
    """

    input: Counts = field(default_factory=no_counts)
    output: Counts = field(default_factory=no_counts)
    dropped: dict[str, Counts] = field(default_factory=lambda: defaultdict(no_counts))
    pieces: int = 0
    """Documents gained by cutting one into several."""
    rejected: "Rejected" = field(default_factory=lambda: Rejected())
    """Lines that hold no document; a step keeps them in a file."""

    def enter(self, record: Record) -> None:
        self.input[source_of(record)].add(len(record["text"].encode()))

    def keep(self, record: Record) -> None:
        self.output[source_of(record)].add(len(record["text"].encode()))

    def drop(self, record: Record, reason: str) -> None:
        """record: as it was read."""
        self.dropped[reason][source_of(record)].add(len(record["text"].encode()))

    def set_aside(self, file: str, offset: int, line: bytes, reason: str) -> None:
        """Count a line without a document, or the rest of a damaged file, whose reason is a Damage;
        record its location."""
        kind = DAMAGED_FILE if isinstance(reason, Damage) else BAD_LINE
        self.input[NO_SOURCE].add(len(line))
        self.dropped[kind][NO_SOURCE].add(len(line))
        self.rejected.append({"file": file, "offset": offset, "reason": reason})

    def add(self, other: "DocumentCounts") -> None:
        pairs = [(self.input, other.input), (self.output, other.output)]
        pairs += [(self.dropped[reason], counts) for reason, counts in other.dropped.items()]
        for counts, others in pairs:
            for source, count in others.items():
                counts[source].add(count.bytes, count.documents)
        self.pieces += other.pieces
        for bad in other.rejected:
            self.rejected.append(bad)

    def check(self, step: str) -> None:
        """Raises RuntimeError if a document is not accounted for, which is a bug of the program."""
        out = documents(self.output) + sum(map(documents, self.dropped.values()))
        if documents(self.input) + self.pieces != out:
            raise RuntimeError(
                f"{step}: {documents(self.input)} documents came in and {out} were kept or dropped"
            )

    def to_json(self) -> dict[str, Any]:
        """The counts for a manifest; rejected lines are among the dropped."""
        return {
            "input": _as_json(self.input),
            "output": _as_json(self.output),
            "dropped": {why: _as_json(self.dropped[why]) for why in sorted(self.dropped)},
            "pieces": self.pieces,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(
            input=_from_json(content["input"]),
            output=_from_json(content["output"]),
            dropped={why: _from_json(each) for why, each in content["dropped"].items()},
            pieces=content["pieces"],
        )


class Rejected:
    """Lines that hold no document, {file, offset, reason} each; many go to a temporary file."""

    def __init__(self) -> None:
        self._lines = tempfile.SpooledTemporaryFile(1 << 20)  # noqa: SIM115, it lives as long
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._lines.seek(0)
        for _ in range(self._count):  # ends where more can be added
            yield json.loads(self._lines.readline())

    def append(self, bad: dict[str, Any]) -> None:
        self._lines.seek(0, 2)
        self._lines.write(json.dumps(bad).encode() + b"\n")
        self._count += 1


def documents(counts: Counts) -> int:
    return sum(count.documents for count in counts.values())


def _as_json(counts: Counts) -> dict[str, Any]:
    return {
        "documents": documents(counts),
        "bytes": sum(count.bytes for count in counts.values()),
        "sources": {source: vars(counts[source]) for source in sorted(counts)},
    }


def _from_json(content: dict[str, Any]) -> Counts:
    return {source: Count(**count) for source, count in content["sources"].items()}


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in the file; None if there is none, or no such file."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Manifest of the step that filled the folder; None if no step has."""
    found = read_object(folder / MANIFEST)
    return found if found and "step" in found else None


def known_checksums(folder: Path) -> dict[str, str]:
    """Checksums, by name, of the folder's shards that a step wrote and whose size is unchanged."""
    known = {}
    for shard in (read_manifest(folder) or {}).get("shards", []):
        path = folder / shard["name"]
        if path.is_file() and path.stat().st_size == shard.get("bytes"):
            known[shard["name"]] = shard["sha256"]
    return known


def recorded_checksums(files: Iterable[Path]) -> dict[Path, str | None]:
    """Checksum of each file in the manifest of the step that wrote it; None for other files."""
    paths = list(files)
    known = {folder: known_checksums(folder) for folder in {path.parent for path in paths}}
    return {path: known[path.parent].get(path.name) for path in paths}
