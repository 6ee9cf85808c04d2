"""The index of a corpus: a folder of arrays per block of a unit's documents, a row per document.

documents.npy   ROW [n]: location and length of the document, digest of its normalised text
names.bin       its id and source, as JSON lines; `name` in documents.npy is where each begins
keys.npy        uint64 [COLUMNS, n]: hashes of its id, of its normalised text, and of each band of
                its signature, each row sorted
order.npy       uint32 [COLUMNS, n]: which document each key belongs to
bounds.npy      uint32 [COLUMNS, PREFIXES + 1]: where the keys of each prefix begin
sketches.npy    uint64 [n, BITS]: one bit of each value of the signature
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import atomic_writer
from megatron.data.json_lines import open_shard, parse_record, read_shard
from megatron.libraries import Library
from tools.corpus.engine import keep_rejected
from tools.corpus.files import (
    Document,
    Funnel,
    Unit,
    document_id,
    is_whole,
    read_documents,
    source_of,
)
from tools.corpus.settings import StepSettings
from tools.corpus.shingles import PERMUTATIONS, Shingler, Signatures, Words

orjson = Library("orjson")

ROW = np.dtype(
    [("offset", "<i8"), ("length", "<i8"), ("bytes", "<i8"), ("name", "<i8"), ("digest", "<u8", 2)]
)  # in bytes: offset and length of the line, size of the text, offset in names.bin
PLACE = ["offset", "length", "bytes", "name"]
BITS = PERMUTATIONS // 64  # words of a sketch
BLOCK = 1 << 15  # documents; a unit that is one large compressed file may have any number
ID, TEXT, FIRST_BAND = 0, 1, 2  # columns of keys.npy
PREFIXES = 256  # the first byte of a key
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Bands:
    """Cuts a signature into `count` bands of `rows` values."""

    count: int
    rows: int

    def keys(self, signatures: Signatures) -> Words:
        """[n, PERMUTATIONS] to [count, n]: keys are equal where all values of the band are."""
        cut = signatures[:, : self.count * self.rows].reshape(-1, self.count, self.rows)
        keys = np.zeros(cut.shape[:2], np.uint64)
        for row in range(self.rows):
            keys = (keys ^ cut[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        return keys.T

    def recall(self, jaccard: float) -> float:
        """Share of pairs of this similarity that share a bucket in at least one band."""
        return float(1 - (1 - jaccard**self.rows) ** self.count)


def sketch(signatures: Signatures) -> Words:
    """[n, PERMUTATIONS] to [n, BITS]: one fair bit of each value."""
    bits = (signatures * np.uint32(0x9E3779B1)) >> np.uint32(31)
    return np.packbits(bits.astype(bool), axis=1, bitorder="little").view("<u8")


def index_unit(
    unit: Unit, settings: StepSettings, folder: Path, shingler: Shingler, bands: Bands | None
) -> dict[str, Any]:
    """Write the index of a unit; without bands, only the arrays that need no signature.

    Returns the number of documents of each block (folder/UNIT-NUMBER), and the unit's counts.
    """
    funnel, counts = Funnel(), []
    rows = Rows(shingler, bands)
    for document in read_documents(unit, funnel):
        rows.add(document)
        if len(rows) == BLOCK:
            counts.append(rows.write(folder / block_name(unit, len(counts))))
            rows = Rows(shingler, bands)
    if len(rows):
        counts.append(rows.write(folder / block_name(unit, len(counts))))
    keep_rejected(settings, unit, funnel)
    return {"blocks": counts, "funnel": funnel.to_json()}


def block_name(unit: Unit, number: int) -> str:
    return f"{unit.name}-{number:04}"


class Rows:
    """The documents of a block, until it is written."""

    def __init__(self, shingler: Shingler, bands: Bands | None) -> None:
        self._shingler = shingler
        self._bands = bands
        self._places: list[tuple[int, int, int, int]] = []
        self._names = bytearray()
        self._digests = bytearray()
        self._signatures: list[Signatures] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, document: Document) -> None:
        points = self._shingler.points(document.text)
        identity = document_id(document.record)
        self._digests += id_key(identity).to_bytes(8, "little") + _digest(points.tobytes())
        size = len(document.text.encode())
        self._places.append((document.offset, len(document.line), size, len(self._names)))
        self._names += orjson.dumps([identity, source_of(document.record)]) + b"\n"
        if self._bands is not None:
            self._signatures.append(self._shingler.sign(self._shingler.hashes(points)))

    def write(self, folder: Path) -> int:
        """Write the block.  Returns how many documents it has."""
        digests = np.frombuffer(self._digests, "<u8").reshape(-1, 3)
        documents = np.empty(len(self), ROW)
        documents[PLACE] = np.array(self._places, documents[PLACE].dtype)
        documents["digest"] = digests[:, 1:]
        keys = [digests[:, ID], digests[:, TEXT]]
        if self._bands is not None:
            signatures = np.array(self._signatures)
            keys += list(self._bands.keys(signatures))
            save(folder / "sketches.npy", sketch(signatures))
        for name, array in sort_keys(np.stack(keys)).items():
            save(folder / f"{name}.npy", array)
        save(folder / "documents.npy", documents)
        with atomic_writer(folder / "names.bin") as file:
            file.write(self._names)
        return len(self)


def save(path: Path, array: NDArray[Any]) -> None:
    with atomic_writer(path) as file:
        np.save(file, array, allow_pickle=False)


def mapped(path: Path) -> NDArray[Any]:
    """The array of a file, memory-mapped unless it is small: an empty one cannot be mapped."""
    return np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None)


def _digest(content: bytes) -> bytes:
    """The first 128 bits of the SHA-256."""
    return hashlib.sha256(content).digest()[:16]


def id_key(identity: str) -> int:
    """The first 64 bits of an id's digest."""
    return int.from_bytes(_digest(identity.encode())[:8], "little")


