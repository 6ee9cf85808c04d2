"""Reads files of torch.save, and plain pickles, as data: nothing that they name is imported or run.

This is the only place in this project that reads pickle. A pickle is a program that looks up names,
calls what they refer to, and builds and fills objects. Here every name but those of KNOWN gives a
`Placeholder`, which records what the pickle does to it.

torch.load reads the formats, with the unpickler of this module in place of pickle's; weights_only
refuses argparse.Namespace and Megatron-LM's classes.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file in torch's old format


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


class Rebuild:
    """Stands for torch's function that makes a tensor of a storage. A file cannot change it."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Tensor:
        whole = torch.empty(0, dtype=storage.dtype).set_(storage)
        return whole.as_strided(sizes(shape), sizes(stride), offset)  # it lies in the storage


class RebuildParameter:
    __slots__ = ()

    def __call__(self, data: Tensor, *_: Any) -> Tensor:
        return data


KNOWN = {
    "collections.OrderedDict": Table,
    "torch._utils._rebuild_tensor": Rebuild(),
    "torch._utils._rebuild_tensor_v2": Rebuild(),
    "torch._utils._rebuild_parameter": RebuildParameter(),
}


@cache
def _placeholder(name: str) -> type[Placeholder]:
    return type("Placeholder", (Placeholder,), {"stands_for": name})


class Unpickler(pickle.Unpickler):
    """Finds no class, imports no module. Reads Python 2 strings as Latin-1, which never fails."""

    def __init__(self, stream: BinaryIO, encoding: str = "latin1") -> None:
        super().__init__(stream, encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return KNOWN.get(full) or _placeholder(full)


def load(stream: BinaryIO, encoding: str = "latin1") -> Any:
    """For torch.load, to which this module is its pickle."""
    return Unpickler(stream, encoding).load()


def read_saved(file: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """The object in a file of torch.save, or in the `nbytes` bytes of a file from `start` on: its
    tensors on the CPU, and Placeholders for other objects.

    Raises ValueError, naming the file, if it is damaged or of another program (a file in the old
    format has no checksum), OSError if there is none.
    """
    with file.open("rb") as stream:
        stream.seek(start)
        part = stream if nbytes is None else io.BytesIO(stream.read(nbytes))
        try:
            if is_zip := zipfile.is_zipfile(part):
                archive = zipfile.ZipFile(part)
                if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                    raise ValueError("it is of TorchScript")
                if damaged := archive.testzip():
                    raise ValueError(f"{damaged} has another checksum")
            part.seek(0)
            if not is_zip and load(part) != MAGIC:
                raise ValueError("it has another magic number")
            part.seek(0)
            this = sys.modules[__name__]
            content = torch.load(
                part, "cpu", pickle_module=this, weights_only=False, encoding="latin1"
            )
        except Exception as error:  # instructions of a damaged pickle may raise anything
            raise ValueError(f"{file} is damaged, or no file of torch.save: {error}") from error
    return content


def sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a tuple, list or torch.Size; raises ValueError if one is no size."""
    if isinstance(value, Placeholder) and value.stands_for == "torch.Size":
        (value,) = value.arguments
    if not isinstance(value, tuple | list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r:.80} are no sizes")
    return tuple(value)


def read_pickle(file: Path) -> Any:
    """The object of a plain pickle, without tensors. Raises like read_saved."""
    with file.open("rb") as stream:
        try:
            return load(stream)
        except Exception as error:  # instructions of a damaged pickle may raise anything
            raise ValueError(f"{file} is damaged, or no pickle: {error}") from error
