"""Writes a checkpoint of an unmodified model of transformers as a folder that transformers loads.

Its weights have the names, shapes and bits that they had in the folder that training started from,
as save_pretrained writes them today.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint, verify
from megatron.checkpoint.save import reason
from megatron.config.model import KEPT, beside
from megatron.data.tokenizer import file_names, read_tokenizer
from megatron.huggingface.config import HuggingFaceConfig
from megatron.huggingface.replacements import Wide
from megatron.huggingface.weights import INDEX, Bare, layout_of
from megatron.models.build import build_on_meta
from megatron.models.registry import config_of
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import TensorSlice, sharding_specs
from megatron.train.evaluate import load_model
from tools.convert.compare import Agreement, agreement, make_prompts
from tools.convert.families import FAMILIES


def write_model(folder: Path, checkpoint: Checkpoint, shard_size: str = "5GB") -> None:
    """Write configuration, weights in the checkpoint's dtype, and tokenizer.

    Memory holds at most one file of shard_size at a time, except for models whose files contain
    values computed from the parameters. Raises OSError if a file cannot be written.
    """
    manifest = checkpoint.manifest
    section = config_of(manifest)
    model = build_on_meta(section, serial_mesh(), manifest["vocab_size"])
    bare = Bare.of(section, model.auto_class)
    table = sharding_specs(model)
    dtypes = {name: _dtype_of(manifest, f"model.{name}") for name in table}

    def read(names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor as transformers has it) of these parameters and buffers."""
        pieces = {}
        for name in names:
            ours = f"model.{bare.first[name]}" if name in bare.first else ""
            if ours:
                local = torch.empty(table[ours].shape, dtype=dtypes[ours])
                pieces[name] = TensorSlice(f"model.{ours}", table[ours], local)
            else:
                yield name, bare.state[name]
        load_checkpoint(checkpoint, pieces.values(), partial=True)
        for name, piece in pieces.items():
            layout = layout_of(model, piece.key.removeprefix("model."))
            yield name, layout.to_original(piece.local).contiguous()

    outline = {
        name: torch.empty(tensor.shape, dtype=dtypes[f"model.{bare.first[name]}"], device="meta")
        if name in bare.first
        else tensor
        for name, tensor in bare.state.items()
        if name in _saved(bare)
    }
    names = _names_in_files(bare, outline)
    if names is None:
        _save(folder, _converted(bare, dict(read(list(outline)))), shard_size)
    else:
        inside = {names[name]: name for name in outline}
        split = split_torch_state_dict_into_shards(
            {names[name]: tensor for name, tensor in outline.items()}, max_shard_size=shard_size
        )
        for file, keys in split.filename_to_tensors.items():
            tensors = {names[name]: tensor for name, tensor in read([inside[key] for key in keys])}
            _write(folder / file, tensors)
        _write_index(folder, split)
    (dtype, *_) = dtypes.values()
    _write_config(folder, bare, section, dtype)
    _write_tokenizer(folder, checkpoint, bare)


def _dtype_of(manifest: Mapping[str, Any], key: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, manifest["tensors"][key]["dtype"])
    return found


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


def _names_in_files(bare: Bare, outline: Mapping[str, Tensor]) -> dict[str, str] | None:
    """{name in the model: name in files}; None if files hold anything but the model's tensors."""
    numbers = {id(tensor): name for name, tensor in outline.items()}
    found = _converted(bare, dict(outline))
    if {id(tensor) for tensor in found.values()} != numbers.keys():
        return None
    return {numbers[id(tensor)]: name for name, tensor in found.items()}


def _converted(bare: Bare, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(bare.model, state)
    return found


def _save(folder: Path, tensors: dict[str, Tensor], shard_size: str) -> None:
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_size)
    for file, keys in split.filename_to_tensors.items():
        _write(folder / file, {key: tensors[key].contiguous() for key in keys})
    _write_index(folder, split)


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {reason(error)}") from error
    file.chmod(0o644)  # like every other file; the library makes it readable by its owner only


def _write_index(folder: Path, split: Any) -> None:
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / INDEX).write_text(f"{text}\n", encoding="utf-8")


def _write_config(folder: Path, bare: Bare, section: HuggingFaceConfig, dtype: torch.dtype) -> None:
    """Write the configuration given to training, with the class and dtype of these weights."""
    described = json.loads(section.hf_config or "{}")
    described.pop("torch_dtype", None)  # the former name of dtype
    described["architectures"] = [type(bare.model).__name__]
    described["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(described, indent=2, sort_keys=True)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _write_tokenizer(folder: Path, checkpoint: Checkpoint, bare: Bare) -> None:
    """Write the files that accompanied the weights, or else the tokenizer of the training data, if
    the checkpoint has it."""
    found = beside(checkpoint.path, KEPT)
    for name, content in found.items():
        (folder / name).write_bytes(content)
    if "generation_config.json" not in found and bare.model.can_generate():
        # From the config that training was given: the bare model's config has the cache disabled.
        described = AutoConfig.for_model(**json.loads(config_of(checkpoint.manifest).hf_config))
        GenerationConfig.from_model_config(described).save_pretrained(folder)
    manifest = checkpoint.manifest
    kind = manifest["config"]["data"]["tokenizer_type"]
    if found.keys() - {"generation_config.json"} or not (
        set(file_names(kind)) <= manifest["files"].keys()
    ):
        return
    tokenizing = next(each.tokenizing for each in FAMILIES if kind in each.tokenizing.known)
    positions = config_of(manifest).positions or 10**30
    tokenizing.write(folder, read_tokenizer(kind, checkpoint.path), positions)


@torch.no_grad()
def compare_model(checkpoint: Path, folder: Path) -> Agreement:
    """Compares the logits of the model at `checkpoint` with those of the model that transformers
    loads from `folder`, in fp64. Raises ValueError if they differ."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    mesh = serial_mesh()
    ours = load_model(verify(checkpoint, mesh), mesh, torch.float64)
    theirs = getattr(transformers, ours.auto_class).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    positions = ours.config.positions or 1024
    prompts = make_prompts(ours.vocab_size, positions, padded=False)
    with Wide():
        found = [
            [model(input_ids=prompt.tokens, use_cache=False).logits for prompt in prompts]
            for model in (ours.model.double(), theirs.eval().double())  # rotary frequencies, too
        ]
    lengths = tuple(prompt.tokens.shape[1] for prompt in prompts)
    return agreement(f"{checkpoint} and {folder}", {"tokens": (found[0], found[1])}, lengths)
