"""Tables that describe how one kind of model is converted, in both directions.

Names of theirs are written without the prefix that some files have. `{n}` is the number of a layer.
Nothing here needs torch: a configuration is checked before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.config.model import ModelConfig
from megatron.errors import UsageError, flag

Tensor = Any  # torch's, which is not imported here


@dataclass(frozen=True)
class Transform:
    """Turns one parameter of this project into tensors of theirs, and back, bit for bit.

    to_theirs: takes the whole parameter. to_ours: takes their tensors and the parameter's shape.
    """

    to_theirs: Callable[[Tensor], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]


def _stack(theirs: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.stack(list(theirs))


AS_IS = Transform(lambda ours: (ours,), lambda theirs, shape: theirs[0])
# Several tensors of theirs form one of ours; cloned, as safetensors refuses tensors sharing memory.
APART = Transform(lambda ours: [part.clone() for part in ours], _stack)


@dataclass(frozen=True)
class Row:
    """A parameter of this project, and the tensors of theirs that hold the same numbers.

    is_optional: True if only some models have it.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = AS_IS
    is_optional: bool = False


def both(ours: str, theirs: str, of_weight: Transform = AS_IS) -> tuple[Row, Row]:
    """Rows for the weight and bias of a module."""
    weight = Row(f"{ours}.weight", (f"{theirs}.weight",), of_weight)
    return weight, Row(f"{ours}.bias", (f"{theirs}.bias",))


IsRedundant = Callable[[Tensor, Mapping[str, Tensor]], bool]
"""Whether a tensor says nothing new beside all tensors, by name."""


def same_as(name: str) -> IsRedundant:
    """Whether a tensor equals that of this name bit for bit, and in dtype and shape."""

    def is_same(tensor: Tensor, tensors: Mapping[str, Tensor]) -> bool:
        import torch

        other = tensors[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return False
        return tensor.view(torch.uint8).equal(other.view(torch.uint8))

    return is_same


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError that names the file."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} should be a JSON object")
    return content


def any_of(values: Iterable[Any]) -> str:
    """For messages: values of JSON, one of which would work."""
    return " or ".join(map(json.dumps, values))


Values = Mapping[Any, Any]


@dataclass(frozen=True)
class Key:
    """An option of their configuration, and the field of our config that means the same.

    theirs: its name. ours: the field; "" for an option that this project has in one form only.
    values: theirs to ours, or a function from our fields to these. The first is the default of a
    configuration without the option; of several with one meaning an export writes the first, and
    leaves out a None. Without values: any number of the type of `default`.
    implied: the property of our config with the value that a field of None stands for, if their
    configuration cannot hold a None. older: options of older files that this one replaces.
    """

    theirs: str
    ours: str = ""
    values: Values | Callable[[Mapping[str, Any]], Values] | None = None
    default: float | None = None
    implied: str = ""
    older: tuple[str, ...] = ()

    def allowed(self, fields: Mapping[str, Any]) -> Values | None:
        return self.values(fields) if callable(self.values) else self.values

    def to_ours(self, options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Our field, from a whole configuration of theirs. fields: those of the previous rows.
        Raises UsageError, naming the option, for a value that this project does not support."""
        values = self.allowed(fields)
        if values is None:
            value = options.get(self.theirs, self.default)
            return {self.ours: number(self.theirs, value, self.default)}
        value = options.get(self.theirs, next(iter(values)))
        for theirs, ours in values.items():
            if value == theirs:
                return {self.ours: ours} if self.ours else {}
        raise UsageError(self.theirs, json.dumps(value), f"{any_of(values)} for this project")

    def to_theirs(self, config: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        """Their option, from our config. options: those of the previous rows. Raises UsageError,
        naming our flag, for a value that transformers does not support."""
        value = getattr(config, self.implied or self.ours) if self.ours else None
        values = self.allowed(asdict(config))
        if values is None:
            if options.get(self.theirs, value) != value:
                allowed = f"{options[self.theirs]}, as transformers has one {self.theirs}"
                raise UsageError(flag(self.ours), value, allowed)
            return {self.theirs: value}
        matching = [theirs for theirs, ours in values.items() if ours == value]
        if not matching:
            allowed = f"{any_of(values.values())} for a model of transformers"
            raise UsageError(flag(self.ours), value, allowed)
        return {} if matching[0] is None else {self.theirs: matching[0]}


def number(name: str, value: Any, default: float | None) -> Any:
    """The value of this option, of the type of its default; UsageError for one of another type."""
    if value is None and default is None:
        return None
    if isinstance(default, float) and type(value) in (int, float):
        return float(value)
    if not isinstance(default, float) and type(value) is int:
        return value
    allowed = "a number" if isinstance(default, float) else "a whole number"
    raise UsageError(name, json.dumps(value), allowed)


def only(theirs: str, *values: Any) -> Key:
    """An option that this project has in one form only, which these values mean."""
    return Key(theirs, values=dict.fromkeys(values))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model. model_type: its name in a config.json."""

    model_type: str

    architectures: tuple[str, ...]
    """Classes of transformers that save such weights; an export names the first."""

    auto_class: str
    """The class of transformers that loads an export."""

    config: type[ModelConfig]
    """Our config class for such a model. `fields`: its values that all models of the kind share."""

    fields: Mapping[str, Any] = field(default_factory=dict)

    rows: tuple[Row, ...]
    keys: tuple[Key, ...]

    spares: Mapping[str, IsRedundant] = field(default_factory=dict)
    """Redundant tensors that some files have in addition to the weights."""

    prefix: str
    """Prefix of names in some files and in every export. `bare`: beginnings of names without it."""

    bare: tuple[str, ...]

    old: Mapping[str, str] = field(default_factory=dict)
    """Ends of names in old files, and their replacements."""

    tokenizers: tuple[str, ...] = ()
    """Values of --tokenizer-type for such a model; the first is the default. Empty for a model of
    images."""

    special: Mapping[str, str] = field(default_factory=dict)
    """Token ids that a configuration repeats, and the tokenizer's attributes with these ids."""

    def name_of(self, key: str) -> str:
        """The name in this table of the tensor `key` of a file."""
        name = key.removeprefix(self.prefix)
        for end, today in self.old.items():
            if name.endswith(end):
                return name.removesuffix(end) + today
        return name

    def key_of(self, name: str) -> str:
        """The name in an export of the tensor `name` of the table."""
        return name if name.startswith(self.bare) else self.prefix + name

    def config_of(self, options: Mapping[str, Any]) -> ModelConfig:
        """Our config of the model with this configuration of theirs. Raises UsageError, naming the
        option, if this project has no such model."""
        fields: dict[str, Any] = {}
        for key in self.keys:
            fields |= key.to_ours(options, fields)
        try:
            config = self.config(**self.fields, **fields)
        except UsageError as error:
            names = {flag(key.ours): key.theirs for key in self.keys if key.ours}
            name = names.get(error.flag, error.flag)
            raise error.about(name, error.value) from error
        for key in self.keys:  # a number that equals the default of our field is left to it
            if key.implied:
                without = replace(config, **{key.ours: None})
                if getattr(without, key.implied) == fields[key.ours]:
                    config = without
        return config

    def options_of(self, config: ModelConfig) -> dict[str, Any]:
        """The options of their configuration that describe our model. Raises UsageError, naming our
        flag, if they cannot."""
        options: dict[str, Any] = {}
        for key in self.keys:
            options |= key.to_theirs(config, options)
        return options
