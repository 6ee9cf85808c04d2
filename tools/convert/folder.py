"""A folder in HuggingFace's format: where it is, and whether this project has such a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint.format import one_step, step_folders
from megatron.checkpoint.resume import FOREIGN
from megatron.config.model import HF_FILES, ModelConfig, ViTConfig, hf_files
from megatron.errors import UsageError
from megatron.models.hf_folder import FETCHED, fetch
from megatron.models.registry import KINDS
from tools.convert.table import Family, any_of, json_object
from tools.convert.vit import PREPROCESSOR, with_colors

FAMILIES: tuple[Family, ...] = tuple(
    family
    for kind in KINDS.values()
    for family in (resolve_name(kind.conversion) if kind.conversion else ())
)
"""All kinds of model that are converted. If several have the same name in a config.json, the class
that saved it decides; if none is named, the first of them is taken."""

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"


@dataclass(frozen=True)
class Description:
    """The contents of a folder's config.json."""

    family: Family
    config: ModelConfig
    vocab_size: int


def family_of(config: ModelConfig) -> Family:
    """The family of our model with this config."""
    (family,) = (
        family
        for family in FAMILIES
        if family.config is type(config) and family.fields.items() <= vars(config).items()
    )
    return family


def find_folder(name: str) -> Path:
    """The folder `name`, or the folder of the hub's model of this name, which is downloaded. Raises
    UsageError if it is neither, or the hub does not give it."""
    path = Path(name)
    if not path.is_dir() and (path.exists() or not re.fullmatch(_HUB_NAME, name)):
        allowed = (
            "a folder with config.json and model.safetensors, or a name on the hub such as gpt2"
        )
        raise UsageError("--from", name, allowed)
    try:
        return fetch(name)
    except UsageError as error:
        raise error.about("--from", name) from error


def split_folder(folder: Path, has_tokenizer: bool) -> tuple[dict[str, bytes], list[str]]:
    """({name: content} of the files that a checkpoint keeps in addition to the weights, names of
    the other files). has_tokenizer: whether the files of the tokenizer are kept."""
    names = ("config.json", *(HF_FILES if has_tokenizer else HF_FILES[:1]))
    kept = hf_files(folder, names=names)
    # `others` includes files of weights in other formats, which are not read.
    read = [each for each in FETCHED if "safetensors" in each or each == PREPROCESSOR]
    others = (
        each.name
        for each in folder.iterdir()
        if each.name not in kept and not any(map(each.match, read)) and each.name[0] != "."
    )
    return kept, sorted(others)


def read_description(folder: Path) -> Description:
    """Description of the folder's model. Raises ValueError or OSError, naming the file and the
    option, if this project has no such model."""
    file = folder / "config.json"
    found = describe(read_object(file), file)
    if isinstance(found.config, ViTConfig):
        return replace(found, config=with_colors(found.config, folder))
    return found


def describe(options: Mapping[str, Any], file: Path) -> Description:
    """Like read_description. options: the contents of the file."""
    try:
        family = _family(options)
        config, vocab_size = family.config_of(options), options.get("vocab_size")
        if isinstance(config, ViTConfig):
            vocab_size = len(config.class_names)
        if type(vocab_size) is not int:
            raise UsageError("vocab_size", json.dumps(vocab_size), "a whole number")
        return Description(family, config, vocab_size)
    except UsageError as error:
        raise error.about(f"{file}: {error.flag}", error.value) from error


def _family(options: Mapping[str, Any]) -> Family:
    """The family of a configuration; of several, the first if no class is named."""
    kind = options.get("model_type")
    families = [family for family in FAMILIES if family.model_type == kind]
    if not families:
        known = dict.fromkeys(family.model_type for family in FAMILIES)
        raise UsageError("model_type", json.dumps(kind), any_of(known))
    named = options.get("architectures")
    if named is None:
        return families[0]
    for family in families:
        if named in [[each] for each in family.architectures]:
            return family
    classes = [[family.architectures[0]] for family in families]
    raise UsageError("architectures", json.dumps(named), any_of([*classes, None]))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError or FileNotFoundError that names the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; {_what_would_work(file.parent)}")
    return json_object(file)


def _what_would_work(folder: Path) -> str:
    """For messages: a command or folder that works in place of one not in HuggingFace's format."""
    if one_step(folder) or step_folders(folder):
        return f"{folder} is a checkpoint of this project already: --load {folder} would work"
    for name in ("latest_checkpointed_iteration.txt", ".metadata"):
        if (folder / name).is_file():
            return f"python tools/{FOREIGN[name]} --from {folder} would work"
    return "--from should be a folder that has one"
