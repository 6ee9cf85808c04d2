"""Documents as JSON lines: reading them without silent losses, and counting them."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from megatron.data.json_lines import DAMAGED, Record, parse_line, read_shard
from megatron.libraries import Library
from tools.corpus.shards import Unit

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


def read_documents(unit: Unit, funnel: "Funnel") -> Iterator[Document]:
    """The documents of a unit, counted in the funnel, which also records lines without one."""
    for line in read_shard(unit.file, unit.start, unit.stop):
        try:
            record = parse_line(line)
        except ValueError as error:
            funnel.set_aside(unit.file, line.offset, line.content, str(error))
            continue
        funnel.enter(record)
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


@dataclass
class Funnel:
    """Documents that a step read, wrote and dropped, by source and reason.

    Funnels of units are summed to that of the step; `check` then verifies the sums.
    """

    input: Counts = field(default_factory=dict)
    output: Counts = field(default_factory=dict)
    dropped: dict[str, Counts] = field(default_factory=dict)
    pieces: int = 0
    """Documents gained by cutting one into several."""
    rejected: "Rejected" = field(default_factory=lambda: Rejected())
    """Lines that hold no document; a step keeps them in a file."""

    def enter(self, record: Record) -> None:
        _add(self.input, source_of(record), len(record["text"].encode()))

    def keep(self, record: Record) -> None:
        _add(self.output, source_of(record), len(record["text"].encode()))

    def drop(self, record: Record, reason: str) -> None:
        """record: as it was read."""
        size = len(record["text"].encode())
        _add(self.dropped.setdefault(reason, {}), source_of(record), size)

    def set_aside(self, file: str, offset: int, line: bytes, reason: str) -> None:
        """Count a line without a document, or the rest of a damaged file; record its location."""
        kind = DAMAGED_FILE if DAMAGED in reason else BAD_LINE
        _add(self.input, NO_SOURCE, len(line))
        _add(self.dropped.setdefault(kind, {}), NO_SOURCE, len(line))
        self.rejected.append({"file": file, "offset": offset, "reason": reason})

    def add(self, other: "Funnel") -> None:
        _add_all(self.input, other.input)
        _add_all(self.output, other.output)
        for reason, counts in other.dropped.items():
            _add_all(self.dropped.setdefault(reason, {}), counts)
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


def _add(counts: Counts, source: str, size: int) -> None:
    counts.setdefault(source, Count()).add(size)


def _add_all(counts: Counts, others: Counts) -> None:
    for source, other in others.items():
        counts.setdefault(source, Count()).add(other.bytes, other.documents)


def _as_json(counts: Counts) -> dict[str, Any]:
    return {
        "documents": documents(counts),
        "bytes": sum(count.bytes for count in counts.values()),
        "sources": {source: vars(counts[source]) for source in sorted(counts)},
    }


def _from_json(content: dict[str, Any]) -> Counts:
    return {source: Count(**count) for source, count in content["sources"].items()}
