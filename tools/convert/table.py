"""What a conversion knows of one kind of model: tables, which drive both directions.

Their names are written without the prefix that some files have. `{n}` is the number of a layer.
Nothing here needs torch: a configuration is checked before it comes.
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
    """How one parameter of this project becomes tensors of theirs, and back, bit for bit.

    to_theirs: of the whole parameter. to_ours: of their tensors and the parameter's shape.
    """

    to_theirs: Callable[[Tensor], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]


def _stack(theirs: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.stack(list(theirs))


AS_IS = Transform(lambda ours: (ours,), lambda theirs, shape: theirs[0])
# Several tensors of theirs are one of ours; copies, for safetensors writes no two of one memory.
APART = Transform(lambda ours: [part.clone() for part in ours], _stack)


@dataclass(frozen=True)
class Row:
    """A parameter of this project, and the tensors of theirs that hold the same numbers.

    is_optional: whether only some models have it.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    is_optional: bool = False


@dataclass(frozen=True)
class Spare:
    """A tensor that some files have beside the weights, and which says nothing new.

    is_spare: of the tensor and of all tensors by name. otherwise: for the message, what is wrong
    with one that does say something.
    """

    theirs: str
    is_spare: Callable[[Tensor, Mapping[str, Tensor]], bool]
    otherwise: str


@dataclass(frozen=True)
class Setting:
    """A number of their configuration and the field of ModelConfig that is the same.

    default: where the configuration has none. meaning: the property of ModelConfig that says what a
    field of None means, where their configuration cannot hold a None.
    """

    theirs: str
    ours: str
    default: int | float | None
    meaning: str = ""


@dataclass(frozen=True)
class Choice:
    """An option of theirs and the field of ModelConfig that is the same.

    values: theirs to ours. The first is what a configuration without the option means, and of
    several with one meaning the first is what an export says.
    """

    theirs: str
    ours: str
    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Nested:
    """Options of theirs inside another one, `theirs`, and the fields of ModelConfig that are the
    same.

    older: options that say the same, and go before. names: of the fields, and what messages call
    them. to_ours: from the whole configuration to values of the fields; raises ValueError that
    names the option. to_theirs: from all fields to options.
    """

    theirs: str
    older: frozenset[str]
    names: Mapping[str, str]
    to_ours: Callable[[Mapping[str, Any]], dict[str, Any]]
    to_theirs: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Option:
    """An option of theirs that this project has in one form alone.

    allowed: the values that mean this form, for the numbers of the configuration; the first is what
    an export says, and what one that is not there means. here: for the message, what this project
    has.
    """

    theirs: str
    allowed: Callable[[Mapping[str, Any]], Sequence[Any]]
    here: str


def always(*values: Any) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """What an option allows, whatever the numbers."""
    return lambda numbers: values


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether the two are equal bit for bit, in dtype and shape too."""
    import torch

    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return tensor.view(torch.uint8).equal(other.view(torch.uint8))


@dataclass(frozen=True)
class Lacking:
    """Tensors, by the beginnings of their names, that files of some classes are without.

    because: for the message, after "has no tensor ..., ".
    """

    theirs: tuple[str, ...]
    because: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model. model_type: its name in a config.json."""

    model_type: str

    architectures: tuple[str, ...]
    """Classes of transformers that save such weights; the first is what an export says."""

    here: str
    """For messages, what this project has."""

    auto_class: str
    """Of transformers, which loads what was exported."""

    section: type[ModelConfig]
    """Describes such a model here, with these values in `fields`."""

    fields: Mapping[str, Any]

    rows: tuple[Row, ...]
    spares: tuple[Spare, ...]
    settings: tuple[Setting, ...]
    options: tuple[Option, ...]
    choices: tuple[Choice, ...] = ()
    nested: Nested | None = None
    lacking: Lacking | None = None

    prefix: str
    """Of names in some files, and in every export; `bare`: beginnings of names that have none."""

    bare: tuple[str, ...] = ()

    old: Mapping[str, str]
    """Ends of names in old files, and what they became."""

    tokenizing: Tokenizing

    special: Mapping[str, str]
    """Ids that a configuration repeats, and the attributes of the tokenizer."""

    @property
    def has_labels(self) -> bool:
        """Whether its configuration names classes."""
        return self.fields.get("head") == "classifier"

    def name_of(self, key: str) -> str:
        """The name in this table of a tensor that a file calls `key`."""
        name = key.removeprefix(self.prefix)
        for end, today in self.old.items():
            if name.endswith(end):
                return name.removesuffix(end) + today
        return name

    def key_of(self, name: str) -> str:
        """What an export calls the tensor of this name in the table."""
        return name if name.startswith(self.bare) else self.prefix + name

    def section_of(self, fields: Mapping[str, Any]) -> ModelConfig:
        """What describes the model of these fields; ValueError where there is no such model."""
        return self.section(**self.fields, **fields)
