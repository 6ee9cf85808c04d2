"""Which blocks of the matrices of an MLP each rank holds, read from the code that cuts them.

    y1 = x W1        y2 = GeLU(y1) W2        x, y2 [n, h]    W1 [h, 4h]    y1 [n, 4h]    W2 [4h, h]

A mesh and the two layers are built on meta for every rank of the layout; no process is started.
The weights are read from `sharding_specs`, under ZeRO stage 3 from the buckets. x goes, as a matrix
of its own indices, through the functions that cut a batch and the hidden states. Each layer's
division says what the ranks gather of x and W and what they keep of y.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.data.batch import micro_batch_numbers
from megatron.parallel.axes import INNER
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import Cut, cut
from megatron.parallel.context import Context
from megatron.parallel.factory import layer_factory
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.layers_grid import Summa
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.regions import split_stream
from megatron.parallel.sharding import sharding_specs
from tools.layouts.layout import Layout
from tools.plan.absent import AbsentRanks

META = torch.device("meta")
LEAST = 8  # hidden size and tokens of a sample are at least this
# Under ZeRO stage 3 the hidden size: the padding of a bucket has to be small beside the weights.
LEAST_DIVIDED = 64


class Block(NamedTuple):
    """Adjacent rows and columns of a matrix. ranks: those that hold it."""

    rows: range
    columns: range
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix and its blocks. rows, columns: names of its dims; a weight is [in, out]."""

    name: str
    rows: str
    columns: str
    shape: tuple[int, int]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Blocks:
    """The matrices x, W1, y1, W2 and y2 of the layout. samples: rows of x are the tokens of one
    after another. ranks: those of the first pipeline stage."""

    layout: Layout
    samples: int
    ranks: int
    matrices: tuple[Matrix, ...]


class _Held(NamedTuple):
    """Rows and columns of a matrix that a rank holds, in its order."""

    rows: list[int]
    columns: list[int]


