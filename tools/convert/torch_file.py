"""The files of torch.save, with their tensors where they are.

torch.load is not used, not even with an unpickler of our own: it hands archives that look like
TorchScript to torch.jit.load, unpacks tar files, and looks for the source of the classes that a
file names. The two formats are few lines each:

    old   pickles of a magic number, a version, facts of the machine, the object, and the storages'
          keys; then of each storage its number of elements (int64) and its elements
    zip   NAME/data.pkl, and the elements of each storage in NAME/data/KEY, not compressed
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tools.convert.unpickler import unpickle

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001


def read_saved(file: Path) -> Any:
    """The object that torch.save wrote into `file`, its tensors as StoredTensor.

    Raises ValueError for any other file and for one that is damaged, OSError where it is not there.
    """
    with file.open("rb") as stream:
        if stream.peek(4)[:4] != b"PK\x03\x04":
            return _read_old(stream, file)
    archive = ZipFile(file)
    content, _ = unpickle(io.BytesIO(archive.record("data.pkl")), file, archive)
    return content


def _read_old(stream: BinaryIO, file: Path) -> Any:
    elements = OldFile(file)
    for expected in (MAGIC, VERSION):
        if unpickle(stream, file, elements)[0] != expected:
            raise ValueError(f"{file} was not written by torch.save, or by a version unknown here")
    unpickle(stream, file, elements)  # facts of the machine that wrote it
    content, itemsizes = unpickle(stream, file, elements)
    keys, _ = unpickle(stream, file, elements)
    if not isinstance(keys, list):
        raise ValueError(f"{file} is damaged: it has no list of storages")
    elements.locate(stream, keys, itemsizes)
    return content


class OldFile:
    """The storages of the old format; `locate` is called when what comes before them is read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.places: dict[str, tuple[int, int]] = {}  # where a storage starts, and its bytes

    def locate(self, stream: BinaryIO, keys: Iterable[Any], itemsizes: Mapping[str, int]) -> None:
        end = self.file.stat().st_size
        for key in keys:
            head = stream.read(8)
            if len(head) < 8 or not isinstance(key, str) or key not in itemsizes:
                raise ValueError(f"{self.file} is damaged: it has no storage {key!r:.50}")
            nbytes = struct.unpack("<q", head)[0] * itemsizes[key]
            place = stream.tell()
            if not 0 <= nbytes <= end - place:
                raise ValueError(f"{self.file} is damaged: it ends within storage {key!r:.50}")
            self.places[key] = place, nbytes
            stream.seek(nbytes, 1)

    def check(self, key: str, nbytes: int) -> None:
        if self.places.get(key, (0, 0))[1] < nbytes:
            raise ValueError(f"{self.file} is damaged: storage {key!r:.50} is not whole")

    def read(self, key: str, start: int, nbytes: int) -> bytearray:
        self.check(key, start + nbytes)
        with self.file.open("rb") as stream:
            stream.seek(self.places[key][0] + start)
            return bytearray(stream.read(nbytes))


class ZipFile:
    """The storages of the zip format."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        names = self.archive.namelist()
        roots = [n.removesuffix("data.pkl") for n in names if n.endswith("/data.pkl")]
        if len(roots) != 1 or f"{roots[0]}constants.pkl" in names:
            raise ValueError(f"{file} is a zip archive, but none of torch.save's; unpack it first")
        self.root = roots[0]
        if f"{self.root}byteorder" in names and self.record("byteorder") != b"little":
            raise ValueError(f"{file} was written on a big-endian machine; only little can be read")

    def _entry(self, name: str, nbytes: int) -> zipfile.ZipInfo:
        try:
            entry = self.archive.getinfo(self.root + name)
        except KeyError:
            raise ValueError(f"{self.file} is damaged: it has no {name:.50}") from None
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{self.file} is packed again: {name:.50} is not as torch.save writes")
        if entry.file_size < nbytes:
            raise ValueError(f"{self.file} is damaged: {name:.50} is not whole")
        return entry

    def record(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """An entry's bytes; what is read to its end is compared with its checksum."""
        entry = self._entry(name, start + (nbytes or 0))
        try:
            with self.archive.open(entry) as stream:
                stream.seek(start)
                content = stream.read(entry.file_size if nbytes is None else nbytes)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{self.file} is damaged: {error}") from error
        return content

    def check(self, key: str, nbytes: int) -> None:
        self._entry(f"data/{key}", nbytes)

    def read(self, key: str, start: int, nbytes: int) -> bytearray:
        return bytearray(self.record(f"data/{key}", start, nbytes))
