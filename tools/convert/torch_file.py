"""Reads files of torch.save as data: nothing that they name is imported or called.

This is the only place in this project that reads pickle. A pickle is a program that looks up names,
calls what they refer to, and builds and fills objects. Here a name gives either a function that
rebuilds tensors (NAMES) or a `Placeholder`, which stores its arguments. A tensor becomes a
`StoredTensor`, which records where its elements are. A file can thus be inspected and refused
before torch is imported or a weight is read.

torch.load is not used, not even with this unpickler: it passes archives that look like TorchScript
to torch.jit.load, unpacks tar files, and looks for the source of classes that a file names. The
two formats are short:

    old   pickles of a magic number, a version, facts about the machine, the object, and the keys
          of the storages; then each storage's number of elements (int64) and its elements
    zip   NAME/data.pkl, and the elements of each storage in NAME/data/KEY, not compressed
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001

# Storage class, (name of the dtype in torch, bytes of an element).
STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}


class SavedFile:
    """A file and, by key, its storages' sizes in bytes; in the old format also their starts."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.archive: zipfile.ZipFile | None = None
        self.root = ""  # prefix of the names in the archive
        self.nbytes: dict[str, int] = {}
        self.starts: dict[str, int] = {}

    def open_archive(self, content: BinaryIO | None = None) -> BinaryIO:
        """The pickle of the zip format; ValueError for an archive that torch.save did not write.
        content: the archive, if it is not the whole file."""
        try:
            self.archive = archive = zipfile.ZipFile(content or self.file)
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            roots = [name.removesuffix("data.pkl") for name in sizes if name.endswith("/data.pkl")]
            if len(roots) != 1 or f"{roots[0]}constants.pkl" in sizes:
                raise ValueError(f"{self.file} is a zip archive, but none of torch.save's")
            if any(e.compress_type or e.flag_bits & 1 for e in archive.infolist()):
                raise ValueError(f"{self.file} is packed again; unpacked it would work")
            self.root, order = roots[0], f"{roots[0]}byteorder"
            if order in sizes and archive.read(order) != b"little":
                raise ValueError(f"{self.file} is of a big-endian machine; only little can be read")
            data = f"{self.root}data/"
            self.nbytes = {
                n.removeprefix(data): size for n, size in sizes.items() if n.startswith(data)
            }
            return io.BytesIO(archive.read(f"{self.root}data.pkl"))
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise ValueError(f"{self.file} is damaged: {error}") from error

    def locate(self, stream: BinaryIO, keys: Any, itemsizes: Mapping[str, int]) -> None:
        """Find the storages of the old format, which begin at the stream's position."""
        if not isinstance(keys, list):
            raise ValueError(f"{self.file} is damaged: it has no list of storages")
        end = self.file.stat().st_size
        for key in keys:
            head = stream.read(8)
            if len(head) < 8 or not isinstance(key, str) or key not in itemsizes:
                raise ValueError(f"{self.file} is damaged: it has no storage {key!r:.50}")
            nbytes = struct.unpack("<q", head)[0] * itemsizes[key]
            if not 0 <= nbytes <= end - stream.tell():
                raise ValueError(f"{self.file} is damaged: it ends within storage {key!r:.50}")
            self.starts[key], self.nbytes[key] = stream.tell(), nbytes
            stream.seek(nbytes, 1)

    def check(self, key: str, nbytes: int) -> None:
        """Raise ValueError if the storage is missing or shorter than nbytes."""
        if self.nbytes.get(key, -1) < nbytes:
            raise ValueError(f"{self.file} is damaged: storage {key!r:.50} is not whole")

    def read(self, key: str, start: int, nbytes: int) -> bytearray:
        """`nbytes` bytes of a storage from `start` on. Raises ValueError if they are damaged; in an
        archive the checksum shows this if the entry is read to its end."""
        self.check(key, start + nbytes)
        try:
            if self.archive is None:
                with self.file.open("rb") as stream:
                    stream.seek(self.starts[key] + start)
                    return bytearray(stream.read(nbytes))
            with self.archive.open(f"{self.root}data/{key}") as entry:
                entry.seek(start)
                return bytearray(entry.read(nbytes))
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{self.file} is damaged: {error}") from error


