"""The parallel layers of section 3 of the paper, on the stream [n, h] of n = b x s tokens.

    n tokens on this rank   h hidden size   v padded vocabulary   t tensor-parallel size

Where the stream is not cut by rows, layers take [b, s, h] as well, and token ids [b, s].

        Y = GeLU(X A) B:    X --f--> X A_i --GeLU--> Y_i --Y_i B_i--g--> sum over ranks
                                A cut by columns         B cut by rows

A weight is stored as torch stores it, [out, in], so columns of A are rows of the stored tensor.
`linear` and `look_up` are what the layers compute with; factory.py is what models make them by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import kernels
from megatron.parallel.block_attention import block_attention
from megatron.parallel.collectives import (
    own_rows,
    reduce_from,
    start_gather,
    start_sum,
)
from megatron.parallel.cross_entropy import (
    HeadAxes,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron.parallel.dropout import head_keys, known, layer_key
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.sharding import GradientView, Modes, ShardedModule


class _Linear(torch.autograd.Function):
    """y = x W' + b    dx = sum over ranks of dy W    dW = dy' x    db = sum of the rows of dy

    With several weights a y of each; dx is the sum of theirs, and crosses the ranks once. Where x
    is passed on to further readers, what they send back is part of that sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        stream: Axis,
        views: Sequence[GradientView | None],
        passes_on: bool,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """parameters: the weights, then the biases."""
        weights, biases = parameters[: len(views)], parameters[len(views) :]
        ctx.save_for_backward(x, *weights)
        ctx.axis, ctx.stream, ctx.views = axis, stream, views
        ctx.bias_shapes = [None if bias is None else bias.shape for bias in biases]
        ctx.set_materialize_grads(not passes_on)
        outputs = _outputs(start_gather(x, stream)(), weights, biases)
        return (*outputs, x.view_as(x)) if passes_on else outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        views, stream, needed = ctx.views, ctx.stream, ctx.needs_input_grad
        passed = dys[len(weights) :]  # None of what has no readers
        dys = tuple(
            x.new_zeros(len(x), weight.shape[:-1].numel()) if dy is None else dy
            for dy, weight in zip(dys, weights, strict=False)
        )
        dws: list[Tensor | None] = [None] * len(dys)
        dbs, dx, summed = dws.copy(), None, None
        now = [number for number in range(len(dys)) if needed[5 + number]]
        if all((view := views[number]) is not None and view.deferral.is_on for number in now):
            whole = cache(lambda: start_gather(x, stream)())  # once, later, for all
            for number in now:
                view = views[number]
                view.deferral.add(view, partial(_add_later, view, dys[number], whole))
            now = []
        for number, dy in enumerate(dys):
            if needed[5 + len(dys) + number]:
                dbs[number] = dy.sum(0).view(ctx.bias_shapes[number])
        gathered = start_gather(x, stream) if now else None  # again, beside dx, rather than kept
        if needed[0]:
            pairs = zip(dys, weights, strict=True)
            dx, *others = (kernels.matmul(dy, weight.flatten(0, -2).T) for dy, weight in pairs)
            for other in (*others, *passed):
                if other is not None:
                    dx.add_(other)
            summed = start_sum(dx, ctx.axis, stream)  # beside dw
        if gathered is not None:
            x = gathered()
            for number in now:
                if (view := views[number]) is not None:
                    view.add_matmul(dys[number], x)
                else:
                    dw = kernels.matmul(dys[number].T, x.T)
                    dws[number] = dw.view(weights[number].shape)
        if summed is not None:
            dx = summed()
        return dx, None, None, None, None, *dws, *dbs


def _add_later(view: GradientView, dy: Tensor, x: Callable[[], Tensor]) -> None:
    view.add_matmul(dy, x())


