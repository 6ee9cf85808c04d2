"""The index of a corpus: a folder of arrays per block of a unit's documents, a row per document.

documents.npy   ROW [n]: location and length of the document, digest of its normalised text
names.bin       its id and source, as JSON lines; `name` in documents.npy is where each begins
keys.npy        uint64 [COLUMNS, n]: hashes of its id, of its normalised text, and of each band of
                its signature, each column sorted; order.npy has the row of each key
sketches.npy    uint64 [n, 2]: one bit of each value of the signature
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.json_lines import open_shard, parse_record, read_shard
from megatron.libraries import Library
from tools.corpus import external, files
from tools.corpus.dedup.signatures import Bands, Shingler, Signatures, sketch
from tools.corpus.engine import keep_rejected
from tools.corpus.external import Numbers, Words
from tools.corpus.settings import StepSettings

orjson = Library("orjson")

ROW = np.dtype(
    [("offset", "<i8"), ("length", "<i8"), ("bytes", "<i8"), ("name", "<i8"), ("digest", "<u8", 2)]
)  # in bytes: offset and length of the line, size of the text, offset in names.bin
LOCATION = ["offset", "length", "bytes", "name"]
BLOCK = 1 << 15  # documents; a unit that is one large compressed file may have any number
ID, TEXT, FIRST_BAND = 0, 1, 2  # columns of keys.npy


def index_unit(
    folder: Path, unit: files.Unit, settings: StepSettings, shingler: Shingler, bands: Bands
) -> dict[str, Any]:
    """Write the index of a unit.

    Returns (name, number of documents) of each block, a folder in `folder`, and the unit's counts.
    """
    accounting, blocks = files.DocumentCounts(), []
    documents = files.read_documents(unit, accounting)
    while True:
        name = f"{unit.name}-{len(blocks):04}"
        count = write_block(folder / name, itertools.islice(documents, BLOCK), shingler, bands)
        if not count:
            break
        blocks.append((name, count))
    keep_rejected(settings, unit, accounting)
    return {"blocks": blocks, "accounting": accounting.to_json()}


def write_block(
    folder: Path, documents: Iterable[files.Document], shingler: Shingler, bands: Bands
) -> int:
    """Write a block, unless it is empty.  Returns how many documents it has."""
    locations: list[tuple[int, int, int, int]] = []
    names, digests = bytearray(), bytearray()
    signatures: list[Signatures] = []
    for document in documents:
        points = shingler.points(document.text)
        identity = files.document_id(document.record)
        digests += id_key(identity).to_bytes(8, "little") + _digest(points.tobytes())
        size = len(document.text.encode())
        locations.append((document.offset, len(document.line), size, len(names)))
        names += orjson.dumps([identity, files.source_of(document.record)]) + b"\n"
        signatures.append(shingler.sign(shingler.hashes(points)))
    if not locations:
        return 0
    columns = np.frombuffer(digests, "<u8").reshape(-1, 3)
    rows = np.empty(len(locations), ROW)
    rows[LOCATION] = np.array(locations, rows[LOCATION].dtype)
    rows["digest"] = columns[:, 1:]
    signed = np.array(signatures)
    external.write_sorted(folder, np.stack([columns[:, ID], columns[:, TEXT], *bands.keys(signed)]))
    external.save(folder / "sketches.npy", sketch(signed))
    external.save(folder / "documents.npy", rows)
    with files.scratch_writer(folder / "names.bin") as file:
        file.write(names)
    return len(rows)


def _digest(content: bytes) -> bytes:
    """The first 128 bits of the SHA-256."""
    return hashlib.sha256(content).digest()[:16]


def id_key(identity: str) -> int:
    """The first 64 bits of an id's digest."""
    return int.from_bytes(_digest(identity.encode())[:8], "little")


class Block(NamedTuple):
    unit: int
    """Index of its unit among all."""
    name: str
    documents: int


class Part(NamedTuple):
    """One of `parts` equal ranges of the keys of a column."""

    column: int
    number: int
    parts: int

    @property
    def name(self) -> str:
        return f"{self.column:02}-{self.number:04}"