class Sealed:
    """Base of objects that a file can create but not change."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"{type(self).__name__} is given a state")


@dataclass(frozen=True)
class Storage(Sealed):
    """Contiguous elements; `start` is not 0 if it is a view of another storage."""

    saved: SavedFile
    key: str
    dtype: str
    itemsize: int
    numel: int
    start: int = 0


@dataclass(frozen=True)
class StoredTensor(Sealed):
    """A tensor that is not read yet; offset and stride are in elements of its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Name of the dtype in torch."""
        return self.storage.dtype

    @property
    def span(self) -> int:
        """Number of elements of the storage from its first to its last, both included."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def check(self) -> None:
        """Raise ValueError if the file is too short to hold it."""
        storage = self.storage
        storage.saved.check(storage.key, (storage.start + storage.numel) * storage.itemsize)

    def read(self) -> Tensor:
        """The tensor, contiguous, on the CPU; ValueError if the file is damaged."""
        import torch

        dtype, storage = getattr(torch, self.dtype), self.storage
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=dtype)
        start = (storage.start + self.offset) * storage.itemsize
        content = storage.saved.read(storage.key, start, self.span * storage.itemsize)
        flat = torch.frombuffer(content, dtype=dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


class Placeholder:
    """Stands for an object that a file names; `stands_for` is that name.

    arguments: those of its construction. state: the state it would be restored from, such as the
    attributes of an argparse.Namespace. Items that are added to it are dropped.
    """

    stands_for = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any, **_: Any) -> Placeholder:
        new = super().__new__(cls)
        new.arguments = arguments
        return new

    def __call__(self, *arguments: Any) -> Placeholder:
        return Placeholder(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = add = append


@cache
def _placeholder(module: str, name: str) -> type[Placeholder]:
    return type("Placeholder", (Placeholder,), {"stands_for": f"{module}.{name}"})


class Table(dict[Any, Any]):
    """Stands for collections.OrderedDict; drops a state dict's attributes, which are versions."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class StorageType(Sealed):
    """Stands for a storage class of torch, which every storage names."""

    dtype: str
    itemsize: int


@dataclass(frozen=True)
class Builder(Sealed):
    """Stands for a function of torch; takes its arguments and returns objects of this module."""

    build: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.build(*arguments)


def _build_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Like torch's. Further arguments (gradient, hooks, conjugation) are unused for weights."""
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or any(type(number) is not int for number in numbers):
        raise pickle.UnpicklingError("a tensor is made of something other than a storage and sizes")
    if len(shape) != len(stride) or any(number < 0 for number in numbers):
        raise pickle.UnpicklingError(f"no tensor has shape {shape}, stride {stride}")
    tensor = StoredTensor(storage, offset, tuple(shape), tuple(stride))
    last = offset + tensor.span if prod(shape) else 0
    if max(last, prod(shape)) > storage.numel:  # prod: refuses one element repeated many times
        raise pickle.UnpicklingError(
            f"a tensor of shape {shape} lies beyond the {storage.numel} elements of storage "
            f"{storage.key}"
        )
    return tensor


def _build_parameter(data: Any, *_: Any) -> Any:
    return data


NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Builder(Table),
    ("torch", "Size"): Builder(tuple),
    ("torch._utils", "_rebuild_tensor"): Builder(_build_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Builder(_build_tensor),
    ("torch._utils", "_rebuild_parameter"): Builder(_build_parameter),
    **{("torch", name): StorageType(*kind) for name, kind in STORAGES.items()},
}


class Unpickler(pickle.Unpickler):
    """Finds no class, imports no module. Reads Python 2 strings as Latin-1, which never fails."""

    def __init__(self, stream: BinaryIO, saved: SavedFile) -> None:
        super().__init__(stream, encoding="latin1")
        self.saved = saved
        self.itemsizes: dict[str, int] = {}  # of the storages named so far, by key

    def find_class(self, module: str, name: str) -> Any:
        """Looks the name up in a table; neither it nor dots in it are ever resolved."""
        return NAMES.get((module, name)) or _placeholder(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """A storage, or the class of a module, which the old format saves with its source."""
        start = 0
        match pid:
            case ("module", kind, _, _):
                return kind
            case ("storage", StorageType() as kind, str(key), str(), int(numel)):
                pass
            case ("storage", StorageType() as kind, str(key), str(), int(numel), None):
                pass
            case ("storage", StorageType() as kind, str(key), str(), int(), view):
                match view:
                    case (_, int(start), int(numel)):
                        pass
                    case _:
                        raise pickle.UnpicklingError(f"{view!r:.200} is no view of a storage")
            case _:
                raise pickle.UnpicklingError(f"{pid!r:.200} is no storage of a kind that is known")
        if start < 0 or numel < 0:
            raise pickle.UnpicklingError(f"storage {key} has {numel} elements from {start} on")
        self.itemsizes.setdefault(key, kind.itemsize)
        return Storage(self.saved, key, kind.dtype, kind.itemsize, numel, start)


def read_saved(file: Path) -> Any:
    """The object that torch.save wrote into `file`, its tensors as StoredTensor.

    Raises ValueError for any other file and for a damaged one, OSError if it does not exist.
    """
    saved = SavedFile(file)
    with file.open("rb") as stream:
        if stream.peek(4)[:4] == b"PK\x03\x04":
            return _unpickle(saved.open_archive(), saved)[0]
        for expected in (MAGIC, VERSION):
            if _unpickle(stream, saved)[0] != expected:
                raise ValueError(
                    f"{file} was not written by torch.save, or by a version unknown here"
                )
        _unpickle(stream, saved)  # facts about the machine that wrote it
        content, itemsizes = _unpickle(stream, saved)
        saved.locate(stream, _unpickle(stream, saved)[0], itemsizes)
        return content


def read_section(file: Path, start: int, nbytes: int) -> Any:
    """Like read_saved, for an object in the zip format at `nbytes` bytes of `file` from `start` on.
    The bytes stay in memory as long as a StoredTensor refers to them."""
    with file.open("rb") as stream:
        stream.seek(start)
        content = stream.read(nbytes)
    saved = SavedFile(file)
    return _unpickle(saved.open_archive(io.BytesIO(content)), saved)[0]


def read_pickle(file: Path) -> Any:
    """The object of a plain pickle, without tensors. Raises like read_saved."""
    with file.open("rb") as stream:
        return _unpickle(stream, SavedFile(file))[0]


def _unpickle(stream: BinaryIO, saved: SavedFile) -> tuple[Any, dict[str, int]]:
    """(the next object of the stream, the item sizes of its storages by key)."""
    unpickler = Unpickler(stream, saved)
    try:
        return unpickler.load(), unpickler.itemsizes
    except Exception as error:  # instructions of a damaged pickle may raise anything
        raise ValueError(
            f"{saved.file} is damaged, or was not written by torch.save: {error}"
        ) from error
