"""Reads weights from safetensors files, and converts them to a model's parameters and back.

Every tensor of the source is used exactly once, and every tensor of the target made exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.models.build import build_on_meta
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import ShardingSpec, sharding_specs
from megatron.train.state import DTYPES
from tools.convert.folder import read_object
from tools.convert.table import Family, Transform

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """One parameter of a given model: the table's row with the layer number filled in.

    spec: whole shape, and sharding when it is loaded. theirs: names without a prefix.
    """

    ours: str
    theirs: tuple[str, ...]
    spec: ShardingSpec
    transform: Transform

    def their_shapes(self) -> list[torch.Size]:
        whole = torch.empty(self.spec.shape, device="meta")
        return [each.shape for each in self.transform.to_theirs(whole)]


def resolve(family: Family, section: ModelConfig, vocab_size: int) -> list[Entry]:
    """The table for a model of this size: an entry for each of its parameters."""
    table = sharding_specs(build_on_meta(section, serial_mesh(), vocab_size))
    entries = []
    for row in family.rows:
        for number in _numbers(row.ours, section):
            ours = row.ours.format(n=number)
            if row.is_optional and ours not in table:
                continue
            theirs = tuple(each.format(n=number) for each in row.theirs)
            entries.append(Entry(ours, theirs, table[ours], row.transform))
    names = [entry.ours for entry in entries]
    assert sorted(names) == sorted(table), f"the table lacks {table.keys() - set(names)}"
    return entries


def _numbers(name: str, section: ModelConfig) -> range:
    """Numbers of the layers that a row of the table stands for; one number if it names no layer."""
    return range(section.num_layers if "{n}" in name else 1)


def read_weights(folder: Path, family: Family, section: ModelConfig, vocab_size: int) -> Weights:
    """The parameters of the folder's model, by our names, whole and in their stored dtype.

    Raises ValueError or OSError, naming the tensor and the file, if one is missing, unknown,
    duplicated, or of another shape or dtype.
    """
    entries = resolve(family, section, vocab_size)
    wanted = [name for entry in entries for name in entry.theirs]
    spares = {
        name: spare
        for spare in family.spares
        for number in _numbers(spare.theirs, section)
        if (name := spare.theirs.format(n=number)) not in wanted
    }
    tensors = _read_tensors(folder, family, wanted, spares.keys())
    _check_dtypes(folder, {name: tensors[name] for name in wanted})
    for name in spares.keys() & tensors.keys():
        if not spares[name].is_spare(tensors[name], tensors):
            raise ValueError(f"{folder}: {name} {spares[name].otherwise}")
    return {entry.ours: _to_ours(folder, entry, tensors) for entry in entries}


def _to_ours(folder: Path, entry: Entry, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [tensors[name] for name in entry.theirs]
    for name, part, shape in zip(entry.theirs, parts, entry.their_shapes(), strict=True):
        if part.shape != shape:
            raise ValueError(
                f"{folder}: {name} is {list(part.shape)}, and {list(shape)} by config.json"
            )
    return entry.transform.to_ours(parts, entry.spec.shape)


def _check_dtypes(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all have the same dtype, one that a checkpoint here can have."""
    (first, tensor), *others = tensors.items()
    if tensor.dtype not in DTYPES.values():
        known = ", ".join(map(str, DTYPES.values()))
        raise ValueError(f"{folder}: {first} is {tensor.dtype}; {known} would work")
    for name, other in others:
        if other.dtype != tensor.dtype:
            raise ValueError(
                f"{folder}: {first} is {tensor.dtype} and {name} {other.dtype}; "
                "a model saved in one dtype would work"
            )


def to_theirs(family: Family, entries: Iterable[Entry], weights: Mapping[str, Tensor]) -> Weights:
    """Converts whole parameters, by our names, to the tensors of an export, by its names."""
    made: Weights = {}
    for entry in entries:
        parts = entry.transform.to_theirs(weights[entry.ours])
        for name, part in zip(entry.theirs, parts, strict=True):
            key = family.key_of(name)
            assert key not in made, name
            made[key] = part.contiguous()
    return made


def _read_tensors(
    folder: Path, family: Family, wanted: Iterable[str], spare: Iterable[str]
) -> Weights:
    """The tensors of a folder by their names in the table: all of `wanted`, possibly some of
    `spare`, and no others."""
    places: dict[str, tuple[Path, str]] = {}
    for file, key in _list_keys(folder, family.auto_class):
        name = family.name_of(key)
        if name in places:
            raise ValueError(f"{folder} has {name} twice: {places[name][1]} and {key}")
        places[name] = file, key
    if missing := sorted(set(wanted) - places.keys()):
        because = _because(family, missing)
        raise ValueError(f"{folder} has no tensor {missing[0]}{_more(missing)}{because}")
    if surplus := sorted(places.keys() - {*wanted, *spare}):
        key = places[surplus[0]][1]
        raise ValueError(
            f"{folder} has a tensor {key}{_more(surplus)} that no part of this project's model is"
        )
    return {name: _read(file, key) for name, (file, key) in places.items()}


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _because(family: Family, missing: list[str]) -> str:
    """Why these tensors may be missing, if there is a usual reason."""
    lacking = family.lacking
    if lacking is None or not all(name.startswith(lacking.theirs) for name in missing):
        return ""
    return f", {lacking.because}"


def _read(file: Path, key: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(key)


def _list_keys(folder: Path, auto_class: str) -> list[tuple[Path, str]]:
    """(file, name in it) of every tensor. auto_class: transformers' class that loads the folder."""
    if (folder / SINGLE).is_file():
        return [(folder / SINGLE, key) for key in _keys(folder / SINGLE)]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}, and pickled weights (pytorch_model.bin) "
            f"are not read here; in Python, transformers.{auto_class}"
            f".from_pretrained({str(folder)!r}).save_pretrained(NEW) makes them safetensors"
        )
    listed = read_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    found = [(name, key) for name in sorted(set(listed.values())) for key in _keys(folder / name)]
    if wrong := set(listed.items()) ^ {(key, name) for name, key in found}:
        key, name = min(wrong)
        raise ValueError(f"{folder / INDEX} and {name} disagree on whether {key} is in the latter")
    return [(folder / name, key) for name, key in found]


def _keys(file: Path) -> list[str]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, but {INDEX} lists it")
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
