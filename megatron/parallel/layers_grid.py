"""Layers outside the 1D pair: the partitions of grids of ranks, in 2D (Xu et al., 2021,
arXiv:2104.05343), 2.5D (Wang et al., 2021, arXiv:2105.14500) and 3D (Bian et al., 2021,
arXiv:2105.14450), and the small layers that in 1D are whole on every rank.

    n tokens that this rank reads   h hidden size   v padded vocabulary   r x c ranks

2D: rank (i, j) holds                            gathered over the columns   over the rows
    x        its own tokens, [n, h/c]            [n, h]
    weight   [out/c, in/r]                                                   [out/c, in]
    y        the same tokens, [n, out/c]

The rows are the mesh's `tokens` axis, the columns its `hidden` axis. No rank splits or gathers
samples: each row of ranks reads its own. The backward gathers again, as nothing gathered is kept.
On a square of ranks the matmul runs in steps, block by block (`Summa`). 2.5D has several squares,
with the same weights and other tokens: depth is one more axis that gradients are partial over.

3D: rank (i, j, k) holds                         gathered       summed
    x        tokens of (i, j), [n, h/l by k]      over j, to those of i
    A        [out/l by j, in/l by k and i]        over i
    X A      tokens of (i, k), [n, out/l by j]                   over k
    B        [out/l by k, in/l by j and i]        over i
    X A B    tokens of (i, j), [n, h/l by k]      X A over k     over j

i, j and k are the mesh's axes `weight`, `input` and `output`, each of l ranks. A rank reads the
samples of (i, j). Between A and B, in attention, it holds the samples that (i, k) read, so
attention's mask and positions are exchanged (`exchange`). Norms, embeddings and all else outside
the parallel region are the layers of 2D, on l^2 x l ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel import collectives, kernels, layers
from megatron.parallel.collectives import Cut, cut
from megatron.parallel.layers import Gathered, ParallelLinear, Partition, require_mode
from megatron.parallel.layers_llama import GroupedQueryLinear
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.regions import gather_with_gradient


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
                pairs = zip(ys, its_weights, strict=True)
                ys = [layers.add_matmul(y, block, weight) for y, weight in pairs]
            else:
                ys = [kernels.matmul(block, its) for its in its_weights]
        return [*map(layers.add_bias, ys, biases)]

    def start_dx(self, weights: Sequence[Tensor]) -> layers.InputGradient:
        blocks = _in_turn((self.rows, weights))

        def compute(dys: Sequence[Tensor], others: Sequence[Tensor]) -> Callable[[], Tensor]:
            terms = ([layers.input_term(dys, weights)] for weights in blocks)
            wait = _start_own_sums(terms, self.columns)
            return lambda: wait()[0]

        return compute

    def start_dws(self, x: Tensor) -> layers.WeightGradients:
        blocks = _in_turn((self.columns, [x]))

        def compute(dys: Sequence[Tensor], views: layers.Views) -> list[Tensor | None]:
            terms = (layers.weight_terms(dys, block, views) for (block,) in blocks)
            return [*_start_own_sums(terms, self.rows)()]

        return compute


def _in_turn(*owns: tuple[Axis, Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each rank of the axes in turn. The first are started at once, the next
    arrive while the current ones are used. All axes have the same size."""
    size = owns[0][0].size

    def start(source: int) -> list[Callable[[], Tensor]]:
        pairs = [(each, axis) for axis, own in owns for each in own]
        return [collectives.start_broadcast(each, axis, source) for each, axis in pairs]

    def blocks(coming: list[Callable[[], Tensor]]) -> Iterator[list[Tensor]]:
        for following in range(1, size + 1):
            here = [wait() for wait in coming]
            coming = start(following) if following < size else []
            yield here

    return blocks(start(0))  # a generator would start only when it is read


def _start_own_sums(terms: Iterable[Sequence[Tensor]], axis: Axis) -> Callable[[], list[Tensor]]:
    """Start the sums that this rank gets. terms: the terms for each rank of the axis, in turn."""
    if torch.compiler.is_compiling():  # a reduce to one rank cannot be traced
        wholes = [torch.cat(each) for each in zip(*terms, strict=True)]
        sums = [collectives.start_sum(whole, axis, axis) for whole in wholes]
        return lambda: [wait() for wait in sums]
    pending: list[Callable[[], Tensor]] = []
    own: Sequence[Tensor] = ()

    def finish() -> list[Tensor]:
        while pending:
            pending.pop()()  # and frees what other ranks get
        return [*own]

    for rank, each in enumerate(terms):
        finish()  # only the sums for one rank are in flight at a time
        pending += [collectives.start_reduce(term, axis, rank) for term in each]
        own = each if rank == axis.rank else own
    return finish


