"""Pickles of torch.save read as data: nothing that they name is imported, and nothing called.

The one place of this project that reads pickle; torch_file.py reads what stands around it.

A pickle is a program for a small machine, which looks up names, and calls, builds and fills what it
finds. Here it finds a table of what rebuilds tensors (NAMES), and for every other name a
`Placeholder`, which only keeps what it is given. A tensor is where its elements lie, a
`StoredTensor`, so that a file is looked at and refused before torch is imported or a weight read.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

if TYPE_CHECKING:
    from torch import Tensor

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


class Placeholder:
    """Stands for anything that a file names, of which `stands_for` is the name.

    arguments: of its construction; state: what it was given to be restored from, such as the
    attributes of an argparse.Namespace. What is put into it is dropped.
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


class Sealed:
    """What a file can make but not change."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"{type(self).__name__} is given a state")


class Table(dict[Any, Any]):
    """Stands for collections.OrderedDict; the attributes of a state dict, versions, are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class Elements(Protocol):
    """Where the elements of a file's storages are."""

    def check(self, key: str, nbytes: int) -> None:
        """Raise ValueError where the storage is missing or is shorter."""

    def read(self, key: str, start: int, nbytes: int) -> bytearray:
        """Bytes of a storage from `start` on; ValueError where they are damaged."""


@dataclass(frozen=True)
class Storage(Sealed):
    """Elements one after another; `start` is not 0 where it is a view of another storage."""

    elements: Elements
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

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.stride)
        if len(self.shape) != len(self.stride) or any(n < 0 for n in numbers):
            raise pickle.UnpicklingError(f"no tensor has shape {self.shape}, stride {self.stride}")
        last = self.offset + self._span if prod(self.shape) else 0
        if max(last, prod(self.shape)) > self.storage.numel:  # nor one element many times
            raise pickle.UnpicklingError(
                f"a tensor of shape {self.shape} lies beyond the {self.storage.numel} elements of "
                f"storage {self.storage.key}"
            )

    @property
    def dtype(self) -> str:
        """Name of the dtype in torch."""
        return self.storage.dtype

    @property
    def _span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def check(self) -> None:
        """Raise ValueError where the file is too short to hold it."""
        storage = self.storage
        storage.elements.check(storage.key, (storage.start + storage.numel) * storage.itemsize)

    def read(self) -> Tensor:
        """The tensor, contiguous, on the CPU; ValueError where the file is damaged."""
        import torch

        dtype, storage = getattr(torch, self.dtype), self.storage
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=dtype)
        start = (storage.start + self.offset) * storage.itemsize
        content = storage.elements.read(storage.key, start, self._span * storage.itemsize)
        flat = torch.frombuffer(content, dtype=dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


@dataclass(frozen=True)
class Builder(Sealed):
    """Stands for a function of torch; called with its arguments it returns data of this module."""

    build: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.build(*arguments)


@dataclass(frozen=True)
class StorageType(Sealed):
    """Stands for a storage class of torch, of which a storage names its own."""

    dtype: str
    itemsize: int


def _build_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """As torch's: what follows (gradient, hooks, conjugation) is not of weights."""
    sizes = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or any(type(size) is not int for size in sizes):
        raise pickle.UnpicklingError("a tensor is made of something other than a storage and sizes")
    return StoredTensor(storage, offset, tuple(shape), tuple(stride))


def _build_parameter(data: Any, *_: Any) -> Any:
    return data


BUILDERS = {
    ("collections", "OrderedDict"): Builder(Table),
    ("torch", "Size"): Builder(tuple),
    ("torch._utils", "_rebuild_tensor"): Builder(_build_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Builder(_build_tensor),
    ("torch._utils", "_rebuild_parameter"): Builder(_build_parameter),
}
NAMES: Mapping[tuple[str, str], Any] = BUILDERS | {
    ("torch", name): StorageType(*kind) for name, kind in STORAGES.items()
}


class Unpickler(pickle.Unpickler):
    """Finds no class, imports no module. Texts of Python 2 are read as Latin-1, which is total."""

    def __init__(self, stream: BinaryIO, elements: Elements) -> None:
        super().__init__(stream, encoding="latin1")
        self.elements = elements
        self.itemsizes: dict[str, int] = {}  # of the storages that were named, by their keys

    def find_class(self, module: str, name: str) -> Any:
        """The name is a key of a table and is never resolved, dots in it included."""
        return NAMES.get((module, name)) or _placeholder(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """A storage, or the class of a module that is kept with its source in the old format."""
        match pid:
            case ("module", kind, _, _):
                return kind
            case ("storage", StorageType() as kind, str(key), str(), int(numel), *view):
                return self._storage(kind, key, numel, *view)
        raise pickle.UnpicklingError(f"{pid!r:.200} is no storage of a kind that is known")

    def _storage(self, kind: StorageType, key: str, numel: int, view: Any = None) -> Storage:
        start = 0
        match view:
            case (_, int(start), int(numel)):
                pass
            case None:
                pass
            case _:
                raise pickle.UnpicklingError(f"{view!r:.200} is no view of a storage")
        if start < 0 or numel < 0:
            raise pickle.UnpicklingError(f"storage {key} has {numel} elements from {start} on")
        self.itemsizes.setdefault(key, kind.itemsize)
        return Storage(self.elements, key, kind.dtype, kind.itemsize, numel, start)


def unpickle(stream: BinaryIO, file: Path, elements: Elements) -> tuple[Any, dict[str, int]]:
    """(the next object of a stream of `file`, the item sizes of its storages by their keys).

    Raises ValueError where the pickle is cut off or damaged, or none.
    """
    unpickler = Unpickler(stream, elements)
    try:
        return unpickler.load(), unpickler.itemsizes
    except Exception as error:  # a damaged pickle stumbles over whatever its instructions do
        raise ValueError(f"{file} is damaged, or was not written by torch.save: {error}") from error