def read_blocks(layout: Layout) -> Blocks:
    """The blocks of a layout; `picture.read` checks it first."""
    world = layout.ranks
    ranks = world // layout.size("pipeline")
    meshes = [layout.mesh(META, AbsentRanks(size=world, rank=rank)) for rank in range(ranks)]
    first = meshes[0]
    samples, multiple = first.batch.size, first.token_multiple
    tokens = samples * multiple * -(-LEAST // multiple)
    multiple = prod(first.axis(name).size for name in INNER[layout.mode])
    least = LEAST_DIVIDED if layout.zero == 3 else LEAST
    hidden = multiple * -(-least // multiple)
    models = [_model(mesh, hidden) for mesh in meshes]
    x = [_entering(mesh, tokens, hidden) for mesh in meshes]
    y1 = _through([model[0].column for model in models], x)
    y2 = _through([model[0].row for model in models], y1)
    w1, w2 = zip(*(_weights(model, layout.zero) for model in models), strict=True)
    h, wide = "h", "4h"
    matrices = (
        Matrix("x", "tokens", h, (tokens, hidden), _merged(map(_boxes, x))),
        Matrix("W1", h, wide, (hidden, 4 * hidden), _merged(w1)),
        Matrix("y1", "tokens", wide, (tokens, 4 * hidden), _merged(map(_boxes, y1))),
        Matrix("W2", wide, h, (4 * hidden, hidden), _merged(w2)),
        Matrix("y2", "tokens", h, (tokens, hidden), _merged(map(_boxes, y2))),
    )
    return Blocks(layout, samples, ranks, matrices)


class _MLP(nn.Module):
    def __init__(self, mesh: Mesh, hidden: int) -> None:
        super().__init__()
        factory = layer_factory(mesh)
        self.column: ParallelLinear = factory.column(hidden, 4 * hidden, bias=False)
        self.row: ParallelLinear = factory.row(4 * hidden, hidden, bias=False)


def _model(mesh: Mesh, hidden: int) -> Any:
    with META:
        return nn.ModuleList(_MLP(mesh, hidden) for _ in range(2))  # a list of layers, for ZeRO


def _entering(mesh: Mesh, tokens: int, hidden: int) -> _Held:
    """The part of x that the rank holds; x has one sample of each rank that reads others."""
    samples = mesh.batch.size
    batch = {"global_batch_size": samples, "micro_batch_size": 1, "data_size": samples}
    ((*numbers,),) = micro_batch_numbers(0, data_rank=mesh.batch.rank, **batch)
    index = torch.arange(tokens * hidden).view(samples, -1, hidden)[numbers]
    rows = Context(mesh).take(index).flatten(0, 1)
    return _held(split_stream(rows, mesh), hidden)


def _held(index: Tensor, width: int) -> _Held:
    """Rows and columns of a part of a matrix whose elements are their own indices."""
    rows, columns = (index[:, 0] // width).tolist(), (index[0] % width).tolist()
    assert torch.equal(index, torch.tensor(rows)[:, None] * width + torch.tensor(columns))
    return _Held(rows, columns)


def _weights(model: Any, zero: int) -> tuple[list[tuple[range, range]], ...]:
    """Boxes [in, out] that the rank holds of W1 and W2 between steps."""
    specs, kept = sharding_specs(model), {}
    if zero == 3:
        buckets = GradientBuckets.for_master_weights(model, zero_stage=zero).buckets
        for bucket in buckets:
            part = torch.empty(bucket.part.stop - bucket.part.start, device=META)
            kept |= {each.key: (each.spec, each.local) for each in bucket.slices(part)}
    else:
        kept = {name: (specs[name], each) for name, each in model.named_parameters()}
    found = []
    for name in ("0.column.weight", "0.row.weight"):
        spec, local = kept[name]
        boxes = (box for _, box in spec.boxes(local))
        found.append([(_range(rows), _range(out)) for out, rows in boxes])
    return tuple(found)


def _range(part: slice) -> range:
    return range(part.start, part.stop)


def _through(layers: Sequence[ParallelLinear], xs: Sequence[_Held]) -> list[_Held]:
    """The part of y = x W that each rank holds."""
    peers, ys = _Peers([layer.mesh for layer in layers]), list[_Held]()
    weights, inputs = list[_Held](), list[list[int]]()
    for layer in layers:
        out, rows = (list(_range(each)) for each in layer.specs["weight"].local_slices)
        weights.append(_Held(out, rows))  # as it is stored, [out, in]
    for rank, layer in enumerate(layers):
        division = layer.division
        of_x, of_weight = division.x, division.weight
        if isinstance(division, Summa):
            of_x, of_weight = cut(1, division.columns), cut(1, division.rows)
        x = _gathered(of_x, [xs[peer] for peer in peers.along(rank, of_x.over)])
        weight = _gathered(of_weight, [weights[peer] for peer in peers.along(rank, of_weight.over)])
        if x.columns != weight.columns:
            raise RuntimeError(f"rank {rank} multiplies columns of x by other rows of W")
        inputs.append(weight.columns)
        ys.append(_part(layer.after or division.y, _Held(x.rows, weight.rows)))
    for rank, layer in enumerate(layers):
        ranks = peers.along(rank, (layer.after or layer.division.y).terms)
        summed = sorted(chain(*(inputs[peer] for peer in ranks)))
        if summed != [*range(layer.specs["weight"].shape[1])]:
            raise RuntimeError(f"the sum of rank {rank} lacks terms, or has some twice")
    return ys


class _Peers:
    """The ranks of each group of each axis."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.places = [{axis.name: axis.rank for axis in mesh.axes} for mesh in meshes]
        self.groups: dict[frozenset[str], dict[tuple[int, ...], list[int]]] = {}

    def along(self, rank: int, axis: Axis) -> list[int]:
        """The ranks of this rank's group, in their order; itself if the axis has one rank."""
        within = frozenset(part.name for part in axis.parts)

        def others(place: dict[str, int]) -> tuple[int, ...]:
            return tuple(number for name, number in place.items() if name not in within)

        if within not in self.groups:
            groups = self.groups[within] = {}
            for peer, place in enumerate(self.places):
                groups.setdefault(others(place), []).append(peer)
        return self.groups[within][others(self.places[rank])]


def _gathered(by: Cut, parts: Sequence[_Held]) -> _Held:
    """The whole of a matrix from the parts of all ranks that gather it."""
    joined = list(chain(*(part[by.dim] for part in parts)))
    return parts[0]._replace(**{_Held._fields[by.dim]: joined})


def _part(by: Cut, whole: _Held) -> _Held:
    """The rank's part of a sum that is scattered."""
    size = len(whole[by.dim]) // by.over.size
    own = whole[by.dim][by.over.rank * size :][:size]
    return whole._replace(**{_Held._fields[by.dim]: own})


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive numbers, in ascending order."""
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        (_, start), *rest = run
        yield range(start, start + 1 + len(rest))


def _boxes(held: _Held) -> list[tuple[range, range]]:
    return [(rows, columns) for rows in _runs(held.rows) for columns in _runs(held.columns)]


def _merged(held: Any) -> tuple[Block, ...]:
    """The blocks of a matrix. held: boxes of each rank, in the order of ranks."""
    ranks: dict[tuple[range, range], list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            ranks.setdefault(box, []).append(rank)
    blocks = (Block(*box, tuple(each)) for box, each in ranks.items())
    return tuple(sorted(blocks, key=lambda each: (each.rows.start, each.columns.start)))
