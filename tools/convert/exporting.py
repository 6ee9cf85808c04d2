"""Writes a checkpoint's model as a folder that transformers loads.

An unmodified model of transformers has the names, shapes and bits that it had in the folder that
training started from, as save_pretrained writes them today.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.save import reason
from megatron.config.model import HF_FILES, HF_PREFIX, ModelConfig, ViTConfig, hf_files
from megatron.data.tokenizer import Tokenizer
from megatron.models.build import build_on_meta
from megatron.models.hf_folder import INDEX
from megatron.models.registry import KINDS, config_of
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.trained import tokenizer_in
from tools.convert.folder import describe
from tools.convert.table import Family
from tools.convert.vit import PREPROCESSOR, preprocessor
from tools.convert.vocabulary import write_tokenizer
from tools.convert.weights import Weights, read_parameters, resolve, to_theirs

if TYPE_CHECKING:
    from megatron.huggingface.weights import Bare

SHARD_SIZE = "5GB"  # of one file; memory holds one file at a time


def write_model(
    folder: Path,
    checkpoint: Checkpoint,
    family: Family,
    tokenizer: Tokenizer | None,
    shard_size: str = SHARD_SIZE,
) -> None:
    """Write configuration, weights in the checkpoint's dtype, and tokenizer.

    checkpoint: already verified to be whole. tokenizer: None for a model of images. Raises
    UsageError for a model that transformers does not have, ValueError if the checkpoint has other
    tensors than its model, or tensors of several dtypes, OSError if a file cannot be written.
    """
    manifest = checkpoint.manifest
    config = config_of(manifest)
    if isinstance(config, ViTConfig):
        names = range(len(config.class_names), manifest["vocab_size"])
        config = replace(
            config, class_names=(*config.class_names, *(f"LABEL_{each}" for each in names))
        )
    values = family.options_of(config)
    entries = resolve(family, config, manifest["vocab_size"])
    tensors = {key for key in manifest["tensors"] if key.startswith("model.")}
    if strange := sorted(tensors ^ {f"model.{entry.ours}" for entry in entries}):
        raise ValueError(
            f"{checkpoint.path}: {strange[0]} is in the checkpoint or in its model, but not in both"
        )
    dtype, *others = {_dtype_of(checkpoint, entry.ours) for entry in entries}
    if others:
        dtypes = " and ".join(sorted(map(str, (dtype, *others))))
        raise ValueError(f"{checkpoint.path} has weights of several dtypes: {dtypes}")
    outline = {
        entry.ours: torch.empty(entry.spec.shape, dtype=dtype, device="meta") for entry in entries
    }
    sources = {family.key_of(name): entry for entry in entries for name in entry.theirs}

    def read(keys: Iterable[str]) -> Weights:
        needed = {sources[key].ours: sources[key] for key in keys}
        specs = {name: entry.spec for name, entry in needed.items()}
        weights = read_parameters(checkpoint, specs)
        made = to_theirs(family, needed.values(), weights)
        return {key: made[key] for key in keys}

    _write_weights(folder, to_theirs(family, entries, outline), read, shard_size)
    values["architectures"] = [family.architectures[0]]
    if tokenizer is not None:
        values["vocab_size"] = manifest["vocab_size"]
    values["dtype"] = str(dtype).removeprefix("torch.")
    kept = hf_files(checkpoint.path, HF_PREFIX, ["config.json", *HF_FILES])
    if "config.json" in kept:
        options = json.loads(kept.pop("config.json"))
        imported = describe(options, checkpoint.path / f"{HF_PREFIX}config.json").config
        _write_json(folder / "config.json", _updated(options, imported, config, values, family))
    else:
        special = {name: getattr(tokenizer, each) for name, each in family.special.items()}
        described = transformers.AutoConfig.for_model(family.model_type, **values, **special)
        described.save_pretrained(folder)
        if KINDS[config.kind].writes_text:
            transformers.GenerationConfig(**special).save_pretrained(folder)
    if isinstance(config, ViTConfig):
        _write_json(folder / PREPROCESSOR, preprocessor(config))
    elif tokenizer is not None:
        write_tokenizer(folder, tokenizer, config.max_position_embeddings)
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def _updated(
    options: dict[str, Any],
    imported: ModelConfig,
    config: ModelConfig,
    values: dict[str, Any],
    family: Family,
) -> dict[str, Any]:
    """The options of an imported config.json, with those of `values` that they do not state.

    imported: the model that they describe. config, values: the model that is exported.
    """
    if "dtype" not in options and "torch_dtype" in options:
        values = {**values, "torch_dtype": values["dtype"]}
        del values["dtype"]
    before = options | family.options_of(imported)
    changes = {name: value for name, value in values.items() if before.get(name) != value}
    replaced = set[str]()
    for key in family.keys:
        allowed = key.allowed(asdict(config))
        if allowed is not None and not key.ours:
            default = next(iter(allowed))
            if options.get(key.theirs, default) not in allowed:
                changes[key.theirs] = default
        if key.theirs in changes:
            replaced |= {*key.older}
    return {name: value for name, value in options.items() if name not in replaced} | changes


def write_unmodified(folder: Path, checkpoint: Checkpoint, shard_size: str = SHARD_SIZE) -> None:
    """Like write_model, for an unmodified model. Its tokenizer is in the files that accompanied the
    weights; else it is that of the training data, if the checkpoint has it.

    Memory holds the whole model if its files contain values computed from the parameters.
    """
    from megatron.huggingface.weights import Bare, layout_of

    manifest = checkpoint.manifest
    config = config_of(manifest)
    model = build_on_meta(config, serial_mesh(), manifest["vocab_size"])
    bare = Bare(config, model.auto_class)
    ours = {name: f"model.{first}" for name, first in bare.first.items()}
    specs = sharding_specs(model)

    def read(names: Iterable[str]) -> Weights:
        """These parameters and buffers as transformers has them."""
        wanted = {ours[name]: specs[ours[name]] for name in names if name in ours}
        whole = read_parameters(checkpoint, wanted)
        tensors = {}
        for name in names:
            tensors[name] = bare.state[name]
            if name in ours:
                layout = layout_of(model, ours[name])
                tensors[name] = layout.to_original(whole[ours[name]]).contiguous()
        return tensors

    saved = _saved(bare)
    outline = {name: tensor for name, tensor in bare.state.items() if name in saved}
    for name in outline.keys() & ours.keys():
        dtype = _dtype_of(checkpoint, ours[name])
        outline[name] = torch.empty(outline[name].shape, dtype=dtype, device="meta")
    in_files = revert_weight_conversion(bare.model, dict(outline))
    keys = {id(tensor): key for key, tensor in in_files.items()}
    if keys.keys() == {id(tensor) for tensor in outline.values()}:
        names = {keys[id(tensor)]: name for name, tensor in outline.items()}

        def read_keys(keys: Iterable[str]) -> Weights:
            tensors = read([names[key] for key in keys])
            return {key: tensors[names[key]] for key in keys}

        shapes = {key: outline[name] for key, name in names.items()}
        _write_weights(folder, shapes, read_keys, shard_size)
    else:  # files hold other tensors, computed from the model's
        computed = revert_weight_conversion(bare.model, read(list(outline)))
        _write_weights(
            folder,
            computed,
            lambda keys: {key: computed[key].contiguous() for key in keys},
            shard_size,
        )

    options = json.loads(config.hf_config or "{}")
    options.pop("torch_dtype", None)  # the former name of dtype
    options["architectures"] = [type(bare.model).__name__]
    options["dtype"] = str(_dtype_of(checkpoint, next(iter(specs)))).removeprefix("torch.")
    _write_json(folder / "config.json", options)
    kept = hf_files(checkpoint.path, HF_PREFIX)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    if "generation_config.json" not in kept and bare.model.can_generate():
        # From the config that training was given: the bare model's config has the cache disabled.
        described = transformers.AutoConfig.for_model(**json.loads(config.hf_config))
        transformers.GenerationConfig.from_model_config(described).save_pretrained(folder)
    kind = manifest["config"]["data"]["tokenizer_type"]
    tokenizer = tokenizer_in(checkpoint.path, manifest, kind)
    if tokenizer is not None and not kept.keys() - {"generation_config.json"}:
        write_tokenizer(folder, tokenizer, config.positions or 10**30)


def _saved(bare: Bare) -> set[str]:
    """Names in a model's state that save_pretrained writes: one for each group of tied tensors."""
    ignored = set(bare.model._keys_to_ignore_on_save or ())  # as in transformers 5.23
    tied = bare.model.all_tied_weights_keys
    by_first: dict[str, list[str]] = {}
    for name in bare.state:
        by_first.setdefault(bare.first.get(name, name), []).append(name)
    kept = set()
    for names in by_first.values():
        sources = [name for name in names if name not in tied] or names
        kept.add(sources[0])
    return kept - ignored


def _dtype_of(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The dtype of a parameter in the checkpoint."""
    dtype: torch.dtype = getattr(torch, checkpoint.manifest["tensors"][f"model.{name}"]["dtype"])
    return dtype


def _write_weights(
    folder: Path,
    outline: Mapping[str, Tensor],
    read: Callable[[list[str]], Weights],
    shard_size: str,
) -> None:
    """Write safetensors, and an index if there are several. outline: the tensors, which may be on
    meta, by their keys in files. read: makes those of some keys."""
    split = split_torch_state_dict_into_shards(dict(outline), max_shard_size=shard_size)
    for name, keys in split.filename_to_tensors.items():
        file = folder / name
        try:
            save_file(read(keys), file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{file}: {reason(error)}") from error
        file.chmod(0o644)  # like every other file; the library makes it readable by its owner only
    if split.is_sharded:
        _write_json(
            folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        )


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True)
    file.write_text(f"{text}\n", encoding="utf-8")
