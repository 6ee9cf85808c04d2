"""The parallel layers, on the stream [n, h] of n = b x s tokens.

    h hidden size   v padded vocabulary   t tensor-parallel size

Under sequence parallelism a rank holds n/t rows of the stream. In 2D, 2.5D and 3D, c ranks cut its
columns, too: it is [n, h/c]. If it is not cut by rows, layers also take [b, s, h], and ids [b, s].

        Y = GeLU(X A) B:    X --f--> X A_i --GeLU--> Y_i --Y_i B_i--g--> sum over ranks
                                A cut by columns         B cut by rows

A weight is stored as torch stores it, [out, in], so columns of A are rows of the stored tensor.
Every linear layer is one matmul, y = x W' + b, whose three matrices may be cut:

    y = sum(gather(x) gather(W)')     dx = sum(gather(dy) gather(W))
                                      dW = sum(gather(dy)' gather(x))

A partition says what is cut. Those of section 3 of the paper are here; layers_grid.py has those of
grids. Models make their layers by factory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import kernels
from megatron.parallel.bucket import GradientView
from megatron.parallel.collectives import UNCUT, Cut, cut, gather_from, own_rows, sum_terms
from megatron.parallel.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron.parallel.dropout import block_attention, head_keys, layer_key, require_keys
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.regions import normalise
from megatron.parallel.sharding import ShardedModule
from megatron.parallel.traced import TracedView, traced_views

View = GradientView | TracedView
Views = Sequence[View | None]
InputGradient = Callable[[Sequence[Tensor], Sequence[Tensor]], Callable[[], Tensor]]
WeightGradients = Callable[[Sequence[Tensor], Views], list[Tensor | None]]


@dataclass(frozen=True)
class Gathered:
    """How one matmul, y = x W', is divided: x [n, in], W [out, in] and y [n, out] are cut, x and W
    are gathered before it, and y is summed after it. The backward starts all its gathers by start_*
    before it calls any of the functions that these return."""

    x: Cut = UNCUT
    weight: Cut = UNCUT
    y: Cut = UNCUT

    def outputs(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """This rank's part of each y = x W' + b."""
        gathered = [self.x.start_whole(x), *map(self.weight.start_whole, weights)]
        x = gathered.pop(0)()  # popped, so that each gathered weight is freed after its matmul
        is_sum, sums = self.y.terms.size > 1, []
        for bias in biases:
            # The bias of a sum is added after it, once.
            term = kernels.matmul(x, gathered.pop(0)(), None if is_sum else bias)
            sums.append(self.y.start_part(term))
        ys = [wait() for wait in sums]
        return [*map(add_bias, ys, biases)] if is_sum else ys

    def start_dys(self, dys: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to gather the dys; returns a function that waits for them."""
        gathered = [self.y.start_whole(dy) for dy in dys]
        return lambda: [wait() for wait in gathered]

    def start_dx(self, weights: Sequence[Tensor]) -> InputGradient:
        """Starts to gather the weights; returns a function that computes the sum of all dy W and of
        other terms, and starts its sum over ranks: this rank's part of dx."""
        gathered = [self.weight.start_whole(weight) for weight in weights]

        def compute(dys: Sequence[Tensor], others: Sequence[Tensor]) -> Callable[[], Tensor]:
            dx = input_term(dys, (gathered.pop(0)() for _ in weights))
            for other in others:
                dx.add_(other)
            return self.x.start_part(dx)

        return compute

    def start_dws(self, x: Tensor) -> WeightGradients:
        """Starts to gather x; returns a function that computes this rank's part of dW = dy' x for
        each dy, or adds it to the view and returns None for it."""
        gathered = [self.x.start_whole(x)]

        def compute(dys: Sequence[Tensor], views: Views) -> list[Tensor | None]:
            whole = gathered.pop()()
            if self.weight.terms.size > 1:
                sums = [self.weight.start_part(term) for term in weight_terms(dys, whole, views)]
                return [wait() for wait in sums]
            dws: list[Tensor | None] = []
            for dy, view in zip(dys, views, strict=True):
                if view is None:
                    dws.append(kernels.matmul(dy.T, whole.T))
                else:
                    view.add_matmul(dy, whole)
                    dws.append(None)
            return dws

        return compute


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return y
    # Not in place while compiling: torch 2.11 traces a forward that ends in place without gradient.
    return y + bias if torch.compiler.is_compiling() else y.add_(bias)


