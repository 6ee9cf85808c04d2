"""A folder of torch.distributed.checkpoint, read as data: no pickle in it is run.

    FOLDER/.metadata         pickle: every tensor with its chunks, and the file and offset of each
    FOLDER/__0_0.distcp      consecutive objects of torch.save: chunks, and non-tensor objects

torch's own reader calls pickle.load on `.metadata` and unpickles non-tensor objects. Here all of
this goes through `torch_file`, which imports and calls nothing that a file names. Not supported:
chunks that an extension has compressed, and safetensors in place of torch.save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import check_tiling
from megatron.errors import UsageError
from tools.convert.torch_file import STORAGES, Placeholder, StoredTensor, read_pickle, read_section

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
ITEMSIZES = dict(STORAGES.values())


@dataclass(frozen=True)
class Section:
    """Bytes of a file that hold one object of torch.save. offset, shape: those of a chunk in its
    tensor; empty for any other object."""

    file: Path
    start: int
    nbytes: int
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def read(self) -> Any:
        """See read_section."""
        return read_section(self.file, self.start, self.nbytes)


@dataclass(frozen=True)
class Item:
    """An entry of a folder that is not read yet. dtype: its name in torch; "" for a non-tensor,
    which has one section. in_order: whether its position among the others is known."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    in_order: bool = True

    def tensor(self) -> Tensor:
        """The whole tensor, on the CPU. Raises ValueError if a file is damaged or does not contain
        what `.metadata` says."""
        import torch

        whole = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        for section in self.sections:
            stored = section.read()
            if (
                not isinstance(stored, StoredTensor)
                or (stored.dtype, stored.shape) != (self.dtype, section.shape)
            ):  # fmt: skip
                raise ValueError(
                    f"{section.file} is damaged: at byte {section.start} there is no {self.dtype} "
                    f"{list(section.shape)} of {self.key}, as {METADATA} says"
                )
            box = zip(section.offset, section.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)] = stored.read()
        return whole

    def value(self) -> Any:
        """The non-tensor object, or the number in a tensor of one element."""
        if not self.dtype:
            return self.sections[0].read()
        return self.tensor().item() if prod(self.shape) == 1 else None


def read_folder(folder: Path, given: str = "--from") -> dict[str, Item]:
    """Every entry by its key, in the order in which they were saved. Entries whose place in it is
    not known follow, sorted by name. given: the flag that names the folder.

    Raises UsageError if the folder is not one of torch.distributed.checkpoint, ValueError or
    OSError, naming the file, if one is damaged or missing. Does not read the .distcp files.
    """
    file = folder / METADATA
    if not file.is_file():
        allowed = f"a folder of torch.distributed.checkpoint, with {METADATA} and .distcp files"
        raise UsageError(given, folder, allowed)
    content = read_pickle(file)
    try:
        metadata = _attributes(content, "Metadata")
        places = dict(_places(folder, metadata["storage_data"]))
        described = metadata["state_dict_metadata"]
        # The metadata is in the order of ranks; `planner_data` has the order of the saved dicts.
        keys = [key for key in metadata.get("planner_data") or () if key in described]
        items = {key: _item(key, described[key], places) for key in keys}
        for key in sorted(described.keys() - items.keys()):
            items[key] = replace(_item(key, described[key], places), in_order=False)
        slices = {
            key: {
                "shape": item.shape,
                "slices": [
                    {"file": each.file, "offset": each.offset, "shape": each.shape}
                    for each in item.sections
                ],
            }
            for key, item in items.items()
            if item.dtype
        }
        check_tiling(slices, {section.file: None for section in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{file} is damaged, or unlike any known: {reason}") from error
    for section in places.values():
        if not section.file.is_file():
            raise FileNotFoundError(f"{section.file} is not there, but {METADATA} lists it")
        if section.file.stat().st_size < section.start + section.nbytes:
            raise ValueError(f"{section.file} is damaged: it is shorter than {METADATA} says")
    return items


def _attributes(value: Any, kind: str) -> Mapping[str, Any]:
    """Attributes of an object of torch's class `kind`, which was not built."""
    if not isinstance(value, Placeholder) or value.stands_for.rpartition(".")[2] != kind:
        raise ValueError(f"{value!r:.80} is no {kind}")
    return value.state or {}


def _places(
    folder: Path, storage: Mapping[Any, Any]
) -> list[tuple[tuple[str, tuple[int, ...]], Section]]:
    """((key, offset of a chunk), its section) for everything in the files."""
    found = []
    for index, info in storage.items():
        where, place = _attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo")
        name, start, nbytes = place["relative_path"], place["offset"], place["length"]
        if place.get("transform_descriptors"):
            raise ValueError(f"{where['fqn']} is compressed; a checkpoint saved plain works")
        if Path(name).name != name or min(_sizes((start, nbytes))) < 0:
            raise ValueError(f"{name!r:.80} from byte {start} on is no part of the folder")
        offset = _sizes(where.get("offset") or ())
        found.append(((where["fqn"], offset), Section(folder / name, start, nbytes, offset)))
    return found


def _item(
    key: str, described: Any, places: Mapping[tuple[str, tuple[int, ...]], Section]
) -> Item:  # fmt: skip
    if not isinstance(key, str):
        raise ValueError(f"{key!r:.80} is no key")
    if getattr(described, "stands_for", "").endswith(".BytesStorageMetadata"):
        return Item(key, "", (), (places[key, ()],))
    facts = _attributes(described, "TensorStorageMetadata")
    _attributes(facts["properties"], "TensorProperties")
    dtype = facts["properties"].state[0]  # the state is a tuple
    sections = []
    for chunk in facts["chunks"]:
        box = _attributes(chunk, "ChunkStorageMetadata")
        place = places[key, _sizes(box["offsets"])]
        sections.append(
            Section(place.file, place.start, place.nbytes, place.offset, _sizes(box["sizes"]))
        )
    name = getattr(dtype, "stands_for", "").removeprefix("torch.")
    if name not in ITEMSIZES:
        raise ValueError(f"{key} has a dtype that is not read here: {name or dtype!r:.80}")
    if any(prod(each.shape) * ITEMSIZES[name] > each.nbytes for each in sections):
        raise ValueError(f"a chunk of {key} is larger than its bytes in the file")
    return Item(key, name, _sizes(facts["size"]), tuple(sections))


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(value) is not int for value in values):
        raise ValueError(f"{values!r:.80} are no sizes")
    return tuple(values)