def _outputs(
    x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    return tuple(
        kernels.matmul(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
        for weight, bias in zip(weights, biases, strict=True)
    )


def usable_views(x: Tensor, views: Sequence[GradientView | None]) -> Sequence[GradientView | None]:
    """The views that the backward of a matmul with x may add to. Raises RuntimeError under
    torch.autocast."""
    if torch.compiler.is_compiling():  # a compiled backward cannot write into buckets
        return (None,) * len(views)
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        raise RuntimeError(
            "parallel layers do not work under torch.autocast: model.to(torch.bfloat16) computes "
            "in bf16, and gradients are added up in fp32 all the same"
        )
    return views


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    axis: Axis = ALONE,
    stream: Axis = ALONE,
    views: Sequence[GradientView | None],
    passes_on: bool = False,
) -> tuple[Tensor, ...]:
    """x [n, in], weights [..., out, in] and biases [..., out], their leading dims flattened, to a
    [n, out] of each.

    axis: over which x is replicated, and its gradient summed while that of the weights is computed
        (f, section 3 of the paper).
    stream: over which the rows of x are cut instead; then it is `axis`, and x is [n/t, in].
    views: where each weight's gradient is added. Autograd then gets none: it is
        not copied, and of a tied weight's two uses there is no sum in a narrow dtype.
    passes_on: return x, too, behind the others, for further matmuls that read it: they need no
        axis, as their gradients cross the ranks with that of this one.
    """
    views = usable_views(x, views)
    if not torch.is_grad_enabled():
        outputs = _outputs(start_gather(x, stream)(), weights, biases)
        return (*outputs, x) if passes_on else outputs
    return _Linear.apply(x, axis, stream, views, passes_on, *weights, *biases)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: Axis = ALONE,
    stream: Axis = ALONE,
    view: GradientView | None = None,
) -> Tensor:
    """`linears` of one weight."""
    (y,) = linears(x, [weight], [bias], axis=axis, stream=stream, views=[view])
    return y


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
        wide = torch.promote_types(ctx.dtype, torch.float32)
        dw = kernels.add_rows_(dy.new_zeros(ctx.shape, dtype=wide), index, dy)
        return None, dw.to(ctx.dtype), None


def look_up(index: Tensor, weight: Tensor, view: GradientView | None = None) -> Tensor:
    """The rows of `weight` [v, h] at `index` [n], [n, h]; view: as of `linear`, if it is wide.

    Gradients of a row are added up in fp32 or wider: in bf16, torch's embedding on a CPU keeps a
    quarter of the sum of 4096 equal ones.
    """
    rows: Tensor = _LookUp.apply(index, weight, view if view is None or view.is_wide else None)
    return rows


STD = 0.02  # of initial weights, as of GPT-2
DIVISIBLE_BY = 128  # what the rows of a vocabulary are padded to, on each rank


def over(dim: int, *axes: Axis) -> tuple[tuple[int, Axis], ...]:
    """Shards of this dim, as of ShardingSpec, over those of the axes that have several ranks."""
    return tuple((dim, axis) for axis in axes if axis.size > 1)


def own_width(width: int, axis: Axis) -> int:
    """Of this many columns those of a rank. Raises ValueError where they cannot be shared out."""
    if width % axis.size:
        raise ValueError(f"width {width} is no multiple of the {axis.size} {axis.name} ranks")
    return width // axis.size


def as_rows(layer: ShardedModule, x: Tensor, *width: int) -> Tensor:
    """x [..., width] as [n, width], or ids [...] as [n]. Raises ValueError for another width, and
    for [b, s, ..] where the stream is cut by rows, which are then in another order."""
    dims = 1 + len(width)
    is_cut = layer.mesh.stream.size > 1
    tail = x.shape[x.dim() - len(width) :]
    if x.dim() < dims or tail != width or (x.dim() > dims and is_cut):
        shapes = (["n", *width], ["b", "s", *width])[: 1 if is_cut else 2]
        wanted = " or ".join(f"[{', '.join(map(str, each))}]" for each in shapes)
        raise ValueError(f"{type(layer).__name__} takes {wanted} on this rank, not {list(x.shape)}")
    return x if x.dim() == dims else x.flatten(0, x.dim() - dims)


def as_before(y: Tensor, leading: torch.Size) -> Tensor:
    """y [n, ..] with the leading dims of what its rows were made of."""
    return y if len(leading) == 1 else y.unflatten(0, leading)


class ColumnParallelLinear(ShardedModule):
    """x [n, in] to [n, parts x out/t]: f, then the matmul with this rank's columns.

    With parts > 1 several matmuls share one weight [parts, out, in] and are cut alike: with
    parts = 3 and out = heads x head size, a head's query, key and value live on one rank, and the
    whole weight is [Q; K; V].
    """

    modes: ClassVar[Modes] = ("1d",)

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
        rows = (parts, out_features) if parts > 1 else (out_features,)
        shards = ((len(rows) - 1, mesh.tensor),)
        self.add_parameter("weight", (*rows, in_features), shards, std=std)
        self.add_bias(bias, rows, shards)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[-1])
        mesh, view = self.mesh, self.gradient_views.get("weight")
        axes = {"axis": mesh.tensor, "stream": mesh.stream}
        y = linear(rows, self.weight, self.bias, **axes, view=view)
        return as_before(y, x.shape[:-1])


