"""Layers for a stream whose hidden columns are cut, too: 2D (Xu et al., 2021, arXiv:2104.05343),
2.5D (Wang et al., 2021, arXiv:2105.14500), and the layers outside the parallel region in 3D.

    n tokens that this rank reads   h hidden size   v padded vocabulary   r x c ranks

             rank (i, j) holds                   gathered over the columns   over the rows
    x        its own tokens, [n, h/c]            [n, h]
    weight   [out/c, in/r]                                                   [out/c, in]
    y        the same tokens, [n, out/c]

The rows are the mesh's `tokens` axis, the columns its `hidden` axis. No rank splits or gathers
samples: each row of ranks reads its own. The backward gathers again, as nothing gathered is kept.
On a square of ranks the matmul runs in steps, block by block (`Summa`). 2.5D has several squares,
with the same weights and other tokens: depth is one more axis that gradients are partial over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.parallel import kernels
from megatron.parallel.collectives import cut, start_broadcast, start_reduce, start_sum
from megatron.parallel.layers import (
    Gathered,
    InputGradient,
    LayerNorm,
    ParallelLinear,
    Partition,
    Views,
    VocabParallelEmbedding,
    VocabParallelHead,
    WeightGradients,
    add_bias,
    add_product,
    input_term,
    require_mode,
    weight_terms,
)
from megatron.parallel.layers_llama import GroupedQueryLinear, RMSNorm
from megatron.parallel.layers_whole import InputLinear, OutputLinear
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.regions import gather_with_gradient, split_with_gradient


@dataclass(frozen=True, kw_only=True)
class Summa(Gathered):
    """Computes what Gathered does with the columns of x and W cut, on a grid of q x q ranks in q
    steps. Each step multiplies one block of x by one of W, so neither matrix is ever whole (SUMMA,
    Van de Geijn and Watts, 1997)."""

    columns: Axis
    rows: Axis

    def outputs(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        ys: list[Tensor] = []
        for block, *its_weights in _in_turn((self.columns, [x]), (self.rows, weights)):
            if ys:
                ys = [add_product(y, block, its) for y, its in zip(ys, its_weights, strict=True)]
            else:
                ys = [kernels.matmul(block, its) for its in its_weights]
        return [*map(add_bias, ys, biases)]

    def start_dx(self, weights: Sequence[Tensor]) -> InputGradient:
        blocks = _in_turn((self.rows, weights))

        def compute(dys: Sequence[Tensor], others: Sequence[Tensor]) -> Callable[[], Tensor]:
            wait = _start_own_sums(([input_term(dys, each)] for each in blocks), self.columns)
            return lambda: wait()[0]

        return compute

    def start_dws(self, x: Tensor) -> WeightGradients:
        blocks = _in_turn((self.columns, [x]))

        def compute(dys: Sequence[Tensor], views: Views) -> list[Tensor | None]:
            terms = (weight_terms(dys, block, views) for (block,) in blocks)
            return [*_start_own_sums(terms, self.rows)()]

        return compute


def _in_turn(*owns: tuple[Axis, Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each rank of the axes in turn. The first are started at once, the next
    arrive while the current ones are used. All axes have the same size."""

    def start(source: int) -> list[Callable[[], Tensor]]:
        return [start_broadcast(each, axis, source) for axis, own in owns for each in own]

    def blocks(coming: list[Callable[[], Tensor]]) -> Iterator[list[Tensor]]:
        for following in range(1, size + 1):
            here = [wait() for wait in coming]
            coming = start(following) if following < size else []
            yield here

    size = owns[0][0].size
    return blocks(start(0))


def _start_own_sums(terms: Iterable[Sequence[Tensor]], axis: Axis) -> Callable[[], list[Tensor]]:
    """Start the sums that this rank gets. terms: the terms for each rank of the axis, in turn."""
    if torch.compiler.is_compiling():  # a reduce to one rank cannot be traced
        sums = [start_sum(torch.cat(each), axis, axis) for each in zip(*terms, strict=True)]
        return lambda: [wait() for wait in sums]
    pending: list[Callable[[], Tensor]] = []
    own: Sequence[Tensor] = ()

    def finish() -> list[Tensor]:
        while pending:
            pending.pop()()  # and frees what other ranks get
        return [*own]

    for rank, each in enumerate(terms):
        finish()  # only the sums for one rank are in flight at a time
        pending += [start_reduce(term, axis, rank) for term in each]
        own = each if rank == axis.rank else own
    return finish


def outside(mesh: Mesh) -> Partition:
    """From the stream to the stream: all of 2D and 2.5D; in 3D, outside the parallel region."""
    require_mode(mesh, "outside", "2d", "2.5d", "3d")
    division: Gathered = Summa(columns=mesh.hidden, rows=mesh.tokens)
    if mesh.hidden.size != mesh.tokens.size:  # not a square
        division = Gathered(x=cut(1, mesh.hidden), weight=cut(1, mesh.tokens))
    return Partition(division, (mesh.tokens,), mesh.hidden, mesh.hidden, (mesh.tokens,))


def split_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part, as it is between layers, of x [.., h], which is whole on every rank that
    reads these samples: its columns in 2D, 2.5D and 3D, its rows under sequence parallelism, else
    all. Raises ValueError if the ranks cannot share x evenly."""
    return split_with_gradient(split_with_gradient(x, 0, mesh.stream), -1, mesh.hidden)


def gather_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """The inverse of split_stream, for what all ranks compute in the same way."""
    return gather_with_gradient(gather_with_gradient(x, -1, mesh.hidden), 0, mesh.stream)


class Linear2D(ParallelLinear):
    """x [n, in/c] to [n, parts x out/c]. settings: see ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(mesh, in_features, out_features, outside(mesh), **settings)


# One class serves all modes.
InputLinear2D, OutputLinear2D = InputLinear, OutputLinear
VocabParallelEmbedding2D, VocabParallelHead2D = VocabParallelEmbedding, VocabParallelHead
LayerNorm2D, RMSNorm2D = LayerNorm, RMSNorm


class GroupedQueryLinear2D(GroupedQueryLinear):
    """x is [n, h/c]; heads are cut over the columns."""

    def __init__(self, mesh: Mesh, hidden_size: int, **settings: Any) -> None:
        super().__init__(mesh, hidden_size, partition=outside(mesh), **settings)
