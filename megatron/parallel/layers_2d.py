"""Layers whose stream is cut by hidden columns, too: 2D (Xu et al., 2021, arXiv:2104.05343), 2.5D
(Wang et al., 2021, arXiv:2105.14500), and what lies outside the parallel region in 3D.

    n tokens that this rank reads   h hidden size   v padded vocabulary   r x c ranks

             rank (i, j) holds                   gathered over the columns   over the rows
    x        its own tokens, [n, h/c]            [n, h]
    weight   [out/c, in/r]                                                   [out/c, in]
    y        the same tokens, [n, out/c]

The rows are the mesh's `tokens` axis, the columns its `hidden` one. No rank splits or gathers
samples: each row of ranks reads its own. One gathered product computes all modes,

    y = scatter_sum(gather(x) gather(W)')     dx = scatter_sum(gather(dy) gather(W))
                                              dW = scatter_sum(gather(dy)' gather(x))

of which each mode leaves some out (`Gathered`); what was gathered is gathered again for the
backward, and not kept. On a square of ranks the same goes in steps, block by block (`Summa`). In
2.5D there are several squares, of the same weights and other tokens: depth is one more axis that
gradients are partial over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import kernels
from megatron.parallel.collectives import (
    gather_from,
    gather_with_gradient,
    reduce_from,
    scatter_sum,
    split_with_gradient,
    start_all_reduce,
    start_broadcast,
    start_gather,
    start_gather_along,
    start_reduce,
    start_sum_along,
)
from megatron.parallel.layers import (
    STD,
    LayerNorm,
    VocabParallelEmbedding,
    VocabParallelHead,
    as_before,
    as_rows,
    linear,
    over,
    own_width,
    usable_views,
)
from megatron.parallel.layers_llama import GroupedQueryLinear, RMSNorm
from megatron.parallel.layers_whole import InputLinear, OutputLinear
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.sharding import GradientView, Modes, ShardedModule

GRIDS = ("2d", "2.5d", "3d")
StartedSum = Callable[[], Tensor]
"""Waits for a sum over ranks, and returns this rank's part of it."""


class Division(Protocol):
    """How a product y = x W' is computed of x [n, in], W [out, in] and y [n, out] that are cut.

    Of the three functions for the backward each starts what it has to fetch, so that all is on its
    way before any is used, and returns what computes."""

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each y."""
        ...

    def start_dys(self, dys: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """What the gradients are computed of, of this rank's parts of the dys."""
        ...

    def start_dx(self, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], StartedSum]:
        """This rank's part of dx, the sum of dy W, of these dys."""
        ...

    def start_dws(self, x: Tensor) -> Callable[[Sequence[Tensor], Sequence[torch.dtype]], Any]:
        """This rank's part of each dW = dy' x, summed over the ranks in these dtypes: a list, of
        the dys and dtypes."""
        ...