def add_matmul(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y + x W', rounded once."""
    if torch.compiler.is_compiling():
        return torch.addmm(y, x, weight.T)
    kernels.add_matmul_(y, x.T, weight.T, accumulate=True)
    return y


def input_term(dys: Sequence[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """The sum of all dy W, [n, in]."""
    dx: Tensor | None = None
    for dy, weight in zip(dys, weights, strict=True):
        dx = kernels.matmul(dy, weight.T) if dx is None else add_matmul(dx, dy, weight.T)
    assert dx is not None
    return dx


def weight_terms(dys: Sequence[Tensor], x: Tensor, views: Views) -> list[Tensor]:
    """Each dy' x, in the dtype in which ranks add them up."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dtypes = [wide if view is None else view.dtype for view in views]
    return [kernels.matmul(dy.T, x.T).to(dtype) for dy, dtype in zip(dys, dtypes, strict=True)]


OTHERS = 5  # arguments of _Multiply before the parameters


class _Multiply(torch.autograd.Function):
    """`multiply`, with dx summed over weights and ranks, once. With return_input, x is also an
    output; gradients of its later uses are part of that sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        division: Gathered,
        views: Views,
        return_input: bool,
        sequences: int,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """parameters: the weights, the biases, and handles of views, see traced.py."""
        count = len(views)
        weights, biases = parameters[:count], parameters[count : 2 * count]
        ctx.save_for_backward(x, *weights, *parameters[2 * count :])
        ctx.division, ctx.views, ctx.sequences = division, views, sequences
        ctx.set_materialize_grads(not return_input)
        ys = division.outputs(x, _matrices(weights), biases)
        return (*ys, x.view_as(x)) if return_input else tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count, division, needs_gradient = len(ctx.views), ctx.division, ctx.needs_input_grad
        x, *saved = ctx.saved_tensors
        saved, handles = saved[:count], saved[count:]
        views = traced_views(handles, ctx.views) if handles else ctx.views
        weights = _matrices(saved)
        pairs = zip(dys[:count], weights, strict=True)
        local_dys = [x.new_zeros(len(x), len(weight)) if dy is None else dy for dy, weight in pairs]
        returned_dx = [dx for dx in dys[count:] if dx is not None]
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        numbers = [number for number in range(count) if needs_gradient[OTHERS + number]]
        used_views = [views[number] for number in numbers]
        is_deferred = all(view is not None and view.deferral.is_on for view in used_views)
        # All gathers start here, in the order of use: the last one overlaps with the matmuls of dx.
        # x is gathered again, as under sequence parallelism only this rank's rows are kept.
        wait_for_dys = division.start_dys(local_dys)
        compute_dx = division.start_dx(weights) if needs_gradient[0] else None
        compute_dws = division.start_dws(x) if numbers and not is_deferred else None
        for number, dy in enumerate(local_dys):
            if needs_gradient[OTHERS + count + number]:
                dbs[number] = kernels.sum_rows(dy, ctx.sequences)
        gathered_dys = wait_for_dys()

        def hand_over(compute: WeightGradients) -> None:
            made = compute([gathered_dys[number] for number in numbers], used_views)
            for number, view, dw in zip(numbers, used_views, made, strict=True):
                if dw is not None and view is not None:
                    view.add(dw)
                elif dw is not None:
                    dws[number] = dw.view(saved[number].shape).to(saved[number].dtype)

        # The sum of dx over ranks runs during the matmuls of the gradients of the weights.
        wait_for_dx = compute_dx(gathered_dys, returned_dx) if compute_dx is not None else None
        if compute_dws is not None:
            hand_over(compute_dws)
        elif numbers:
            work = cache(lambda: hand_over(division.start_dws(x)))  # once for all of them
            for view in used_views:
                assert isinstance(view, GradientView)  # a traced one leaves this to its operator
                view.deferral.add(view, work)
        tokens = [None if view is None else view.token for view in views if handles]
        # torch 2.11 cannot trace `wait_for_dx and wait_for_dx()`.
        dx = None if wait_for_dx is None else wait_for_dx()
        return dx, *[None] * (OTHERS - 1), *dws, *dbs, *tokens


def _matrices(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.flatten(0, -2) for weight in weights]


WHOLE = Gathered()


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    views: Views,
    division: Gathered = WHOLE,
    *,
    return_input: bool = False,
    sequences: int = 1,
) -> tuple[Tensor, ...]:
    """A y [n, out] for each weight, from this rank's x [n, in], weights [..., out, in] and biases
    [..., out], whose leading dims are flattened. Raises RuntimeError under torch.autocast.

    views: where each weight's gradient is added. Autograd then gets none: it is not copied, and the
        two uses of a tied weight are not summed in a half dtype.
    return_input: also return x, after the others, for further matmuls that read it: they need no
        sum of dx, as their gradients are part of the sum over ranks here.
    sequences: see kernels.sum_rows, which adds up the gradients of the biases.
    """
    assert not return_input or division.x.over.size == 1
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        raise RuntimeError(
            "parallel layers do not work under torch.autocast: model.to(torch.bfloat16) computes "
            "in bf16, and gradients are added up in fp32 all the same"
        )
    biases = [None if bias is None else bias.flatten() for bias in biases]
    if not torch.is_grad_enabled():
        ys = division.outputs(x, _matrices(weights), biases)
        return (*ys, x) if return_input else tuple(ys)
    handles = [view and view.handle for view in views if torch.compiler.is_compiling()]
    how = division, views, return_input, sequences
    return _Multiply.apply(x, *how, *weights, *biases, *handles)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    division: Gathered = WHOLE,
    *,
    view: GradientView | None = None,
    sequences: int = 1,
) -> Tensor:
    """`multiply` by one weight."""
    return multiply(x, [weight], [bias], [view], division, sequences=sequences)[0]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, view: GradientView | None) -> Tensor:
        ctx.save_for_backward(index)
        ctx.view, ctx.shape, ctx.dtype = view, weight.shape, weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (index,) = ctx.saved_tensors
        if ctx.view is not None:
            ctx.view.add_rows(index, dy)
            return None, None, None
        # In bf16, torch's embedding on a CPU keeps a quarter of the sum of 4096 equal gradients.
        wide = torch.promote_types(ctx.dtype, torch.float32)
        dw = kernels.add_rows_(dy.new_zeros(ctx.shape, dtype=wide), index, dy)
        return None, dw.to(ctx.dtype), None


