"""Reads weights from safetensors files, and converts them to a model's parameters and back.

Every tensor of the source is used exactly once, and every tensor of the target made exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.config.model import ModelConfig, ViTConfig
from megatron.models.build import build_on_meta
from megatron.models.hf_folder import INDEX, SINGLE, open_files
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import ShardingSpec, TensorSlice, sharding_specs
from megatron.train.state import DTYPES
from tools.convert.folder import family_of, read_object
from tools.convert.table import Family, Transform

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

    def check_shapes(self, tensors: Mapping[str, Any], folder: Path, by: str) -> None:
        """Raise ValueError if a tensor of theirs has another shape. by: what the right one is
        known from."""
        whole = torch.empty(self.spec.shape, device="meta")
        for name, part in zip(self.theirs, self.transform.to_theirs(whole), strict=True):
            if (shape := tensors[name].shape) != part.shape:
                raise ValueError(
                    f"{folder}: {name} is {list(shape)}, and {list(part.shape)} by {by}"
                )


def resolve(family: Family, config: ModelConfig, vocab_size: int) -> list[Entry]:
    """The table for a model of this size: an entry for each of its parameters."""
    specs = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    entries = []
    for row in family.rows:
        for number in _numbers(row.ours, config):
            ours = row.ours.format(n=number)
            if row.is_optional and ours not in specs:
                continue
            theirs = tuple(each.format(n=number) for each in row.theirs)
            entries.append(Entry(ours, theirs, specs[ours], row.transform))
    names = [entry.ours for entry in entries]
    assert sorted(names) == sorted(specs), f"the table lacks {specs.keys() - set(names)}"
    return entries


def _numbers(name: str, config: ModelConfig) -> range:
    """Numbers of the layers that a row of the table stands for; one number if it names no layer."""
    return range(config.num_layers if "{n}" in name else 1)


def read_weights(folder: Path, family: Family, config: ModelConfig, vocab_size: int) -> Weights:
    """The parameters of the folder's model, by our names, whole and in their stored dtype.

    Raises ValueError or OSError, naming the tensor and the file, if one is missing, unknown,
    duplicated, or of another shape or dtype.
    """
    entries = resolve(family, config, vocab_size)
    needed = [name for entry in entries for name in entry.theirs]
    spares = {
        name.format(n=number): is_redundant
        for name, is_redundant in family.spares.items()
        for number in _numbers(name, config)
        if name.format(n=number) not in needed
    }
    tensors = _read_tensors(folder, family, needed, spares.keys())
    (first, tensor), *others = ((name, tensors[name]) for name in needed)
    if tensor.dtype not in DTYPES.values():
        known = ", ".join(map(str, DTYPES.values()))
        raise ValueError(f"{folder}: {first} is {tensor.dtype}; {known} would work")
    for name, other in others:
        if other.dtype != tensor.dtype:
            raise ValueError(
                f"{folder}: {first} is {tensor.dtype} and {name} {other.dtype}; "
                "a model saved in one dtype would work"
            )
    for name in spares.keys() & tensors.keys():
        if not spares[name](tensors[name], tensors):
            raise ValueError(
                f"{folder}: {name} is not what config.json and the other tensors make it"
            )
    weights = {}
    for entry in entries:
        parts = [tensors[name] for name in entry.theirs]
        entry.check_shapes(tensors, folder, "config.json")
        weights[entry.ours] = entry.transform.to_ours(parts, entry.spec.shape)
    return weights


def read_parameters(
    checkpoint: Checkpoint,
    specs: Mapping[str, ShardingSpec],
    kind: str = "model",
    dtype: torch.dtype | None = None,
) -> Weights:
    """These parameters, whole, by name; or other tensors of each, such as those of the kind
    exp_avg. dtype: that in the checkpoint if it is None. Reads nothing else."""
    saved, slices = checkpoint.manifest["tensors"], {}
    for name, spec in specs.items():
        key = f"{kind}.{name}"
        whole = torch.empty(spec.shape, dtype=dtype or getattr(torch, saved[key]["dtype"]))
        slices[name] = TensorSlice(key, spec, whole)
    load_checkpoint(checkpoint, slices.values(), partial=True)
    return {name: each.local for name, each in slices.items()}


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


def model_of_transformers(
    config: ModelConfig,
    vocab_size: int,
    weights: Mapping[str, Tensor],
    device: torch.device | None = None,
) -> Any:
    """The model of transformers with these whole parameters, by our names, in training mode, on the
    CPU or on the device of the weights."""
    import transformers

    if isinstance(config, ViTConfig) and not config.class_names:
        config = replace(config, class_names=tuple(f"LABEL_{n}" for n in range(vocab_size)))
    family = family_of(config)
    options = family.options_of(config) | dict.fromkeys(family.special)
    described = transformers.AutoConfig.for_model(
        family.model_type, vocab_size=vocab_size, **options
    )
    converted = to_theirs(family, resolve(family, config, vocab_size), weights)
    kind = getattr(transformers, family.architectures[0])
    transformers.utils.logging.disable_progress_bar()
    if device is None:
        model = kind.from_pretrained(None, config=described, state_dict=converted)
    else:
        with device:
            model = kind(described)
        model.load_state_dict(converted, strict=False)  # GPT-2's head is its embedding
    assert model.config._attn_implementation == "sdpa"
    return model.train()


def _read_tensors(
    folder: Path, family: Family, needed: Iterable[str], spare: Iterable[str]
) -> Weights:
    """The tensors of a folder by their names in the table: all of `needed`, possibly some of
    `spare`, and no others."""
    if not (folder / SINGLE).is_file():
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(
                f"{folder} has neither {SINGLE} nor {INDEX}, and pickled weights "
                "(pytorch_model.bin) are not read here; in Python, transformers."
                f"{family.auto_class}.from_pretrained({str(folder)!r}).save_pretrained(NEW) makes "
                "them safetensors"
            )
        if not isinstance(read_object(folder / INDEX).get("weight_map"), dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
    cure = f"a folder of transformers' {family.architectures[0]}.save_pretrained would work"
    with ExitStack() as stack:
        files = open_files(folder, stack)
        keys: dict[str, str] = {}  # by name in the table
        for key in files:
            name = family.name_of(key)
            if name in keys:
                raise ValueError(f"{folder} has {name} twice: {keys[name]} and {key}")
            keys[name] = key
        if missing := sorted(set(needed) - keys.keys()):
            raise ValueError(f"{folder} has no tensor {missing[0]}{_more(missing)}; {cure}")
        if surplus := sorted(keys.keys() - {*needed, *spare}):
            key = f"{keys[surplus[0]]}{_more(surplus)}"
            raise ValueError(f"{folder} has a tensor {key}, which no such model has here; {cure}")
        return {name: files[key].get_tensor(key) for name, key in keys.items()}


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
