"""A folder of torch.distributed.checkpoint, read as data: no pickle in it is run.

    FOLDER/.metadata         pickle: every tensor with its chunks, and the file and offset of each
    FOLDER/__0_0.distcp      consecutive objects of torch.save: chunks, and non-tensor objects

torch's own reader calls pickle.load on `.metadata` and unpickles non-tensor objects. Here all of
this goes through `pickles`, which imports and calls nothing that a file names. Not supported:
chunks that an extension has compressed, and safetensors in place of torch.save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import check_tiling
from megatron.errors import UsageError
from tools.convert.legacy.pickles import DTYPES, Placeholder, SavedFile, read_pickle, sizes

METADATA = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file that hold one object of torch.save: a slice of a tensor, from `offset` on, or
    any other object, for which offset and shape are empty."""

    file: Path
    start: int
    nbytes: int
    offset: tuple[int, ...]
    shape: tuple[int, ...] = ()

    def open(self) -> SavedFile:
        return SavedFile(self.file, self.start, self.nbytes)


@dataclass(frozen=True)
class Item:
    """An entry of a folder that is not read yet. dtype: None for a non-tensor, which has one chunk.
    in_order: whether its position among the others is known."""

    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    in_order: bool

    def tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Raises ValueError if a file is damaged or does not contain
        what `.metadata` says."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            saved = chunk.open()
            part = saved.tensor(saved.content, self.key)
            if (part.dtype, part.shape) != (self.dtype, chunk.shape):
                raise ValueError(
                    f"{chunk.file} is damaged: at byte {chunk.start} is a {part.dtype} "
                    f"{list(part.shape)}, not the {list(chunk.shape)} of {self.key}"
                )
            box = zip(chunk.offset, chunk.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)] = part
        return whole

    def value(self) -> Any:
        """The non-tensor object, or the number in a tensor of one element."""
        if self.dtype is None:
            return self.chunks[0].open().content
        return self.tensor().item() if prod(self.shape) == 1 else None


def read_folder(folder: Path) -> dict[str, Item]:
    """Every entry by its key, in the order in which they were saved. Entries whose place in it is
    not known follow, sorted by name.

    Raises UsageError if the folder is not one of torch.distributed.checkpoint, ValueError or
    OSError, naming the file, if one is damaged or missing. Does not read the .distcp files.
    """
    file = folder / METADATA
    if not file.is_file():
        allowed = f"a folder of torch.distributed.checkpoint, with {METADATA} and .distcp files"
        raise UsageError("--from", folder, allowed)
    content = read_pickle(file)
    try:
        metadata = _attributes(content, "Metadata")
        chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for index, info in metadata["storage_data"].items():
            where, place = _attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo")
            name = place["relative_path"]
            start, nbytes = sizes((place["offset"], place["length"]))
            if place.get("transform_descriptors"):
                raise ValueError(f"{where['fqn']} is compressed; a checkpoint saved plain works")
            if Path(name).name != name:  # such as ../elsewhere
                raise ValueError(f"{name!r:.80} is not in the folder")
            offset = sizes(where.get("offset") or ())
            chunks[where["fqn"], offset] = Chunk(folder / name, start, nbytes, offset)
        described = metadata["state_dict_metadata"]
        # The metadata is in the order of ranks; `planner_data` has the order of the saved dicts.
        ordered = [key for key in metadata.get("planner_data") or () if key in described]
        items = {key: _item(key, described[key], chunks, True) for key in ordered}
        for key in sorted(described.keys() - items.keys()):
            items[key] = _item(key, described[key], chunks, False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{file} is damaged, or of an unknown version: {reason}") from error
    for chunk in chunks.values():
        if chunk.file.stat().st_size < chunk.start + chunk.nbytes:
            raise ValueError(f"{chunk.file} is damaged: it is shorter than {METADATA} says")
    return items


def _attributes(value: Any, kind: str) -> Mapping[str, Any]:
    """Attributes of an object of torch's class `kind`."""
    if not isinstance(value, Placeholder) or value.stands_for.rpartition(".")[2] != kind:
        raise ValueError(f"{value!r:.80} is no {kind}")
    return value.state or {}


def _item(
    key: str, described: Any, chunks: Mapping[tuple[str, tuple[int, ...]], Chunk], in_order: bool
) -> Item:
    if getattr(described, "stands_for", "").endswith(".BytesStorageMetadata"):
        return Item(key, None, (), (chunks[key, ()],), in_order)
    facts = _attributes(described, "TensorStorageMetadata")
    name = getattr(facts["properties"].state[0], "stands_for", None)  # the state is a tuple
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    if name not in dtypes:
        raise ValueError(f"{key} has a dtype that is not supported: {name}")
    dtype = dtypes[name]
    parts = []
    for each in facts["chunks"]:
        box = _attributes(each, "ChunkStorageMetadata")
        offset, shape = sizes(box["offsets"]), sizes(box["sizes"])
        chunk = chunks[key, offset]
        # Before memory for it is allocated.
        if prod(shape) * dtype.itemsize > chunk.nbytes:
            raise ValueError(f"a chunk of {key} is larger than its bytes in the file")
        parts.append(replace(chunk, shape=shape))
    whole = sizes(facts["size"])
    slices = [{"file": "", "offset": each.offset, "shape": each.shape} for each in parts]
    check_tiling({key: {"shape": whole, "slices": slices}}, {"": None})
    return Item(key, dtype, whole, tuple(parts), in_order)