def look_up(index: Tensor, weight: Tensor, view: GradientView | None = None) -> Tensor:
    """Rows [n, h] of `weight` [v, h] at `index` [n]; their gradients are summed in fp32 or wider.
    view: see `multiply`; used only if it is in fp32 or wider."""
    return _LookUp.apply(index, weight, view if view is None or view.is_fp32 else None)


def look_up_own(ids: Tensor, own_ids: slice, weight: Tensor, view: GradientView | None) -> Tensor:
    """[n, h]: rows at ids [n] of a weight that has those of `own_ids`, zeros for other ids."""
    is_elsewhere = (ids < own_ids.start) | (ids >= own_ids.stop)
    index = (ids - own_ids.start).masked_fill(is_elsewhere, 0)
    return look_up(index, weight, view).masked_fill(is_elsewhere[:, None], 0)


STD = 0.02  # of initial weights, as in GPT-2
# Rows of a vocabulary are padded to a multiple of this on each rank: 50,257 to 51,200 at t = 8.
DIVISIBLE_BY = 128


def over(dim: int, *axes: Axis) -> tuple[tuple[int, Axis], ...]:
    """Shards of this dim, see ShardingSpec, over those of these axes that have several ranks."""
    return tuple((dim, axis) for axis in axes if axis.size > 1)


