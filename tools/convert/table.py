"""Tables that describe how one kind of model is converted, in both directions.

Names of theirs are written without the prefix that some files have. `{n}` is the number of a layer.
Nothing here needs torch: a configuration is checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config.model import ModelConfig
from tools.convert.tokenizing import Tokenizing

if TYPE_CHECKING:
    from torch import Tensor


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
    transform: Transform
    is_optional: bool = False


@dataclass(frozen=True)
class Spare:
    """A redundant tensor that some files have in addition to the weights.

    is_spare: whether it is redundant, given the tensor and all tensors by name. otherwise: for the
    message, what is wrong with one that is not redundant.
    """

    theirs: str
    is_spare: Callable[[Tensor, Mapping[str, Tensor]], bool]
    otherwise: str


@dataclass(frozen=True)
class Setting:
    """A number in their configuration and the equivalent field of ModelConfig.

    default: used if the configuration has none. meaning: the property of ModelConfig with the value
    that a field of None stands for; given if their configuration cannot hold a None.
    """

    theirs: str
    ours: str
    default: int | float | None
    meaning: str = ""


@dataclass(frozen=True)
class Choice:
    """An option of theirs and the equivalent field of ModelConfig.

    values: theirs to ours. The first is the default of a configuration without the option. If
    several have the same meaning, an export writes the first of them.
    """

    theirs: str
    ours: str
    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Nested:
    """Options of theirs nested inside another one, `theirs`, and the equivalent fields of
    ModelConfig.

    older: options of older files with the same meaning, which take precedence. names: field to its
    name in messages. to_ours: maps the whole configuration to values of the fields; raises
    ValueError that names the option. to_theirs: maps all fields to options.
    """

    theirs: str
    older: frozenset[str]
    names: Mapping[str, str]
    to_ours: Callable[[Mapping[str, Any]], dict[str, Any]]
    to_theirs: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Option:
    """An option of theirs that this project supports in one form only.

    allowed: maps the numbers of the configuration to the values that mean this form; the first is
    written by an export, and is the default of an absent option. here: for the message, what this
    project has.
    """

    theirs: str
    allowed: Callable[[Mapping[str, Any]], Sequence[Any]]
    here: str


def always(*values: Any) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """An `allowed` for Option that does not depend on the numbers."""
    return lambda numbers: values


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether the two are equal bit for bit, and in dtype and shape."""
    import torch

    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return tensor.view(torch.uint8).equal(other.view(torch.uint8))


@dataclass(frozen=True)
class Lacking:
    """Tensors, by the beginnings of their names, that are absent from files of some classes.

    because: for the message, after "has no tensor ..., ".
    """

    theirs: tuple[str, ...]
    because: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model. model_type: its name in a config.json."""

    model_type: str

    architectures: tuple[str, ...]
    """Classes of transformers that save such weights; an export names the first."""

    here: str
    """For messages, what this project has."""

    auto_class: str
    """The class of transformers that loads an export."""

    section: type[ModelConfig]
    """Our config class for such a model. `fields`: its values that all models of the kind share."""

    fields: Mapping[str, Any]

    rows: tuple[Row, ...]
    spares: tuple[Spare, ...]
    settings: tuple[Setting, ...]
    options: tuple[Option, ...]
    choices: tuple[Choice, ...] = ()
    nested: Nested | None = None
    lacking: Lacking | None = None

    prefix: str
    """Prefix of names in some files and in every export. `bare`: beginnings of names without it."""

    bare: tuple[str, ...] = ()

    old: Mapping[str, str]
    """Ends of names in old files, and their replacements."""

    tokenizing: Tokenizing

    special: Mapping[str, str]
    """Token ids that a configuration repeats, and the tokenizer's attributes with these ids."""

    @property
    def has_labels(self) -> bool:
        """Whether its configuration names classes."""
        return self.fields.get("head") == "classifier"

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

    def section_of(self, fields: Mapping[str, Any]) -> ModelConfig:
        """The config with these fields; raises ValueError if there is no such model."""
        return self.section(**self.fields, **fields)
