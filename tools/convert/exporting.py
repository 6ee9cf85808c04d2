"""Writes a checkpoint's model as a folder that transformers loads, without the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.save import reason
from megatron.config.model import KEPT, ModelConfig, beside
from megatron.data.tokenizer import Tokenizer
from megatron.errors import flag
from megatron.models.registry import KINDS, config_of
from megatron.parallel.sharding import TensorSlice
from tools.convert.folder import describe
from tools.convert.table import Family
from tools.convert.tokenizing import any_of
from tools.convert.weights import Entry, Weights, resolve, to_theirs


def write_model(
    folder: Path,
    checkpoint: Checkpoint,
    family: Family,
    tokenizer: Tokenizer,
) -> None:
    """Write configuration and weights, the latter in the checkpoint's dtype.

    checkpoint: already verified to be whole. Raises ValueError for a checkpoint of another model,
    OSError if a file cannot be written.
    """
    manifest = checkpoint.manifest
    section = config_of(manifest)
    values = _config_values(family, section, checkpoint.path)
    entries = resolve(family, section, manifest["vocab_size"])
    weights = _read_parameters(checkpoint, entries)
    (dtype,) = {weight.dtype for weight in weights.values()}
    if family.has_labels:
        labels = asdict(section)["labels"]
        values["id2label"] = dict(enumerate(labels))
        values["label2id"] = {label: number for number, label in enumerate(labels)}
    values |= {"architectures": [family.architectures[0]], "vocab_size": manifest["vocab_size"]}
    values["dtype"] = str(dtype).removeprefix("torch.")
    if kept := beside(checkpoint.path, KEPT, ["config.json"]):
        config = _changed(json.loads(kept["config.json"]), family, values, checkpoint.path)
        text = json.dumps(config, indent=2, sort_keys=True)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    else:
        special = {name: getattr(tokenizer, each) for name, each in family.special.items()}
        described = transformers.AutoConfig.for_model(family.model_type, **values, **special)
        described.save_pretrained(folder)
        if KINDS[section.kind].writes_text:
            transformers.GenerationConfig(**special).save_pretrained(folder)
    try:
        huggingface_hub.save_torch_state_dict(to_theirs(family, entries, weights), folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: {reason(error)}") from error
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # like every other file; the library makes it readable by its owner only


def _changed(
    config: dict[str, Any], family: Family, values: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """The imported config.json, updated with those of `values` that it does not already state."""
    then = _config_values(family, describe(config, path).section, path)
    names = {"dtype": "torch_dtype"} if "dtype" not in config and "torch_dtype" in config else {}
    said = {names.get(name, name): value for name, value in values.items()}
    changes = {n: value for n, value in said.items() if then.get(n, config.get(n)) != value}
    for option in family.options:
        allowed = option.allowed(values)
        if config.get(option.theirs, allowed[0]) not in allowed:
            changes[option.theirs] = allowed[0]
    if family.nested is not None and family.nested.theirs in changes:
        config = {name: config[name] for name in config.keys() - family.nested.older}
    return config | changes


def _read_parameters(checkpoint: Checkpoint, entries: Iterable[Entry]) -> Weights:
    """Every parameter, whole. The optimizer's tensors are not read."""
    saved = {
        key.removeprefix("model."): getattr(torch, tensor["dtype"])
        for key, tensor in checkpoint.manifest["tensors"].items()
        if key.startswith("model.")
    }
    layouts = {entry.ours: entry.spec for entry in entries}
    if strange := sorted(saved.keys() ^ layouts.keys()):
        raise ValueError(
            f"{checkpoint.path}: {strange[0]} is in the checkpoint or in the model, but not in both"
        )
    if len(dtypes := set(saved.values())) > 1:
        raise ValueError(
            f"{checkpoint.path} has weights of several dtypes: {sorted(map(str, dtypes))}"
        )
    pieces = [
        TensorSlice(f"model.{name}", spec, torch.empty(spec.shape, dtype=saved[name]))
        for name, spec in layouts.items()
    ]
    load_checkpoint(checkpoint, pieces)
    return {name: piece.local for name, piece in zip(layouts, pieces, strict=True)}


def _config_values(family: Family, section: ModelConfig, path: Path) -> dict[str, Any]:
    """The options of their configuration that describe the model. Raises ValueError, naming the
    checkpoint, if it cannot express the model."""
    fields, values = asdict(section), dict[str, Any]()

    def refuse(ours: str, known: str) -> ValueError:
        value, model = fields[ours], family.architectures[0]
        return ValueError(f"{path}: {flag(ours)} is {value}; {model} of transformers has {known}")

    for row in family.settings:
        value = getattr(section, row.meaning) if row.meaning else fields[row.ours]
        if values.setdefault(row.theirs, value) != value:
            raise refuse(row.ours, f"one {row.theirs}, here {values[row.theirs]}")
    for choice in family.choices:
        found = [theirs for theirs, ours in choice.values.items() if ours == fields[choice.ours]]
        if not found:
            raise refuse(choice.ours, any_of(list(choice.values.values())))
        values[choice.theirs] = found[0]
    if family.nested is not None:
        values |= family.nested.to_theirs(fields)
    forms = {option.theirs: option.allowed(values)[0] for option in family.options}
    return values | {name: form for name, form in forms.items() if form is not None}
