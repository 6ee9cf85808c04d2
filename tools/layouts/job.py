"""Configs and samples with which tools train, or plan, a kind of model; needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

from megatron.config.presets import kind_of_presets
from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Samples
from megatron.errors import UsageError
from megatron.models.registry import KINDS, config_of, find_kind
from megatron.train.inputs import open_inputs, vocabulary_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """config: of pretraining, cut as the layout says. folder: for gradients and weights, which the
    reference writes and the others read."""

    config: PretrainConfig
    ranks: int
    precision: str
    steps: int
    folder: Path
    is_reference: bool


def kind_of(arguments: Sequence[str]) -> str:
    """The kind of model: that of --kind, or of the preset's table [model], or the one in the name
    of the preset, or gpt2."""
    given = defaultdict[str, list[str]](list)
    for name, value in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, has_value, own = name.partition("=")
        given[flag].append(own if has_value else value)
    kinds = given["--kind"]
    with suppress(UsageError):  # raised again when the preset is read
        # With --kind, too: the presets' folders may have its module.
        if (of_preset := kind_of_presets(given["--preset"])) is not None:
            kinds = kinds or [str(of_preset.value)]
    if kinds:
        return kinds[-1]
    names = (name for name, each in KINDS.items() if each.program is not None)
    presets = " ".join(Path(each).name for each in given["--preset"])
    return next((name for name in names if name in presets), "gpt2")


def program_of(arguments: Sequence[str], **configs: type) -> type:
    """The config class of pretraining a model of this kind, with `configs` added, or in place of
    its own. Raises UsageError for a kind that is not pretrained."""
    name = kind_of(arguments)
    kind = find_kind(name, "--kind")
    if kind.program is None:
        raise UsageError("--kind", name, "a kind of model that is pretrained")
    bases = (resolve_name(kind.program),)
    return make_dataclass("Settings", configs.items(), bases=bases, frozen=True, kw_only=True)


def of_pretraining(config: Any) -> PretrainConfig:
    """The config of a `program_of` without the added configs, which can be sent to processes."""
    base = type(config).__base__
    return base(**{each.name: getattr(config, each.name) for each in fields(base)})


def open_samples(config: PretrainConfig) -> tuple[Samples, int]:
    """(samples that a training with this config reads, size of their vocabulary)."""
    kind = find_kind(config.model.kind)
    if config.data.data_path or config.data.dataset:
        inputs = open_inputs(config, kind)
        return inputs.train, inputs.corpus.vocab_size
    return resolve_name(kind.samples)(config), vocabulary_of(config)


def of_checkpoint(manifest: Mapping[str, Any]) -> PretrainConfig:
    """The config of the run that saved a checkpoint, from its manifest. Raises ValueError for a
    checkpoint that no pretraining saved."""
    kind = find_kind(manifest["kind"], "kind")
    parts = {name: part for name, part in manifest["config"].items() if name != "model"}
    if kind.program is None or "training" not in parts:
        raise ValueError("its checkpoint is not one of pretraining")
    program = resolve_name(kind.program)
    hints = get_type_hints(program)
    try:
        return program(
            model=config_of(manifest),
            **{
                name: hints[name](
                    **{key: tuple(v) if isinstance(v, list) else v for key, v in part.items()}
                )
                for name, part in parts.items()
            },
        )
    except (TypeError, KeyError) as error:  # a setting is unknown here
        raise ValueError(
            f"its checkpoint is of another version of this program: {error}"
        ) from error