@dataclass(frozen=True)
class Index:
    """The index of all units; documents are numbered from 0 across units.

    Workers get its folder and digest, and read it from the file there.
    """

    folder: Path
    units: tuple[files.Unit, ...]
    blocks: tuple[Block, ...]

    def __repr__(self) -> str:
        """Distinguishes one index from another when a task is looked up."""
        return f"Index of {len(self.units)} units, {len(self)} documents"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.folder, self.digest)

    @cached_property
    def digest(self) -> str:
        return _digest(repr((self.units, self.blocks)).encode()).hex()

    def save(self) -> None:
        facts = [[list(vars(unit).values()) for unit in self.units], list(map(list, self.blocks))]
        with files.scratch_writer(self.folder / "index.json") as file:
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
        """An array of a block, memory-mapped."""
        return external.mapped(self.folder / self.blocks[block].name / f"{name}.npy")

    def read_part(self, part: Part) -> tuple[Words, Numbers]:
        """The keys of all blocks that are in the part, and the numbers of their documents."""
        keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for block, first in zip(self.blocks, self.firsts[:-1], strict=True):
            found, rows = external.read_sorted(self.folder / block.name, *part)
            keys.append(found)
            numbers.append(rows + first)
        return np.concatenate(keys), np.concatenate(numbers)

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

    def has_ids(self, names: list[str]) -> NDArray[np.bool_]:
        """Whether some record has each of these ids; compares hashes."""
        wanted = np.array([id_key(name) for name in names], np.uint64)
        found = np.zeros(len(wanted), bool)
        for block in range(len(self.blocks)):
            keys = self.array(block, "keys")[ID]
            places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found |= keys[places] == wanted
        return found

    def places(self, numbers: Numbers) -> Iterator[tuple[str, int]]:
        """(file, byte at which the line starts) for sorted numbers."""
        for unit, where in ranges(numbers, self.unit_firsts):
            for offset in self.gather(numbers[where], "documents")["offset"].tolist():
                yield self.units[unit].file, offset

    def texts(self, numbers: Numbers) -> Iterator[tuple[int, str]]:
        """(number, text) for sorted numbers, one at a time."""
        for unit, where in ranges(numbers, self.unit_firsts):
            rows = self.gather(numbers[where], "documents")
            lines = _lines_at(self.units[unit], rows["offset"], rows["length"])
            for number, line in zip(numbers[where].tolist(), lines, strict=True):
                yield number, parse_record(line)["text"]

    def rows(self, unit: int) -> Iterator[tuple[int, int, int, str]]:
        """(number, offset, bytes of the text, source) of a unit's documents, in order."""
        first, stop = self.unit_firsts[unit : unit + 2].tolist()
        for start in range(first, stop, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, stop))
            rows = self.gather(numbers, "documents")
            sources = (source for _, source in self.names(numbers))
            yield from zip(
                numbers.tolist(), rows["offset"].tolist(), rows["bytes"].tolist(), sources,
                strict=True,
            )  # fmt: skip


@lru_cache(maxsize=4)
def open_index(folder: Path, digest: str) -> Index:
    """The index that was saved in this folder."""
    units, blocks = orjson.loads((folder / "index.json").read_bytes())
    index = Index(
        folder, tuple(files.Unit(*unit) for unit in units), tuple(Block(*block) for block in blocks)
    )
    assert index.digest == digest
    return index


def ranges(numbers: Numbers, firsts: Numbers) -> Iterator[tuple[int, slice]]:
    """(k, slice of the numbers in [firsts[k], firsts[k + 1])), for sorted numbers."""
    cuts = np.searchsorted(numbers, firsts)
    for k in np.flatnonzero(np.diff(cuts)).tolist():
        yield k, slice(int(cuts[k]), int(cuts[k + 1]))


def _lines_at(unit: files.Unit, offsets: Numbers, lengths: Numbers) -> Iterator[bytes]:
    """The lines at these offsets, in order; read directly if the file is plain."""
    if files.is_whole(unit.file):
        wanted = set(offsets.tolist())
        for line in read_shard(unit.file, unit.start, unit.stop):
            if line.offset in wanted:
                yield line.content
        return
    with open_shard(unit.file) as file:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            file.seek(offset)
            yield file.read(length)