@dataclass(frozen=True)
class Gathered:
    """One product of what is gathered ahead, and summed behind."""

    x: tuple[int, Axis]  # dim of x that is gathered, and over which ranks
    weight: tuple[int, Axis]  # the same of the weights
    y: Axis = ALONE  # whose ranks have a term each of y, and get a part of its rows

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        gathered = [start_gather_along(x, *self.x), *self._start_gather(weights)]
        x = gathered.pop(0)()  # and with it what it came in
        sums = []
        while gathered:
            sums.append(start_sum_along(kernels.matmul(x, gathered.pop(0)()), 0, self.y))
        return [wait() for wait in sums]

    def start_dys(self, dys: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        gathered = [start_gather_along(dy, 0, self.y) for dy in dys]
        return lambda: [wait() for wait in gathered]

    def start_dx(self, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], StartedSum]:
        gathered = self._start_gather(weights)

        def multiply(dys: Sequence[Tensor]) -> StartedSum:
            whole = (gathered.pop(0)() for _ in weights)
            return start_sum_along(_input_term(dys, whole), *self.x)

        return multiply

    def start_dws(self, x: Tensor) -> Callable[[Sequence[Tensor], Sequence[torch.dtype]], Any]:
        gathered = [start_gather_along(x, *self.x)]

        def multiply(dys: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
            whole_x = gathered.pop()()
            terms = _weight_terms(dys, whole_x, dtypes)
            sums = [start_sum_along(term, *self.weight) for term in terms]
            return [wait() for wait in sums]

        return multiply

    def _start_gather(self, weights: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        return [start_gather_along(weight, *self.weight) for weight in weights]


@dataclass(frozen=True)
class Summa:
    """As Gathered of the columns of x and W, on a grid of q x q ranks in q steps, of which each
    multiplies by one block of x and one of W: neither is ever there whole (SUMMA, Van de Geijn and
    Watts, 1997)."""

    columns: Axis
    rows: Axis

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        ys: list[Tensor] = []
        for block, *its_weights in _in_turn((self.columns, [x]), (self.rows, weights)):
            if ys:
                for y, weight in zip(ys, its_weights, strict=True):
                    _add_product_(y, block, weight)
            else:
                ys = [kernels.matmul(block, weight) for weight in its_weights]
        return ys

    def start_dys(self, dys: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [*dys]

    def start_dx(self, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], StartedSum]:
        blocks = _in_turn((self.rows, weights))

        def multiply(dys: Sequence[Tensor]) -> StartedSum:
            wait = _start_own_sums(([_input_term(dys, each)] for each in blocks), self.columns)
            return lambda: wait()[0]

        return multiply

    def start_dws(self, x: Tensor) -> Callable[[Sequence[Tensor], Sequence[torch.dtype]], Any]:
        blocks = _in_turn((self.columns, [x]))

        def multiply(dys: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
            terms = (_weight_terms(dys, block, dtypes) for (block,) in blocks)
            return _start_own_sums(terms, self.rows)()

        return multiply


def _in_turn(*owns: tuple[Axis, Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Of axes of one size those of each rank, one after another: the first ones are started at
    once, the next come while some are used."""

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
    """Of terms for each rank of the axis, one rank after another, the own ones summed."""
    pending: list[Callable[[], Tensor]] = []
    own: Sequence[Tensor] = ()

    def finish() -> list[Tensor]:
        while pending:
            pending.pop()()  # and what others get is free
        return [*own]

    for rank, each in enumerate(terms):
        finish()  # those of one rank are on their way at a time
        pending += [start_reduce(term, axis, rank) for term in each]
        own = each if rank == axis.rank else own
    return finish


def _input_term(dys: Sequence[Tensor], weights: Iterable[Tensor]) -> Tensor:
    dx: Tensor | None = None
    for dy, weight in zip(dys, weights, strict=True):
        if dx is None:
            dx = kernels.matmul(dy, weight.T)
        else:
            _add_product_(dx, dy, weight.T)
    assert dx is not None
    return dx


def _add_product_(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y += x W', rounded once."""
    kernels.add_matmul_(y, x.T, weight.T, accumulate=True)


def _weight_terms(dys: Sequence[Tensor], x: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    pairs = zip(dys, dtypes, strict=True)
    return [kernels.matmul(dy.T, x.T).to(dtype) for dy, dtype in pairs]


class _Multiply(torch.autograd.Function):
    """y = x W' + b of each weight, divided in some way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        division: Division,
        views: Sequence[GradientView | None],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """parameters: the weights, then the biases."""
        weights, biases = parameters[: len(views)], parameters[len(views) :]
        ctx.save_for_backward(x, *weights)
        ctx.division, ctx.views = division, views
        ctx.bias_shapes = [None if bias is None else bias.shape for bias in biases]
        pairs = zip(division.outputs(x, _matrices(weights)), biases, strict=True)
        return tuple(y if bias is None else y.add_(bias.flatten()) for y, bias in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        division, needed = ctx.division, ctx.needs_input_grad
        dws: list[Tensor | None] = [None] * len(dys)
        dbs, dx = dws.copy(), None
        now = [number for number in range(len(dys)) if needed[3 + number]]
        views = [ctx.views[number] for number in now]
        dtypes = [
            torch.promote_types(weights[number].dtype, torch.float32)
            if view is None
            else view.dtype
            for number, view in zip(now, views, strict=True)
        ]
        is_deferred = all(view is not None and view.deferral.is_on for view in views)
        # In the order in which they are used: what is last comes beside the matmuls of dx.
        whole_dys = division.start_dys(dys)
        multiply = division.start_dx(_matrices(weights)) if needed[0] else None
        finish = division.start_dws(x) if now and not is_deferred else None
        for number, dy in enumerate(dys):
            if needed[3 + len(dys) + number]:
                dbs[number] = dy.sum(0).view(ctx.bias_shapes[number])
        whole = whole_dys()
        summed = multiply(whole) if multiply is not None else None
        of_now = [whole[number] for number in now]
        if finish is None:
            found = cache(lambda: division.start_dws(x)(of_now, dtypes))  # once, later, for all
            for place, view in enumerate(views):
                view.deferral.add(view, partial(_add_later, view, found, place))
        else:
            for number, view, dw in zip(now, views, finish(of_now, dtypes), strict=True):
                if view is not None:
                    view.add(dw)
                else:
                    dws[number] = dw.view(weights[number].shape).to(weights[number].dtype)
        if summed is not None:
            dx = summed()
        return dx, None, None, *dws, *dbs


def _add_later(view: GradientView, found: Callable[[], list[Tensor]], place: int) -> None:
    view.add(found()[place])


def _matrices(weights: Sequence[Any]) -> list[Tensor]:
    return [weight.flatten(0, -2) for weight in weights]


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    division: Division,
    views: Sequence[GradientView | None],
) -> tuple[Tensor, ...]:
    """x [n, in] of this rank, weights [..., out, in] and biases [..., out], their leading dims
    flattened, to a y of each. views: as of `linears`."""
    views = usable_views(x, views)
    outputs: tuple[Tensor, ...] = _Multiply.apply(x, division, views, *weights, *biases)
    return outputs


@dataclass(frozen=True)
class Place:
    """Where a linear layer lies: how its product is divided, and how its parameters are cut."""

    division: Division
    x_hidden: Axis  # that the columns of x are cut over
    inputs: tuple[Axis, ...]  # that dim `in` of the weight is cut over, the major one first
    outputs: Axis  # that dim `out`, and so the columns of y, are cut over
    y_tokens: Axis  # whose ranks hold y of different tokens


def outside(mesh: Mesh) -> Place:
    """The stream to the stream: all of 2D and 2.5D; of 3D what lies outside the parallel region."""
    division: Division = Summa(mesh.hidden, mesh.tokens)
    if mesh.hidden.size != mesh.tokens.size:  # no square
        division = Gathered((1, mesh.hidden), (1, mesh.tokens))
    return Place(division, mesh.hidden, (mesh.tokens,), mesh.hidden, mesh.tokens)


def split_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """What this rank holds between layers of x [.., h], which is whole on every rank that reads
    these samples: its columns in 2D, 2.5D and 3D, its rows under sequence parallelism, else all.
    Raises ValueError for what the ranks cannot share evenly."""
    return split_with_gradient(split_with_gradient(x, 0, mesh.stream), -1, mesh.hidden)


def gather_stream(x: Tensor, mesh: Mesh) -> Tensor:
    """The inverse of split_stream, for what every rank computes alike."""
    return gather_with_gradient(gather_with_gradient(x, -1, mesh.hidden), 0, mesh.stream)


class Linear2D(ShardedModule):
    """x [n, in/c] to [n, parts x out/c]. parts: as of ColumnParallelLinear."""

    modes: ClassVar[Modes] = GRIDS

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        mesh: Mesh,
        in_features: int,
        out_features: int,
        *,
        parts: int = 1,
        bias: bool = True,
        std: float = STD,
    ) -> None:
        super().__init__(mesh)
        self.place = place = self.make_place(mesh)
        self.width = own_width(in_features, place.x_hidden)
        rows = (parts, out_features) if parts > 1 else (out_features,)
        last = len(rows) - 1
        of_rows = over(last, place.outputs)
        shards = of_rows + over(last + 1, *place.inputs)
        self.add_parameter("weight", (*rows, in_features), shards, std=std)
        self.add_bias(bias, rows, of_rows, partial=(mesh.replicas, place.y_tokens))

    def make_place(self, mesh: Mesh) -> Place:
        return outside(mesh)

    def forward(self, x: Tensor) -> Tensor:
        rows, view = as_rows(self, x, self.width), self.gradient_views.get("weight")
        (y,) = multiply(rows, [self.weight], [self.bias], self.place.division, [view])
        return as_before(y, x.shape[:-1])


class GroupedQueryLinear2D(GroupedQueryLinear):
    """The same of x [n, h/c], with heads that are cut over the columns."""

    modes: ClassVar[Modes] = GRIDS

    def make_place(self, mesh: Mesh) -> Place:
        return outside(mesh)

    def plan(self, mesh: Mesh, hidden_size: int) -> tuple[tuple[Axis, ...], int, tuple[Axis, ...]]:
        self.place = place = self.make_place(mesh)
        return place.inputs, own_width(hidden_size, place.x_hidden), (place.y_tokens,)

    def multiply(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        views: Sequence[GradientView | None],
    ) -> tuple[Tensor, ...]:
        return multiply(x, weights, biases, self.place.division, views)


class InputLinear2D(InputLinear):
    """x [n, in], whole on every rank that reads it, to the stream [n, out/c]."""

    modes: ClassVar[Modes] = GRIDS

    def forward(self, x: Tensor) -> Tensor:
        rows, view = as_rows(self, x, self.weight.shape[1]), self.gradient_views.get("weight")
        y = linear(rows, self.weight, self.bias, axis=self.mesh.hidden, view=view)
        return as_before(y, x.shape[:-1])


class OutputLinear2D(OutputLinear):
    """The stream [n, in/c] to [n, out], whole on every rank that reads these tokens."""

    modes: ClassVar[Modes] = GRIDS

    def forward(self, x: Tensor) -> Tensor:
        rows, view = as_rows(self, x, self.weight.shape[1]), self.gradient_views.get("weight")
        y = reduce_from(linear(rows, self.weight, None, view=view), self.mesh.hidden)
        return as_before(y if self.bias is None else y + self.bias, x.shape[:-1])


class VocabParallelEmbedding2D(VocabParallelEmbedding):
    """Token ids [n] to [n, h/c]: each rank looks up the ids of all rows of ranks, [r n, h], in its
    own rows of the weight [v/(r c), h]."""

    modes: ClassVar[Modes] = GRIDS

    def forward(self, tokens: Tensor) -> Tensor:
        mesh = self.mesh
        own = self.look_up(gather_from(as_rows(self, tokens), 0, mesh.tokens))
        y = scatter_sum(scatter_sum(own, 0, mesh.tokens), 1, mesh.hidden)
        return as_before(y, tokens.shape)


class VocabParallelHead2D(VocabParallelHead):
    """x [n, h/c] to logits [n, v/c], or their loss: the weight [v/(r c), h] is gathered over the
    rows of ranks, x over the columns."""

    modes: ClassVar[Modes] = GRIDS

    def multiply(self, x: Tensor, weight: Tensor, view: GradientView | None) -> Tensor:
        division = Gathered((1, self.mesh.hidden), (0, self.mesh.tokens))
        (y,) = multiply(x, [weight], [self.bias], division, [view])
        return y


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + epsilon) weight + bias, of a row whose columns are cut; without
    a bias x / sqrt(mean of x^2 + epsilon) weight. In fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, axis: Axis
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.axis, ctx.has_mean = axis, bias is not None
        own_mean = wide.mean(1) if ctx.has_mean else wide.new_zeros(len(x))
        squares = (wide - own_mean[:, None]).square().sum(1)
        # Of each rank's own mean, as E[x^2] - E[x]^2 would cancel.
        terms = [squares, *[own_mean] * ctx.has_mean]
        squares, *means = start_gather(torch.stack(terms)[None], axis)().unbind(1)
        mean, variance = own_mean, squares.mean(0) / x.shape[1]
        if means:
            mean = means[0].mean(0)
            variance += (means[0] - mean).square().mean(0)
        scale = (variance + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        y = (wide - mean[:, None]).mul_(scale[:, None]).mul_(weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide = mean.dtype
        normal, dy = (x.to(wide) - mean[:, None]).mul_(scale[:, None]), dy.to(wide)
        g = dy * weight
        terms = [(g * normal).sum(1), *[g.sum(1)] * ctx.has_mean]
        summed = start_all_reduce(torch.stack(terms), ctx.axis)
        dw = (dy * normal).sum(0).to(weight.dtype)  # beside it
        db = dy.sum(0).to(weight.dtype) if ctx.has_mean else None
        means = summed() / (x.shape[1] * ctx.axis.size)
        dx = g.sub_(normal.mul_(means[0][:, None]))
        if ctx.has_mean:
            dx.sub_(means[1][:, None])
        return dx.mul_(scale[:, None]).to(x.dtype), dw, db, None, None


class _CutNorm(ShardedModule):
    """What norms have in common whose rows are cut by columns."""

    modes: ClassVar[Modes] = None
    weight: nn.Parameter

    def __init__(
        self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5, is_inside: bool = False
    ) -> None:
        """is_inside: whether x lies in the parallel region, where 1D and 3D cut other columns."""
        self.is_inside, sizes = is_inside, dict[str, Any](hidden_size=hidden_size, epsilon=epsilon)
        super().__init__(mesh, **sizes)

    def axes(self, mesh: Mesh) -> tuple[Axis, tuple[Axis, ...]]:
        if self.is_inside:
            return mesh.inner_hidden, (mesh.replicas, mesh.inner_tokens)
        return mesh.hidden, mesh.of_stream

    def forward(self, x: Tensor) -> Tensor:
        rows, bias = as_rows(self, x, self.weight.shape[0]), self._parameters.get("bias")
        y = _Normalise.apply(rows, self.weight, bias, self.epsilon, self.hidden)
        return as_before(y, x.shape[:-1])


class LayerNorm2D(_CutNorm, LayerNorm):
    """Layer norm of the stream [n, h/c]: ranks exchange the mean and the squares of each row."""


class RMSNorm2D(_CutNorm, RMSNorm):
    """RMSNorm of the stream [n, h/c]."""
