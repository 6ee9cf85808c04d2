"""Reads files of torch.save, and plain pickles, as data: nothing that they name is imported or run.

This is the only place in this project that reads pickle. A pickle is a program that looks up names,
calls what they refer to, and builds and fills objects. Here every name but that of OrderedDict
gives a `Placeholder`, which records what the pickle does to it. `SavedFile.tensor` makes a tensor
of one that stands for a tensor.

torch.load is not used. With weights_only it refuses argparse.Namespace and Megatron-LM's classes.
With this module's unpickler it would still pass archives that look like TorchScript to
torch.jit.load, unpack tar files, and look for the source of classes that a file names. The two
formats are short:

    old   pickles of a magic number, a version, facts about the machine, the object, and the keys
          of the storages; then each storage's number of elements (int64) and its elements
    zip   NAME/data.pkl, and the elements of each storage in NAME/data/KEY, not compressed
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
import zlib
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001

DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


class Placeholder:
    """Stands for an object that a file names; `stands_for` is that name.

    arguments: those of its construction. state: what it would be restored from, such as the
    attributes of an argparse.Namespace. Items and elements that are added to it are dropped.
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


class Table(dict[Any, Any]):
    """Stands for collections.OrderedDict; drops a state dict's attributes, which are versions."""

    def __setstate__(self, state: Any) -> None:
        pass


@cache
def _placeholder(name: str) -> type[Placeholder]:
    return type("Placeholder", (Placeholder,), {"stands_for": name})


