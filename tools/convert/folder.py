"""A folder in HuggingFace's format: where it is, and whether this project has such a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import one_step, step_folders
from megatron.checkpoint.resume import FOREIGN
from megatron.config.model import BESIDE, ModelConfig, beside
from megatron.errors import flag
from megatron.huggingface.config import FETCHED
from tools.convert.families import FAMILIES
from tools.convert.table import Choice, Family, Setting
from tools.convert.tokenizing import any_of

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"


@dataclass(frozen=True)
class Description:
    """The contents of a folder's config.json."""

    family: Family
    section: ModelConfig
    vocab_size: int


def find_folder(name: str) -> Path:
    """The folder `name`, or the folder of the hub's model of this name, which is downloaded.

    Raises FileNotFoundError if it is neither, OSError if the download fails.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or not re.fullmatch(_HUB_NAME, name):
        raise FileNotFoundError(
            f"--from {name} is no folder; one with config.json and model.safetensors, or the name "
            "of a model on the hub such as gpt2, would work"
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FETCHED)))
    except Exception as error:  # it does not export the error classes of its HTTP client
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(
            f"--from {name} is no folder here, and the hub did not give a model of this name "
            f"({lines[0]}); a folder with config.json and model.safetensors works without a network"
        ) from error


def split_folder(folder: Path, has_tokenizer: bool) -> tuple[dict[str, bytes], list[str]]:
    """({name: content} of the files that a checkpoint keeps in addition to the weights, names of
    the other files). has_tokenizer: whether the files of the tokenizer are kept."""
    names = ("config.json", *(BESIDE if has_tokenizer else BESIDE[:1]))
    kept = beside(folder, names=names)
    # `others` includes files of weights in other formats, which are not read.
    read = [each for each in FETCHED if "safetensors" in each]
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
    return describe(read_object(file), file)


def describe(config: Mapping[str, Any], file: Path) -> Description:
    """Like read_description. config: the contents of the file."""
    family = _family(config, file)
    numbers = {row.theirs: _number(config, row, file) for row in family.settings}
    _check_options(config, family, numbers, file)
    fields: dict[str, Any] = {row.ours: numbers[row.theirs] for row in family.settings}
    fields |= {choice.ours: _chosen(config, choice, file) for choice in family.choices}
    if family.nested is not None:
        try:
            fields |= family.nested.to_ours(config)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    if family.has_labels:
        fields["labels"] = _labels(config, file)
    return Description(family, _section(family, fields, file), _vocab_size(config, file))


def _family(config: Mapping[str, Any], file: Path) -> Family:
    """The family of the configuration; of several, the first if no class is named."""
    kind = config.get("model_type")
    families = [family for family in FAMILIES if family.model_type == kind]
    if not families:
        known = dict.fromkeys(family.model_type for family in FAMILIES)
        raise ValueError(f"{file}: model_type is {_show(kind)}; {any_of(known)} would work")
    named = config.get("architectures")
    if named is None:
        return families[0]
    for family in families:
        if named in [[each] for each in family.architectures]:
            return family
    here = " or ".join(family.here for family in families)
    classes = [[family.architectures[0]] for family in families] + [None]
    raise ValueError(
        f"{file}: architectures is {_show(named)}; this project has {here}: "
        f"{any_of(classes)} would work"
    )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError or FileNotFoundError that names the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; {_what_would_work(file.parent)}")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} should be a JSON object")
    return content


def _what_would_work(folder: Path) -> str:
    """For messages: a command or folder that works in place of one not in HuggingFace's format."""
    if one_step(folder) or step_folders(folder):
        return f"{folder} is a checkpoint of this project already: --load {folder} would work"
    for name in ("latest_checkpointed_iteration.txt", ".metadata"):
        if (folder / name).is_file():
            return f"python tools/{FOREIGN[name]} --from {folder} would work"
    return "--from should be a folder that has one"


def _vocab_size(config: Mapping[str, Any], file: Path) -> int:
    size = config.get("vocab_size")
    if type(size) is not int:
        raise ValueError(f"{file}: vocab_size is {_show(size)}, and should be a whole number")
    return size


def _number(config: Mapping[str, Any], row: Setting, file: Path) -> int | float | None:
    value = config.get(row.theirs, row.default)
    if value is None and row.default is None:
        return None
    kinds = (int, float) if isinstance(row.default, float) else (int,)
    if type(value) not in kinds:
        wanted = "a whole number" if len(kinds) == 1 else "a number"
        raise ValueError(f"{file}: {row.theirs} is {_show(value)}, and should be {wanted}")
    return kinds[-1](value)


def _check_options(
    config: Mapping[str, Any], family: Family, numbers: Mapping[str, Any], file: Path
) -> None:
    for option in family.options:
        allowed = option.allowed(numbers)
        value = config.get(option.theirs, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise ValueError(
                f"{file}: {option.theirs} is {_show(value)}; this project has {option.here}, "
                f"{any_of(allowed)}: this model cannot be converted"
            )


def _chosen(config: Mapping[str, Any], choice: Choice, file: Path) -> Any:
    """The value of our field for this option of theirs."""
    value = config.get(choice.theirs, next(iter(choice.values)))
    for theirs, ours in choice.values.items():
        if type(value) is type(theirs) and value == theirs:
            return ours
    raise ValueError(
        f"{file}: {choice.theirs} is {_show(value)}; {any_of(list(choice.values))} would work"
    )


def _labels(config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    """Names of the classes; by default those of transformers."""
    names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    try:
        labels = tuple(names[str(number)] for number in range(len(names)))
    except (KeyError, TypeError):
        labels = ()
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ValueError(
            f'{file}: id2label is {_show(names)}, and should be {{"0": "a name", "1": ...}}'
        )
    return labels


def _section(family: Family, fields: Mapping[str, Any], file: Path) -> ModelConfig:
    try:
        section = family.section_of(fields)
    except ValueError as error:
        said, nested = str(error), family.nested.names if family.nested is not None else {}
        for ours, theirs in [*((row.ours, row.theirs) for row in family.settings), *nested.items()]:
            said = said.replace(flag(ours), theirs)
        raise ValueError(f"{file} is no model of this project: {said}") from error
    for row in family.settings:  # drop a number that equals the default of our field
        if row.meaning:
            without = replace(section, **{row.ours: None})
            if getattr(without, row.meaning) == fields[row.ours]:
                section = without
    return section


def _show(value: Any) -> str:
    return json.dumps(value)