def outside(mesh: Mesh) -> Partition:
    """From the stream to the stream: all of 2D and 2.5D; in 3D, outside the parallel region."""
    require_mode(mesh, "outside", "2d", "2.5d", "3d")
    division: Gathered = Summa(columns=mesh.hidden, rows=mesh.tokens)
    if mesh.hidden.size != mesh.tokens.size:  # not a square
        division = Gathered(x=cut(1, mesh.hidden), weight=cut(1, mesh.tokens))
    return Partition(division, (mesh.tokens,), mesh.hidden, mesh.hidden, (mesh.tokens,))


def entering(mesh: Mesh) -> Partition:
    """3D: from outside the parallel region to inside."""
    require_mode(mesh, "entering", "3d")
    division = Gathered(cut(0, mesh.input), cut(1, mesh.weight), cut(0, mesh.output))
    inputs = (mesh.output, mesh.weight)
    return Partition(division, inputs, mesh.input, mesh.output, (mesh.inner_tokens,))


def leaving(mesh: Mesh) -> Partition:
    """3D: from inside the parallel region to outside."""
    require_mode(mesh, "leaving", "3d")
    division = Gathered(cut(0, mesh.output), cut(1, mesh.weight), cut(0, mesh.input))
    inputs = (mesh.input, mesh.weight)
    return Partition(division, inputs, mesh.output, mesh.input, (mesh.tokens,))


def exchange(mesh: Mesh, x: Any) -> Any:
    """x [b, ..] of the samples that this rank reads, to x of those that it holds inside the
    parallel region of 3D; no gradient is recorded."""
    if x is None or mesh.input.size == 1:
        return x
    if x.dtype == torch.bool:
        return exchange(mesh, x.to(torch.uint8)).bool()
    return collectives.gather_from(x, 0, mesh.input).chunk(mesh.input.size)[mesh.output.rank]


class Linear2D(ParallelLinear):
    """x [n, in/c] to [n, parts x out/c]. settings: see ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(mesh, in_features, out_features, outside(mesh), **settings)


class GroupedQueryLinear2D(GroupedQueryLinear):
    """x is [n, h/c]; heads are cut over the columns."""

    def __init__(self, mesh: Mesh, hidden_size: int, **settings: Any) -> None:
        super().__init__(mesh, hidden_size, partition=outside(mesh), **settings)


class Linear3D(ParallelLinear):
    """x [n, in/l] outside the parallel region to [n, parts x out/l] inside, or the reverse if x
    is_inside. settings: see ColumnParallelLinear."""

    def __init__(
        self,
        mesh: Mesh,
        in_features: int,
        out_features: int,
        *,
        is_inside: bool = False,
        **settings: Any,
    ) -> None:
        partition = leaving(mesh) if is_inside else entering(mesh)
        super().__init__(mesh, in_features, out_features, partition, **settings)


class GroupedQueryLinear3D(GroupedQueryLinear):
    """x [n, h/l] lies outside the parallel region; queries, keys and values lie inside."""

    def __init__(self, mesh: Mesh, hidden_size: int, **settings: Any) -> None:
        super().__init__(mesh, hidden_size, partition=entering(mesh), **settings)


class Linear(ParallelLinear):
    """x [n, in] to [n, out] outside the parallel region of 1D, for matmuls that are small next to a
    layer: every rank has the whole weight. settings: see ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        require_mode(mesh, "Linear", "1d")
        partition = Partition(dw_partial=(mesh.stream,), db_partial=(mesh.stream,))
        super().__init__(mesh, in_features, out_features, partition, **settings)


class InputLinear(ParallelLinear):
    """x [n, in], whole on every rank that reads it, to the stream [n, out/c]. settings: see
    ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        rows, division = mesh.partial_axes[1:], Gathered(x=Cut(terms=mesh.hidden))
        partition = Partition(division, outputs=mesh.hidden, dw_partial=rows, db_partial=rows)
        super().__init__(mesh, in_features, out_features, partition, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(collectives.own_rows(x, self.mesh.stream))


class OutputLinear(ParallelLinear):
    """The stream [n, in/c] to [n, out], whole on every rank that reads these tokens. settings: see
    ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        rows, division = mesh.partial_axes[1:], Gathered(y=Cut(terms=mesh.hidden))
        axis = mesh.hidden
        partition = Partition(division, (axis,), x_columns=axis, dw_partial=rows, db_partial=rows)
        super().__init__(mesh, in_features, out_features, partition, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return gather_with_gradient(super().forward(x), 0, self.mesh.stream)


class Gather(nn.Module):
    """The whole stream [n, h] on every rank, for layers that all ranks compute in the same way."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return gather_with_gradient(x, 0, self.mesh.stream)


# One class serves all modes.
InputLinear2D, OutputLinear2D = InputLinear, OutputLinear
VocabParallelEmbedding2D = layers.VocabParallelEmbedding
VocabParallelHead2D = layers.VocabParallelHead
LayerNorm2D = LayerNorm3D = layers.LayerNorm
RMSNorm2D = RMSNorm3D = layers.RMSNorm
