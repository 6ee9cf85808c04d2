"""What a conversion knows of one kind of model: tables, which drive both directions.

Their names are written without the prefix that some files have. `{n}` is the number of a layer.
Nothing here needs torch: a configuration is checked before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """How one parameter of this project becomes tensors of theirs, and back, bit for bit.

    to_theirs: of the whole parameter. to_ours: of their tensors and the parameter's shape.
    """

    to_theirs: Callable[[Tensor], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Row:
    """A parameter of this project, and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform


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
    """A number of their configuration and the field of ModelConfig that is the same."""

    theirs: str
    ours: str
    default: int | float  # where the configuration has none


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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model; model_type: its name in a config.json. prefix: of names in some files.

    auto_class: of transformers, which loads what was exported.
    """

    model_type: str
    prefix: str
    auto_class: str
    rows: tuple[Row, ...]
    spares: tuple[Spare, ...]
    settings: tuple[Setting, ...]
    options: tuple[Option, ...]