def own_width(width: int, axis: Axis) -> int:
    """Number of columns of each rank. Raises ValueError if the ranks cannot have equally many."""
    if width % axis.size:
        raise ValueError(f"width {width} is no multiple of the {axis.size} {axis.name} ranks")
    return width // axis.size


def as_rows(layer: ShardedModule, x: Tensor, *width: int) -> Tensor:
    """x [..., width] as [n, width], or ids [...] as [n]. Raises ValueError for another width, and
    for [b, s, ..] if the stream is cut by rows, as its rows would be in another order."""
    dims = 1 + len(width)
    if x.shape[x.dim() - len(width) :] == width:
        if x.dim() == dims:
            return x
        if x.dim() > dims and layer.mesh.stream.size == 1:
            return x.flatten(0, x.dim() - dims)
    columns = "".join(f", {each}" for each in width)
    shapes = f"[n{columns}]" + ("" if layer.mesh.stream.size > 1 else f" or [b, s{columns}]")
    raise ValueError(f"{type(layer).__name__} takes {shapes} on this rank, not {list(x.shape)}")


def as_before(y: Tensor, leading: torch.Size) -> Tensor:
    """y [n, ..] with its rows unflattened to the leading dims of the input."""
    return y if len(leading) == 1 else y.unflatten(0, leading)


@dataclass(frozen=True)
class Partition:
    """How a linear layer is divided: its matmul and its parameters."""

    division: Gathered = WHOLE
    inputs: tuple[Axis, ...] = ()  # axes that cut dim `in` of the weight, the major one first
    outputs: Axis = ALONE  # axis that cuts dim `out`, and so the columns of y
    x_columns: Axis = ALONE  # axis that cuts the columns of x
    db_partial: tuple[Axis, ...] = ()  # axes over which buckets sum db: y is of different tokens
    dw_partial: tuple[Axis, ...] = ()  # axes over which buckets sum dW: x is of different tokens
    # Sums y after the matmul, so that a recomputed layer can end before it.
    after: Cut | None = None


def require_mode(mesh: Mesh, partition: str, *modes: str) -> None:
    """Raises ValueError if the mesh has several ranks of another tensor-parallel mode."""
    if mesh.tensor.size > 1 and mesh.tensor_parallel_mode not in modes:
        raise ValueError(
            f"partition {partition} is of tensor-parallel mode {' or '.join(modes)}, the mesh of "
            f"{mesh.tensor_parallel_mode}: megatron.api.layer_factory makes the layers of a mesh"
        )


def column_partition(mesh: Mesh) -> Partition:
    """Columns of A: f, then the matmul with this rank's columns."""
    require_mode(mesh, "column", "1d")
    if mesh.tensor.size == 1:  # all layers share these parts, so compiled ones check them once
        return Partition()
    return Partition(Gathered(x=Cut(0, mesh.stream, mesh.tensor)), outputs=mesh.tensor)


def row_partition(mesh: Mesh) -> Partition:
    """Rows of B: the matmul with this rank's rows, then g, then the bias once."""
    require_mode(mesh, "row", "1d")
    if mesh.tensor.size == 1:
        return Partition()
    # The bias acts on a rank's own rows of y. Without db_partial its gradient would lack the rows
    # of other ranks under sequence parallelism: the loss is off by 1e-3, and no rank differs.
    inputs, g = (mesh.tensor,), Cut(0, mesh.stream, mesh.tensor)
    return Partition(WHOLE, inputs, x_columns=mesh.tensor, db_partial=(mesh.stream,), after=g)