class RowParallelLinear(ShardedModule):
    """x [n, in/t] to [n, out]: the matmul with this rank's rows, then g, then the bias once."""

    modes: ClassVar[Modes] = ("1d",)

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        mesh: Mesh,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        std: float = STD,
    ) -> None:
        super().__init__(mesh)
        shards = ((1, mesh.tensor),)
        self.add_parameter("weight", (out_features, in_features), shards, std=std)
        self.add_bias(bias, (out_features,), partial=mesh.of_stream)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[-1])
        y = linear(rows, self.weight, None, view=self.gradient_views.get("weight"))
        y = reduce_from(y, self.mesh.tensor, self.mesh.stream)
        return as_before(y if self.bias is None else y.add_(self.bias), x.shape[:-1])


def padded_vocabulary(vocab_size: int, divisible_by: int, mesh: Mesh) -> int:
    """Rows of the vocabulary with the padding that lets it be cut over the ranks of a layer."""
    multiple = divisible_by * mesh.vocabulary.size * mesh.tokens.size
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(ShardedModule):
    """Token ids [n] to [n, h]: each rank looks up its own rows, g adds them up. An id outside of
    the vocabulary gives zeros: no rank has its row.

    The vocabulary is padded to a multiple of `divisible_by` x the ranks. Padding rows are zero, get
    no gradient and are not part of the whole shape.
    """

    modes: ClassVar[Modes] = ("1d",)

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
        """is_tied: whether the head uses the weight, too, of which the first and the last pipeline
        stage have a copy each."""
        super().__init__(mesh)
        self.width = own_width(hidden_size, mesh.hidden)
        shards = ((0, mesh.vocabulary), *over(0, mesh.tokens))
        padded_rows = padded_vocabulary(vocab_size, divisible_by, mesh)
        partial = (mesh.replicas, *[mesh.embedding_group] * is_tied)
        shape, of_rows = (vocab_size, hidden_size), {"padded_rows": padded_rows, "std": std}
        self.add_parameter("weight", shape, shards, partial=partial, **of_rows)
        self.own_ids = self.specs["weight"].local_slices[0]  # without those of padding rows

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.look_up(as_rows(self, tokens))
        return as_before(reduce_from(own, self.mesh.tensor, self.mesh.stream), tokens.shape)

    def look_up(self, ids: Tensor) -> Tensor:
        """This rank's rows at ids [n]; of others' ids zeros: [n, h]."""
        is_elsewhere = (ids < self.own_ids.start) | (ids >= self.own_ids.stop)
        index = (ids - self.own_ids.start).masked_fill(is_elsewhere, 0)
        own = look_up(index, self.weight, self.gradient_views.get("weight"))
        return own.masked_fill(is_elsewhere[:, None], 0)


class PositionEmbedding(ShardedModule):
    """Learned positions [n], whole on every rank, to the stream [n, h]."""

    weight: nn.Parameter

    def __init__(self, mesh: Mesh, positions: int, hidden_size: int, *, std: float = STD) -> None:
        super().__init__(mesh)
        shape, shards = (positions, hidden_size), over(1, mesh.hidden)
        self.add_parameter("weight", shape, shards, std=std, partial=mesh.of_stream)

    def forward(self, positions: Tensor) -> Tensor:
        own = own_rows(as_rows(self, positions), self.mesh.stream)
        rows = look_up(own, self.weight, self.gradient_views.get("weight"))
        return as_before(rows, positions.shape)


