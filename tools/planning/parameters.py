"""Every parameter of a model, and this rank's part of it, by the names they have in the model.

A layer has 12 h^2 + 13 h of them: 4 h in two norms, 3 h^2 + 3 h for queries, keys and values,
h^2 + h behind attention, 4 h^2 + 4 h and 4 h^2 + h in the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.config.model import TOKEN_TYPES
from tools.planning.shape import Shape

ALIGNMENT = 64  # numbers, of this project's buckets


@dataclass(frozen=True)
class Parameter:
    name: str
    whole: int  # numbers, the vocabulary's padding aside
    local: int  # on one rank, padding included
    is_cut: bool  # over tensor-parallel ranks
    decays: bool


@lru_cache
def table(shape: Shape) -> tuple[Parameter, ...]:
    """In the order of the model's named_parameters()."""
    return tuple(_gpt2(shape) if shape.kind == "gpt2" else _bert(shape))


def _gpt2(shape: Shape) -> Iterator[Parameter]:
    h = shape.hidden
    yield _vocabulary(shape, "word_embedding.weight", h)
    yield _kept("position_embedding.weight", shape.positions * h, decays=True)
    yield from _layers(shape, "transformer.")
    yield from _norm("final_norm", h)


def _bert(shape: Shape) -> Iterator[Parameter]:
    h = shape.hidden
    yield _vocabulary(shape, "encoder.word_embedding.weight", h)
    yield _kept("encoder.position_embedding.weight", shape.positions * h, decays=True)
    yield _kept("encoder.token_type_embedding.weight", TOKEN_TYPES * h, decays=True)
    if shape.post_norm:
        yield from _norm("encoder.embedding_norm", h)
    yield from _layers(shape, "encoder.transformer.")
    if not shape.post_norm:
        yield from _norm("encoder.final_norm", h)
    yield from _linear("pooler.dense", h, h)
    yield from _linear("mlm.dense", h, h)
    yield from _norm("mlm.norm", h)
    yield _vocabulary(shape, "mlm.head.bias", 1, decays=False)
    yield from _linear("sop", h, 2)


def _layers(shape: Shape, prefix: str) -> Iterator[Parameter]:
    h, t = shape.hidden, shape.tensor
    for number in range(shape.layers):
        layer = f"{prefix}layers.{number}."
        yield from _norm(f"{layer}attention_norm", h)
        yield from _column(f"{layer}attention.qkv", h, 3 * h, t)
        yield from _row(f"{layer}attention.output", h, h, t)
        yield from _norm(f"{layer}mlp_norm", h)
        yield from _column(f"{layer}mlp.up", h, 4 * h, t)
        yield from _row(f"{layer}mlp.down", 4 * h, h, t)


def _column(name: str, inputs: int, outputs: int, t: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", inputs * outputs, inputs * outputs // t, True, True)
    yield Parameter(f"{name}.bias", outputs, outputs // t, True, False)


def _row(name: str, inputs: int, outputs: int, t: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", inputs * outputs, inputs * outputs // t, True, True)
    yield _kept(f"{name}.bias", outputs)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[Parameter]:
    yield _kept(f"{name}.weight", inputs * outputs, decays=True)
    yield _kept(f"{name}.bias", outputs)


def _norm(name: str, h: int) -> Iterator[Parameter]:
    yield _kept(f"{name}.weight", h)
    yield _kept(f"{name}.bias", h)


def _kept(name: str, numbers: int, *, decays: bool = False) -> Parameter:
    """Whole on every rank."""
    return Parameter(name, numbers, numbers, False, decays)


def _vocabulary(shape: Shape, name: str, columns: int, *, decays: bool = True) -> Parameter:
    rows = shape.padded // shape.tensor
    return Parameter(name, shape.vocabulary * columns, rows * columns, True, decays)


def whole(shape: Shape) -> int:
    """Parameters of the model, as its name counts them."""
    return sum(each.whole for each in table(shape))


def local(shape: Shape) -> int:
    """Parameters of a rank."""
    return sum(each.local for each in table(shape))


def buckets(parameters: Sequence[Parameter], most: int) -> list[list[Parameter]]:
    """Those whose gradients are reduced in one call, in the order in which the backward fills them.

    most: numbers of a bucket, which a single parameter may exceed.
    """
    found: list[list[Parameter]] = []
    room = 0
    for each in reversed(parameters):
        if not found or room < each.local:
            found.append([])
            room = most
        found[-1].append(each)
        room -= each.local
    return [sorted(bucket, key=lambda each: (not each.decays, each.is_cut)) for bucket in found]


def padded_numbers(bucket: Sequence[Parameter], ranks: int) -> int:
    """Of a bucket of this project: its parameters and the whole of it are padded."""
    numbers = sum(_round_up(each.local, ALIGNMENT) for each in bucket)
    return _round_up(numbers, ALIGNMENT * ranks)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