class ParallelLinear(ShardedModule):
    """x [n, in] to [n, parts x out], both divided as the partition says.

    With parts > 1 several matmuls share one weight [parts, out, in] and are cut alike: with
    parts = 3 and out = heads x head size, a head's query, key and value live on one rank, and the
    whole weight is [Q; K; V].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        mesh: Mesh,
        in_features: int,
        out_features: int,
        partition: Partition,
        *,
        parts: int = 1,
        bias: bool = True,
        std: float = STD,
    ) -> None:
        super().__init__(mesh)
        self.division, self.after = partition.division, partition.after
        self.width = own_width(in_features, partition.x_columns)
        # A flat [parts x out, in] would have to be interleaved by head to be cut along its rows.
        shape = (parts, out_features) if parts > 1 else (out_features,)
        out = over(len(shape) - 1, partition.outputs)
        shards = out + over(len(shape), *partition.inputs)
        summed_over = (mesh.replicas, *partition.dw_partial)
        self.add_parameter("weight", (*shape, in_features), shards, std=std, partial=summed_over)
        self.add_bias(bias, shape, out, partial=(mesh.replicas, *partition.db_partial))

    def forward(self, x: Tensor) -> Tensor:
        rows, view = as_rows(self, x, self.width), self.gradient_views.get("weight")
        bias, sequences = None if self.after else self.bias, len(x) if x.dim() > 2 else 1
        y = linear(rows, self.weight, bias, self.division, view=view, sequences=sequences)
        if self.after:
            y = add_bias(sum_terms(y, self.after), self.bias)
        return as_before(y, x.shape[:-1])


class ColumnParallelLinear(ParallelLinear):
    """x [n, in] to [n, parts x out/t]. settings: parts=1, bias=True, std=0.02 of the weight."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(mesh, in_features, out_features, column_partition(mesh), **settings)


class RowParallelLinear(ParallelLinear):
    """x [n, in/t] to [n, out]. settings: see ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(mesh, in_features, out_features, row_partition(mesh), **settings)


def padded_vocabulary(vocab_size: int, divisible_by: int, mesh: Mesh) -> int:
    """Number of rows of the vocabulary, padded so that the ranks of a layer can divide them."""
    multiple = divisible_by * mesh.vocabulary.size * mesh.tokens.size
    return -(-vocab_size // multiple) * multiple


def stream_cut(mesh: Mesh) -> Cut:
    """Cut of the stream next to the vocabulary: y of the embedding, x of the head."""
    return cut(1, mesh.hidden) if mesh.hidden.size > 1 else Cut(0, mesh.stream, mesh.vocabulary)


class VocabParallelEmbedding(ShardedModule):
    """Token ids [n] to [n, h]: each rank looks up its own rows, and g sums the results. An id
    outside the vocabulary gives zeros, as no rank has its row.

    The vocabulary is padded to a multiple of `divisible_by` x the ranks. Padding rows are zero, get
    no gradient and are not part of the whole shape.
    """

    weight: nn.Parameter

    def __init__(
        self,
        mesh: Mesh,
        vocab_size: int,
        hidden_size: int,
        *,
        divisible_by: int = DIVISIBLE_BY,
        std: float = STD,
        is_tied: bool = False,
    ) -> None:
        """is_tied: whether the head uses the weight, too; then the first and the last pipeline
        stage have a copy each."""
        super().__init__(mesh)
        self.width = own_width(hidden_size, mesh.hidden)
        shards = ((0, mesh.vocabulary), *over(0, mesh.tokens))
        padded_rows = padded_vocabulary(vocab_size, divisible_by, mesh)
        summed_over = (mesh.replicas, *[mesh.embedding_group] * is_tied)
        shape, of_rows = (vocab_size, hidden_size), {"padded_rows": padded_rows, "std": std}
        self.add_parameter("weight", shape, shards, partial=summed_over, **of_rows)
        self.own_ids = self.specs["weight"].local_slices[0]  # without padding rows

    def forward(self, tokens: Tensor) -> Tensor:
        ranks = self.mesh.tokens  # each rank looks up the ids of all
        y = sum_terms(self.look_up(gather_from(as_rows(self, tokens), 0, ranks)), cut(0, ranks))
        return as_before(sum_terms(y, stream_cut(self.mesh)), tokens.shape)

    def look_up(self, ids: Tensor) -> Tensor:
        """[n, h]: this rank's rows at ids [n], and zeros for ids of other ranks."""
        return look_up_own(ids, self.own_ids, self.weight, self.gradient_views.get("weight"))


