"""What tools train, or plan, of a kind of model, and on which samples; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.config.checks import UsageError
from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Samples
from megatron.models.registry import KINDS, find_kind
from megatron.train.inputs import vocabulary_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """config: of pretraining, cut as the layout says. folder: of gradients and weights that the
    reference writes and the others read."""

    config: PretrainConfig
    ranks: int
    precision: str
    steps: int
    folder: Path
    is_reference: bool


def kind_of(arguments: Sequence[str]) -> str:
    """Of model: that of --kind, or what the name of a preset says."""
    given: dict[str, str] = {}
    for name, value in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, has_value, own = name.partition("=")
        given[flag] = given.get(flag, "") + (own if has_value else value)
    preset = Path(given.get("--preset", "")).name
    return given.get("--kind") or next((kind for kind in KINDS if kind in preset), "gpt2")


def program_of(arguments: Sequence[str], **configs: type) -> type:
    """The settings of pretraining a model of this kind, with further configs, or others in their
    place. Raises UsageError for a kind that is not pretrained."""
    name = kind_of(arguments)
    kind = find_kind(name, "--kind")
    if kind.program is None:
        raise UsageError("--kind", name, "a kind of model that is pretrained")
    bases = (resolve_name(kind.program),)
    return make_dataclass("Settings", configs.items(), bases=bases, frozen=True, kw_only=True)


def of_pretraining(config: Any) -> PretrainConfig:
    """The settings of a `program_of` without the further configs, which can go to processes."""
    base = type(config).__base__
    return base(**{each.name: getattr(config, each.name) for each in fields(base)})


def open_samples(config: PretrainConfig) -> tuple[Samples, int]:
    """(the samples that a training of this config reads, size of their vocabulary)."""
    kind = find_kind(config.model.kind)
    if config.data.data_path:
        inputs = resolve_name(str(kind.inputs))(config)
        return inputs.train, inputs.corpus.vocab_size
    return resolve_name(kind.samples)(config), vocabulary_of(config)