class _Unpickler(pickle.Unpickler):
    """Finds no class, imports no module. Reads Python 2 strings as Latin-1, which never fails."""

    def __init__(self, stream: BinaryIO, dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__(stream, encoding="latin1")
        self.dtypes = {} if dtypes is None else dtypes  # of the storages that it names, by key

    def find_class(self, module: str, name: str) -> type:
        full = f"{module}.{name}"
        return Table if full == "collections.OrderedDict" else _placeholder(full)

    def persistent_load(self, pid: Any) -> Any:
        """A storage's id as it is; the class of a module, which the old format saves with its
        source."""
        match pid:
            case ("module", kind, *_):
                return kind
            case ("storage", type(stands_for=str(name)), str(key), *_) if name in DTYPES:
                self.dtypes.setdefault(key, DTYPES[name])
        return pid


class SavedFile:
    """A file of torch.save; or, in the zip format, the `nbytes` bytes of a file from `start` on.

    content: the saved object, with Placeholders in place of tensors and other objects. Raises
    ValueError, naming the file, if it is damaged or of another program, OSError if there is none.
    """

    def __init__(self, file: Path, start: int = 0, nbytes: int | None = None) -> None:
        self.file = file
        self.storages: dict[str, tuple[int, int]] = {}  # (start, number of bytes) by key
        self.checksums: dict[str, int] = {}  # of storages that are not read yet
        with file.open("rb") as stream:
            try:
                # A private mapping: torch wants memory that it could write to.
                whole = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
                self.buffer = whole[start:][:nbytes]
                if nbytes is not None:
                    self.content = self._read_zip(io.BytesIO(self.buffer))
                elif self.buffer[:4] == b"PK\x03\x04":
                    self.content = self._read_zip(stream)
                else:
                    self.content = self._read_old(stream)
            except Exception as error:  # instructions of a damaged pickle may raise anything
                raise ValueError(f"{file} is damaged, or no file of torch.save: {error}") from error

    def _read_zip(self, stream: BinaryIO) -> Any:
        with zipfile.ZipFile(stream) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            roots = [name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl")]
            if len(roots) != 1 or f"{roots[0]}constants.pkl" in entries:  # constants: TorchScript
                raise ValueError("it is a zip archive, but none of torch.save's")
            if any(entry.compress_type or entry.flag_bits & 1 for entry in entries.values()):
                raise ValueError("it is packed again; unpacked it works")
            (root,) = roots
            if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
                raise ValueError("it is of a big-endian machine; only little-endian is supported")
            for name, entry in entries.items():
                if name.startswith(f"{root}data/"):
                    key, at = name.removeprefix(f"{root}data/"), entry.header_offset
                    # The local header: 30 bytes, the last of them two lengths of what follows.
                    lengths = struct.unpack("<HH", self.buffer[at + 26 : at + 30])
                    self.storages[key] = at + 30 + sum(lengths), entry.file_size
                    self.checksums[key] = entry.CRC
            return _Unpickler(io.BytesIO(archive.read(f"{root}data.pkl"))).load()

    def _read_old(self, stream: BinaryIO) -> Any:
        for expected in (MAGIC, VERSION):
            if _Unpickler(stream).load() != expected:
                raise ValueError("it has another magic number or version")
        _Unpickler(stream).load()  # facts about the machine that wrote it
        dtypes: dict[str, torch.dtype] = {}
        content = _Unpickler(stream, dtypes).load()
        for key in _Unpickler(stream).load():
            (count,) = struct.unpack("<q", stream.read(8))
            nbytes = count * dtypes[key].itemsize
            if not 0 <= nbytes <= len(self.buffer) - stream.tell():
                raise ValueError(f"it ends within storage {key:.50}")
            self.storages[key] = stream.tell(), nbytes
            stream.seek(nbytes, 1)
        return content

    def tensor(self, value: Any, name: str) -> Tensor:
        """The tensor on the CPU that a value of the content stands for; a view of the file. name:
        for messages.

        Raises ValueError if it is no tensor, or if its storage is damaged, which a file in the old
        format has no checksum to show.
        """
        match value:
            case Placeholder(stands_for="torch._utils._rebuild_parameter", arguments=(data, *_)):
                value = data
        try:
            match value:
                case Placeholder(
                    stands_for="torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2",
                    arguments=(storage, int(offset), shape, stride, *_),
                ):
                    flat = self._storage(storage)
                    shape = sizes(shape)
                    if prod(shape) > flat.numel():  # refuses one element repeated many times
                        raise ValueError(f"shape {shape} is larger than the storage")
                    return flat.as_strided(shape, sizes(stride), offset)  # checks the rest
            raise ValueError("it is no tensor")
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"{self.file}: {name:.100} cannot be read: {error}") from error

    def _storage(self, pid: Any) -> Tensor:
        """The storage with this persistent id as a flat tensor. The last part of an id, if any, is
        None, or in old files for a view of another storage (a key, first element, number)."""
        match pid:
            case ("storage", type(stands_for=str(name)), str(key), str(), int(numel)):
                first = 0
            case ("storage", type(stands_for=str(name)), str(key), str(), int(numel), None):
                first = 0
            case ("storage", type(stands_for=str(name)), str(key), str(), int(), view):
                _, first, numel = view
            case _:
                raise ValueError(f"{pid!r:.80} is no storage")
        if name not in DTYPES or min(first, numel) < 0:
            raise ValueError(f"{pid!r:.80} is no storage of a kind that is known")
        dtype = DTYPES[name]
        start, nbytes = self.storages.get(key, (0, 0))
        if (first + numel) * dtype.itemsize > nbytes:
            raise ValueError(f"storage {key:.50} is not whole")
        if key in self.checksums:
            if zlib.crc32(self.buffer[start : start + nbytes]) != self.checksums[key]:
                raise ValueError(f"storage {key:.50} has another checksum")
            del self.checksums[key]
        if not numel:
            return torch.empty(0, dtype=dtype)
        begin = start + first * dtype.itemsize
        return torch.frombuffer(self.buffer, dtype=dtype, count=numel, offset=begin)


def sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a tuple, list or torch.Size; raises ValueError if one is no size."""
    if isinstance(value, Placeholder) and value.stands_for == "torch.Size":
        (value,) = value.arguments
    if not isinstance(value, tuple | list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r:.80} are no sizes")
    return tuple(value)


def read_pickle(file: Path) -> Any:
    """The object of a plain pickle, without tensors. Raises like SavedFile."""
    with file.open("rb") as stream:
        try:
            return _Unpickler(stream).load()
        except Exception as error:  # instructions of a damaged pickle may raise anything
            raise ValueError(f"{file} is damaged, or no pickle: {error}") from error
