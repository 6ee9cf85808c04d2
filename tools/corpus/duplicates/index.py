"""The index of a corpus: for each unit a folder of arrays, a row for each document.

documents.npy   ROW [n]: where the document is, how long, of which source, digest of its text
names.bin       its id and source, as JSON lines; `name` in documents.npy says where each begins
keys.npy        uint64 [COLUMNS, n]: hashes of its id, of its normalised text, and of each band of
                its signature, each row sorted
order.npy       uint32 [COLUMNS, n]: which document each key belongs to
bounds.npy      uint32 [COLUMNS, PREFIXES + 1]: where the keys of each prefix begin
sketches.npy    SKETCH [n]: one bit of each value of the signature, and the values no band has
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tools.corpus.records import Funnel, document_id, parse_record, read_documents, source_of
from tools.corpus.settings import StepSettings
from tools.corpus.shards import OPENERS, Unit, open_shard, placed, read_lines
from tools.corpus.shingles import PERMUTATIONS, Shingler, Signatures, Words
from tools.corpus.units import keep_rejected

ROW = np.dtype(
    [("offset", "<i8"), ("length", "<i8"), ("bytes", "<i8"), ("name", "<i8"), ("digest", "<u8", 2)]
)  # in bytes, of the file and of names.bin; length of the line, bytes of the text
PLACE = ["offset", "length", "bytes", "name"]
BITS = PERMUTATIONS // 64  # words of a sketch
SPARE_BITS = 21
SKETCH = np.dtype([("bits", "<u8", BITS), ("spare", "<u8")])
ID, TEXT, FIRST_BAND = 0, 1, 2  # columns of keys.npy
PREFIXES = 256  # the first byte of a key
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Bands:
    """How a signature is cut: `count` bands of `rows` values; what is left over splits buckets."""

    count: int
    rows: int

    def keys(self, signatures: Signatures) -> Words:
        """[n, PERMUTATIONS] to [count, n]: equal where all values of the band are."""
        cut = signatures[:, : self.count * self.rows].reshape(-1, self.count, self.rows)
        keys = np.zeros(cut.shape[:2], np.uint64)
        for row in range(self.rows):
            keys = (keys ^ cut[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        return keys.T

    def sketches(self, signatures: Signatures) -> NDArray[Any]:
        """SKETCH [n]"""
        sketches = np.zeros(len(signatures), SKETCH)
        mixed = (signatures * np.uint32(0x9E3779B1)) >> np.uint32(31)
        packed = np.packbits(mixed.astype(bool), axis=1, bitorder="little")
        sketches["bits"] = packed.view("<u8")
        mask = np.uint32((1 << SPARE_BITS) - 1)
        for column in range(self.count * self.rows, PERMUTATIONS)[:3]:
            sketches["spare"] <<= np.uint64(SPARE_BITS)
            sketches["spare"] |= signatures[:, column] & mask
        return sketches

    def recall(self, jaccard: float) -> float:
        """The share of pairs of this similarity that fall into one bucket of one band or more."""
        return float(1 - (1 - jaccard**self.rows) ** self.count)


def index_unit(
    unit: Unit, settings: StepSettings, folder: Path, shingler: Shingler, bands: Bands | None
) -> dict[str, Any]:
    """Write the index of a unit into folder/UNIT; without bands, only what needs no signature."""
    funnel = Funnel()
    rows, names, hashes, signatures = [], [], [], []
    name = 0
    for document in read_documents(unit, funnel):
        points = shingler.points(document.text)
        identity = document_id(document.record)
        hashes.append(_digest(identity.encode())[:8] + _digest(points.tobytes()))
        names.append(orjson.dumps([identity, source_of(document.record)]) + b"\n")
        rows.append((document.offset, len(document.line), len(document.text.encode()), name))
        name += len(names[-1])
        if bands is not None:
            signatures.append(shingler.sign(shingler.hashes(points)))
    documents = np.empty(len(rows), ROW)
    digests = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 3)
    documents[PLACE] = np.array(rows, documents[PLACE].dtype)
    documents["digest"] = digests[:, 1:]
    keys = [digests[:, 0], digests[:, 1]]
    arrays: dict[str, NDArray[Any]] = {"documents": documents}
    if bands is not None:
        signed = np.array(signatures, np.uint32).reshape(-1, PERMUTATIONS)
        keys += list(bands.keys(signed))
        arrays["sketches"] = bands.sketches(signed)
    arrays |= sort_keys(np.stack(keys))
    for each, array in arrays.items():
        save(folder / unit.name / f"{each}.npy", array)
    with placed(folder / unit.name / "names.bin") as file:
        file.writelines(names)
    keep_rejected(settings, unit, funnel)
    return {"documents": len(documents), "funnel": funnel.to_json()}


def save(path: Path, array: NDArray[Any]) -> None:
    with placed(path) as file:
        np.save(file, array, allow_pickle=False)


def _digest(content: bytes) -> bytes:
    """128 bits."""
    return hashlib.sha256(content).digest()[:16]


def sort_keys(keys: Words) -> dict[str, NDArray[Any]]:
    """keys [columns, n] to the arrays keys, order and bounds of the index."""
    order = np.argsort(keys, axis=1, kind="stable")
    keys = np.take_along_axis(keys, order, axis=1)
    edges = np.arange(1, PREFIXES, dtype=np.uint64) << np.uint64(56)
    bounds = [[0, *np.searchsorted(row, edges), len(row)] for row in keys]
    return {
        "keys": keys,
        "order": order.astype(np.uint32),
        "bounds": np.array(bounds, np.uint32),
    }


@dataclass(frozen=True)
class Index:
    """The index of all units; a document's number is its unit's first number plus its row."""

    folder: Path
    units: tuple[Unit, ...]
    counts: tuple[int, ...]

    def __repr__(self) -> str:
        """What tells one index from another when a task is looked for."""
        return f"Index of {len(self.units)} units, {sum(self.counts)} documents"

    @cached_property
    def firsts(self) -> Numbers:
        """[units + 1]: the number of each unit's first document, and of all documents."""
        return np.append(0, np.cumsum(np.array(self.counts, np.int64)))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def array(self, unit: int, name: str) -> NDArray[Any]:
        """An array of a unit's index, mapped and not read."""
        path = self.folder / self.units[unit].name / f"{name}.npy"
        if not self.counts[unit]:
            return np.load(path)
        return np.load(path, mmap_mode="r")

    def by_unit(self, numbers: Numbers) -> Iterator[tuple[int, slice]]:
        """(unit, where its documents are in `numbers`), for sorted numbers."""
        cuts = np.searchsorted(numbers, self.firsts)
        for unit in np.flatnonzero(np.diff(cuts)).tolist():
            yield unit, slice(int(cuts[unit]), int(cuts[unit + 1]))

    def gather(self, numbers: Numbers, name: str) -> NDArray[Any]:
        """The rows of an array of the index, of sorted numbers, of which there is one at least."""
        return np.concatenate(
            [
                self.array(unit, name)[numbers[where] - self.firsts[unit]]
                for unit, where in self.by_unit(numbers)
            ]
        )

    def names(self, numbers: Numbers) -> list[tuple[str, str]]:
        """(id, source) of sorted numbers; the id as the record gave it."""
        found: list[tuple[str, str]] = []
        for unit, where in self.by_unit(numbers):
            starts = self.array(unit, "documents")["name"][numbers[where] - self.firsts[unit]]
            with (self.folder / self.units[unit].name / "names.bin").open("rb") as file:
                for start in starts.tolist():
                    file.seek(start)
                    found.append(tuple(orjson.loads(file.readline())))
        return found

    def documents(self, numbers: Numbers) -> Iterator[tuple[int, str]]:
        """(number, text) of sorted numbers, one at a time."""
        for unit, where in self.by_unit(numbers):
            wanted = numbers[where].tolist()
            places = self.array(unit, "documents")[numbers[where] - self.firsts[unit]]
            lines = _lines_at(self.units[unit], places["offset"], places["length"])
            for number, line in zip(wanted, lines, strict=True):
                yield number, parse_record(line)["text"]


def _lines_at(unit: Unit, offsets: Numbers, lengths: Numbers) -> Iterator[bytes]:
    """The lines that begin there, in order: read directly if the file is plain."""
    if Path(unit.file).suffix in OPENERS:
        wanted = set(offsets.tolist())
        yield from (line.content for line in read_lines(unit) if line.offset in wanted)
        return
    with open_shard(unit.file) as file:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            file.seek(offset)
            yield file.read(length)