class PositionEmbedding(ShardedModule):
    """Learned embedding of positions [n], whole on every rank, to the stream [n, h]."""

    weight: nn.Parameter

    def __init__(self, mesh: Mesh, positions: int, hidden_size: int, *, std: float = STD) -> None:
        super().__init__(mesh)
        shape, shards = (positions, hidden_size), over(1, mesh.hidden)
        self.add_parameter("weight", shape, shards, std=std, partial=mesh.partial_axes)

    def forward(self, positions: Tensor) -> Tensor:
        own = own_rows(as_rows(self, positions), self.mesh.stream)
        rows = look_up(own, self.weight, self.gradient_views.get("weight"))
        return as_before(rows, positions.shape)


class VocabParallelHead(ShardedModule):
    """Output layer and its loss, tied to the word embedding or with a weight of its own.

    A tied head owns no weight and gets the embedding as an argument. So nothing that copies, casts
    or shards the model can undo the tie.
    """

    is_fused = False  # see linear_cross_entropy
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        mesh: Mesh,
        vocab_size: int,
        hidden_size: int,
        *,
        divisible_by: int = DIVISIBLE_BY,
        bias: bool = False,
        untied_std: float | None = None,
    ) -> None:
        """divisible_by: see the embedding. bias: whether each token has one. untied_std: standard
        deviation of the weight of an untied head; None for a tied one."""
        super().__init__(mesh)
        self.vocab_size, self.width = vocab_size, own_width(hidden_size, mesh.hidden)
        shards = ((0, mesh.vocabulary),)
        rows: dict[str, Any] = {"padded_rows": padded_vocabulary(vocab_size, divisible_by, mesh)}
        self.division = Gathered(stream_cut(mesh), cut(0, mesh.tokens))
        self.register_parameter("weight", None)
        if untied_std is not None:
            shape = (vocab_size, hidden_size)
            of_weight = (*shards, *over(0, mesh.tokens))
            self.add_parameter("weight", shape, of_weight, std=untied_std, **rows)
        self.add_bias(bias, (vocab_size,), shards, partial=(mesh.replicas, mesh.tokens), **rows)

    def forward(
        self,
        x: Tensor,
        embedding: VocabParallelEmbedding | None = None,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x [n, h] to this rank's logits [n, v/t], the loss of labels [n], or, with scales [n], the
        sum of scale x loss: linear_cross_entropy, which never holds all logits. Also [b, s] for n.

        embedding: the embedding whose weight a tied head uses. labels: below the vocabulary's size;
        negative labels, such as torch's -100, have no loss.
        """
        owner: Any = self if self.weight is not None else embedding
        if owner is None:
            raise ValueError("a tied head takes the embedding; untied_std= gives it its own weight")
        rows, size = as_rows(self, x, self.width), self.vocab_size
        labels, scales = (None if each is None else each.flatten() for each in (labels, scales))
        weight, view = owner.weight, owner.gradient_views.get("weight")
        if labels is not None and scales is not None:
            # Ranks exchange numbers of size n, never n x v logits.
            scales = scales * (labels >= 0)
            cuts, is_fused = (self.division.x, self.division.weight), self.is_fused
            return linear_cross_entropy(
                rows, weight, self.bias, labels, scales, size, view, *cuts, is_fused=is_fused
            )
        y = linear(rows, weight, self.bias, self.division, view=view)
        if labels is not None:
            losses = vocab_parallel_cross_entropy(y, labels, self.mesh.vocabulary, size)
            y = losses * (labels >= 0)
        return as_before(y, x.shape[:-1])


class Norm(ShardedModule):
    """Layer norm, or RMSNorm without a bias, of the stream [n, h]; if its columns are cut, ranks
    exchange the mean and the squares of each row."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, mesh: Mesh, hidden_size: int, has_bias: bool, epsilon: float, is_inside: bool
    ) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        self.hidden = mesh.inner_hidden if is_inside else mesh.hidden
        summed_over = (mesh.replicas, mesh.inner_tokens) if is_inside else mesh.partial_axes
        shape, shards = (hidden_size,), over(0, self.hidden)
        self.add_parameter("weight", shape, shards, fill=1, decay=False, partial=summed_over)
        self.add_bias(has_bias, shape, shards, partial=summed_over)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[0])
        if is_whole := self.hidden.size == 1 and not kernels.is_on_cpu(x):
            rows = x  # a GPU's compiler fuses it with sums of [b, s, h] if it has these dims, too
        if self.hidden.size > 1:
            y = normalise(rows, self.weight, self.bias, self.epsilon, self.hidden)
        elif self.bias is None:
            y = kernels.rms_norm(rows, self.weight, self.epsilon)
        else:
            y = kernels.layer_norm(rows, self.weight, self.bias, self.epsilon)
        return y if is_whole else as_before(y, x.shape[:-1])