class VocabParallelHead(ShardedModule):
    """Output layer and its loss, tied to the word embedding or with a weight of its own.

    Tied, it owns no weight and is given the embedding, so that the tie needs no care: nothing that
    copies, casts or shards the model can undo it.
    """

    modes: ClassVar[Modes] = ("1d",)

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
        """divisible_by: as of the embedding. bias: of each token. untied_std: standard deviation of
        the weight of an untied head; None for a tied one."""
        super().__init__(mesh)
        self.vocab_size, self.width = vocab_size, own_width(hidden_size, mesh.hidden)
        shards = ((0, mesh.vocabulary),)
        rows: dict[str, Any] = {"padded_rows": padded_vocabulary(vocab_size, divisible_by, mesh)}
        self.axes = HeadAxes(mesh.vocabulary, mesh.stream, mesh.hidden, mesh.tokens)
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
        """x [n, h] to this rank's logits [n, v/t], the loss of labels [n], or the sum of scales [n]
        x loss: as linear_cross_entropy, which never holds all logits. So too with [b, s] for n.

        embedding: that a tied head shares its weight with. labels: below the vocabulary's size;
        negative ones, as torch's -100, have no loss.
        """
        owner: Any = self if self.weight is not None else embedding
        if owner is None:
            raise ValueError("a tied head takes the embedding; untied_std= gives it its own weight")
        rows = as_rows(self, x, self.width)
        labels, scales = (None if each is None else each.flatten() for each in (labels, scales))
        weight, view = owner.weight, owner.gradient_views.get("weight")
        if labels is not None and scales is not None:
            scales = scales * (labels >= 0)
            return linear_cross_entropy(
                rows, weight, self.bias, labels, scales, self.axes, self.vocab_size, view
            )
        y = self.multiply(rows, weight, view)
        if labels is not None:
            axis = self.mesh.vocabulary
            y = vocab_parallel_cross_entropy(y, labels, axis, self.vocab_size) * (labels >= 0)
        return as_before(y, x.shape[:-1])

    def multiply(self, x: Tensor, weight: Tensor, view: GradientView | None) -> Tensor:
        """Rows of x to logits [n, v/t]."""
        axis, stream = self.mesh.tensor, self.mesh.stream
        return linear(x, weight, self.bias, axis=axis, stream=stream, view=view)


class LayerNorm(ShardedModule):
    """Layer norm of the stream [n, h], computed in fp32 or wider."""

    modes: ClassVar[Modes] = ("1d",)

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        self.hidden, partial = self.axes(mesh)
        shape, shards = (hidden_size,), over(0, self.hidden)
        self.add_parameter("weight", shape, shards, fill=1, decay=False, partial=partial)
        self.add_parameter("bias", shape, shards, decay=False, partial=partial)

    def axes(self, mesh: Mesh) -> tuple[Axis, tuple[Axis, ...]]:
        """(that columns are cut over, that gradients are partial over)."""
        return mesh.hidden, mesh.of_stream

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[0])
        y = kernels.layer_norm(rows, self.weight, self.bias, self.epsilon)
        return as_before(y, x.shape[:-1])


class ApexLayerNorm(LayerNorm):
    """The same by the kernel of NVIDIA apex's FusedLayerNorm, which computes in fp32 too."""

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh, hidden_size, epsilon=epsilon)
        self.kernel = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.kernel(x, self.weight, self.bias, self.weight.shape, self.epsilon)
        return normalised


class AttentionCore(nn.Module):
    """q [b, a/t, s, d], k and v [b, g, m, d] to [b, a/t, s, d], with dropout of the probabilities:
    by coordinates, or in the kernel, which draws it. g: a/t, or fewer that heads of q share."""

    heads: int | None = None  # a, where each of several ranks may have all: [b, a, s, d]

    def __init__(
        self, mesh: Mesh, seed: int, dropout: float, name: str, *, draws_in_kernel: bool = False
    ) -> None:
        """seed, name: as of Dropout."""
        super().__init__()
        self.mesh, self.dropout, self.name = mesh, dropout, name
        self.key, self.draws_in_kernel = layer_key(seed, name), draws_in_kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        rows: Tensor | None = None,
        of_query: Tensor | None = None,
    ) -> Tensor:
        """mask: bool [b or 1, 1, 1 or s, m], True where a query may look; None for no mask.

        is_causal: query i looks at the keys up to i; then s = m, and there is no mask. rows: int64
        [b x s], as of Dropout. of_query: int64 [a/t], which of the g heads each of q uses; None
        where neighbours share one, as many each.
        """
        assert not is_causal or (mask is None and q.shape[2] == k.shape[2])
        if of_query is not None:
            k, v = k[:, of_query], v[:, of_query]
        p = self.dropout if self.training else 0.0
        is_whole = q.shape[1] == self.heads  # in the kernel each rank would draw another mask
        if p == 0.0 or (self.draws_in_kernel and not is_whole):
            return kernels.attention(q, k, v, mask, p, is_causal)
        first = 0 if is_whole else self.mesh.inner_hidden.rank * q.shape[1]
        keys = head_keys(known(rows), self.key, range(first, first + q.shape[1]), len(q))
        return block_attention(q, k, v, mask, is_causal, p, keys)