def sort_keys(keys: Words) -> dict[str, NDArray[Any]]:
    """Arrays keys, order and bounds of the index, from keys [columns, n]."""
    order = np.argsort(keys, axis=1, kind="stable")
    keys = np.take_along_axis(keys, order, axis=1)
    edges = np.arange(1, PREFIXES, dtype=np.uint64) << np.uint64(56)
    bounds = [[0, *np.searchsorted(row, edges), len(row)] for row in keys]
    return {
        "keys": keys,
        "order": order.astype(np.uint32),
        "bounds": np.array(bounds, np.uint32),
    }


class Block(NamedTuple):
    unit: int
    """Index of its unit among all."""
    name: str
    documents: int


@dataclass(frozen=True)
class Index:
    """The index of all units; documents are numbered from 0 across units.

    Workers get its folder and digest, and read it from the file there.
    """

    folder: Path
    units: tuple[Unit, ...]
    blocks: tuple[Block, ...]

    def __repr__(self) -> str:
        """Tells one index from another when a task is looked up."""
        return f"Index of {len(self.units)} units, {len(self)} documents"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.folder, self.digest)

    @cached_property
    def digest(self) -> str:
        return _digest(repr((self.units, self.blocks)).encode()).hex()

    def save(self) -> None:
        with atomic_writer(self.folder / "index.json") as file:
            facts = [
                [list(vars(unit).values()) for unit in self.units],
                list(map(list, self.blocks)),
            ]
            file.write(orjson.dumps(facts))

    @cached_property
    def firsts(self) -> Numbers:
        """[blocks + 1]: the number of each block's first document, and how many there are."""
        return np.cumsum([0, *(block.documents for block in self.blocks)], dtype=np.int64)

    @cached_property
    def unit_firsts(self) -> Numbers:
        """[units + 1]: the same for units."""
        counts = np.zeros(len(self.units) + 1, np.int64)
        for block in self.blocks:
            counts[block.unit + 1] += block.documents
        return np.cumsum(counts)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def array(self, block: int, name: str) -> NDArray[Any]:
        """An array of a block's index, memory-mapped."""
        return mapped(self.folder / self.blocks[block].name / f"{name}.npy")

    def read(self, block: int, name: str, row: int, where: slice) -> NDArray[Any]:
        """Read a range of a row of an array [rows, n]: mapped pages would count as memory held."""
        path = self.folder / self.blocks[block].name / f"{name}.npy"
        whole = np.load(path, mmap_mode="r")
        offset = whole.offset + (row * whole.shape[1] + where.start) * whole.itemsize
        return np.fromfile(path, whole.dtype, where.stop - where.start, offset=offset)

    def gather(self, numbers: Numbers, name: str) -> NDArray[Any]:
        """The rows of an array of the index for sorted numbers, at least one."""
        return np.concatenate(
            [
                self.array(block, name)[numbers[where] - self.firsts[block]]
                for block, where in ranges(numbers, self.firsts)
            ]
        )

    def names(self, numbers: Numbers) -> Iterator[tuple[str, str]]:
        """(id, source) for sorted numbers; the id as in the record."""
        for block, where in ranges(numbers, self.firsts):
            rows = numbers[where] - self.firsts[block]
            starts = self.array(block, "documents")["name"][rows].tolist()
            with (self.folder / self.blocks[block].name / "names.bin").open("rb") as file:
                for start in starts:
                    file.seek(start)
                    yield tuple(orjson.loads(file.readline()))

    def places(self, numbers: Numbers) -> Iterator[tuple[str, int]]:
        """(file, byte at which the line starts) for sorted numbers."""
        for unit, where in ranges(numbers, self.unit_firsts):
            for offset in self.gather(numbers[where], "documents")["offset"].tolist():
                yield self.units[unit].file, offset

    def documents(self, numbers: Numbers) -> Iterator[tuple[int, str]]:
        """(number, text) for sorted numbers, one at a time."""
        for unit, where in ranges(numbers, self.unit_firsts):
            wanted = numbers[where]
            rows = self.gather(wanted, "documents")
            lines = _lines_at(self.units[unit], rows["offset"], rows["length"])
            for number, line in zip(wanted.tolist(), lines, strict=True):
                yield number, parse_record(line)["text"]

    def rows(self, unit: int) -> Iterator[tuple[int, int, int, str]]:
        """(number, offset, bytes of the text, source) of a unit's documents, in order."""
        for number, block in enumerate(self.blocks):
            if block.unit == unit:
                first = int(self.firsts[number])
                numbers = np.arange(first, first + block.documents)
                rows = self.array(number, "documents")
                facts = zip(rows["offset"].tolist(), rows["bytes"].tolist(), strict=True)
                for each, (offset, size), (_, source) in zip(
                    numbers.tolist(), facts, self.names(numbers), strict=True
                ):
                    yield each, offset, size, source


@lru_cache(maxsize=4)
def open_index(folder: Path, digest: str) -> Index:
    """The index that was saved in this folder."""
    units, blocks = orjson.loads((folder / "index.json").read_bytes())
    index = Index(
        folder, tuple(Unit(*unit) for unit in units), tuple(Block(*block) for block in blocks)
    )
    assert index.digest == digest
    return index


def ranges(numbers: Numbers, firsts: Numbers) -> Iterator[tuple[int, slice]]:
    """(k, slice of the numbers in [firsts[k], firsts[k + 1])), for sorted numbers."""
    cuts = np.searchsorted(numbers, firsts)
    for k in np.flatnonzero(np.diff(cuts)).tolist():
        yield k, slice(int(cuts[k]), int(cuts[k + 1]))


def _lines_at(unit: Unit, offsets: Numbers, lengths: Numbers) -> Iterator[bytes]:
    """The lines at these offsets, in order; read directly if the file is plain."""
    if is_whole(unit.file):
        wanted = set(offsets.tolist())
        yield from (
            line.content
            for line in read_shard(unit.file, unit.start, unit.stop)
            if line.offset in wanted
        )
        return
    with open_shard(unit.file) as file:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            file.seek(offset)
            yield file.read(length)