class LayerNorm(Norm):
    """Layer norm over the last dim of the stream [n, h], computed in fp32 or wider. is_inside:
    whether x lies in the parallel region."""

    def __init__(
        self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5, is_inside: bool = False
    ) -> None:
        super().__init__(mesh, hidden_size, True, epsilon, is_inside)


class RMSNorm(Norm):
    """weight x / sqrt(mean of x^2 + epsilon) over the last dim of [n, h], in fp32 or wider (Zhang
    and Sennrich, 2019, arXiv:1910.07467). is_inside: see LayerNorm."""

    def __init__(
        self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5, is_inside: bool = False
    ) -> None:
        super().__init__(mesh, hidden_size, False, epsilon, is_inside)


class AttentionCore(nn.Module):
    """Attention of q [b, a/t, s, d] to k and v [b, g, m, d], giving [b, a/t, s, d], with dropout of
    the probabilities by coordinates, or by the kernel, which draws it. g: a/t, or fewer heads,
    which heads of q share. seed and name: see Dropout. drop: attention with dropout by coordinates,
    as block_attention."""

    def __init__(
        self,
        mesh: Mesh,
        seed: int,
        dropout: float,
        name: str,
        *,
        draws_in_kernel: bool = False,
        drop: Callable[..., Tensor] = block_attention,
    ) -> None:
        super().__init__()
        self.mesh, self.dropout, self.name = mesh, dropout, name
        self.key, self.draws_in_kernel, self.drop = layer_key(seed, name), draws_in_kernel, drop
        self.heads: int | None = None  # a, if each of several ranks may have all: [b, a, s, d]
        self.head_rank = mesh.inner_hidden.rank  # of the ranks that have other heads

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        is_causal: bool,
        dropout_keys: Tensor | None = None,
        kv_head_index: Tensor | None = None,
        has_all_tokens: bool = False,
    ) -> Tensor:
        """mask: bool [b or 1, 1, 1 or s, m], True where a query may look; None for no mask.

        is_causal: query i looks at the keys up to i; then s = m, and there is no mask.
        dropout_keys: int64 [b x s], see Dropout. kv_head_index: int64 [a/t], the head of k and v
        that each head of q uses; None if equally many adjacent heads share each. has_all_tokens:
        under context parallelism, whether q, k and v have the tokens of all ranks; otherwise see
        context.py, also for the mask.
        """
        if kv_head_index is not None:
            k, v = k[:, kv_head_index], v[:, kv_head_index]
        attend = self.attend if has_all_tokens else self.attend_over_ranks
        return attend(q, k, v, mask, is_causal, dropout_keys)

    def attend_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """Attention of this rank's tokens to those of all context ranks, of which there is one."""
        return self.attend(q, k, v, *how)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        dropout_keys: Tensor | None,
    ) -> Tensor:
        """Attention on this rank alone."""
        assert not is_causal or (mask is None and q.shape[2] == k.shape[2])
        p = self.dropout if self.training else 0.0
        is_whole = q.shape[1] == self.heads  # the kernel of each rank would draw another mask
        if p == 0.0 or (self.draws_in_kernel and not is_whole):
            return kernels.attention(q, k, v, mask, p, is_causal)
        return self.drop(q, k, v, mask, is_causal, p, self.keys(q, dropout_keys))

    def keys(self, q: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """Dropout keys of the rows of probabilities, int64 [b, a/t, s]."""
        # Heads have their numbers in the whole model, so that every layout drops the same.
        first = 0 if q.shape[1] == self.heads else self.head_rank * q.shape[1]
        heads = range(first, first + q.shape[1])
        return head_keys(require_keys(dropout_keys), self.key, heads, len(q))
