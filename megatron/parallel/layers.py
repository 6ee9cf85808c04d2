"""The parallel layers of section 3 of the paper, on the stream [n, h] of n = b x s tokens.

    n tokens on this rank   h hidden size   v padded vocabulary   t tensor-parallel size

        Y = GeLU(X A) B:    X --f--> X A_i --GeLU--> Y_i --Y_i B_i--g--> sum over ranks
                                A cut by columns         B cut by rows

A weight is stored as torch stores it, [out, in], so columns of A are rows of the stored tensor.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel import kernels
from megatron.parallel.collectives import reduce_from
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.linear import linear, look_up
from megatron.parallel.linear_cross_entropy import linear_cross_entropy
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import RandomStreams
from megatron.parallel.sharding import ShardedModule, ShardingSpec


class ColumnParallelLinear(ShardedModule):
    """x [n, in] to [n, parts x out/t]: f, then the matmul with this rank's columns.

    With parts > 1 several matmuls share one weight [parts, out, in] and are cut alike: with
    parts = 3 and out = heads x head size, a head's query, key and value live on one rank, and the
    whole weight is [Q; K; V].
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, mesh: Mesh, in_features: int, out_features: int, *, parts: int = 1, std: float
    ) -> None:
        super().__init__()
        self.axis = mesh.tensor
        stack = (parts,) if parts > 1 else ()
        cuts = ((len(stack), mesh.tensor),)
        self.add_parameter(
            "weight",
            ShardingSpec(
                shape=(*stack, out_features, in_features), cuts=cuts, partial=(mesh.data,), std=std
            ),
        )
        self.add_parameter(
            "bias",
            ShardingSpec(
                shape=(*stack, out_features), cuts=cuts, partial=(mesh.data,), decay=False
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        view = self.gradient_views.get("weight")
        return linear(x, self.weight, self.bias, axis=self.axis, view=view)


class RowParallelLinear(ShardedModule):
    """x [n, in/t] to [n, out]: the matmul with this rank's rows, then g, then the bias once."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        self.axis = mesh.tensor
        self.add_parameter(
            "weight",
            ShardingSpec(
                shape=(out_features, in_features),
                cuts=((1, mesh.tensor),),
                partial=(mesh.data,),
                std=std,
            ),
        )
        self.add_parameter(
            "bias", ShardingSpec(shape=(out_features,), partial=(mesh.data,), decay=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, None, view=self.gradient_views.get("weight"))
        return reduce_from(y, self.axis).add_(self.bias)


class Linear(ShardedModule):
    """x [n, in] to [n, out], the same on every rank: for what is small beside a layer."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        shape, partial = (out_features, in_features), (mesh.data,)
        self.add_parameter("weight", ShardingSpec(shape=shape, partial=partial, std=std))
        self.add_parameter("bias", ShardingSpec(shape=shape[:1], partial=partial, decay=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _padded(vocab_size: int, divisible_by: int, mesh: Mesh) -> int:
    """Rows of the vocabulary with the padding that lets it be cut over the tensor axis."""
    multiple = divisible_by * mesh.tensor.size
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(ShardedModule):
    """Token ids [n] to [n, h]: each rank looks up its own rows, g adds them up.

    The vocabulary is padded to a multiple of `divisible_by` x t. Padding rows are zero, get no
    gradient and are not part of the whole shape.
    """

    weight: nn.Parameter

    def __init__(
        self, mesh: Mesh, vocab_size: int, hidden_size: int, *, divisible_by: int, std: float
    ) -> None:
        super().__init__()
        self.axis = mesh.tensor
        self.vocab_size = vocab_size
        self.add_parameter(
            "weight",
            ShardingSpec(
                shape=(vocab_size, hidden_size),
                cuts=((0, mesh.tensor),),
                padded_rows=_padded(vocab_size, divisible_by, mesh),
                partial=(mesh.data,),
                std=std,
            ),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        index = tokens - self.axis.rank * rows
        is_elsewhere = (index < 0) | (index >= rows)
        view = self.gradient_views.get("weight")
        own = look_up(index.masked_fill(is_elsewhere, 0), self.weight, view)
        return reduce_from(own.masked_fill(is_elsewhere[:, None], 0), self.axis)


class PositionEmbedding(ShardedModule):
    """Learned positions [n] to [n, h], the same on every rank."""

    weight: nn.Parameter

    def __init__(self, mesh: Mesh, positions: int, hidden_size: int, *, std: float) -> None:
        super().__init__()
        self.add_parameter(
            "weight", ShardingSpec(shape=(positions, hidden_size), partial=(mesh.data,), std=std)
        )

    def forward(self, positions: Tensor) -> Tensor:
        return look_up(positions, self.weight, self.gradient_views.get("weight"))


class VocabParallelHead(ShardedModule):
    """Output layer tied to the word embedding, and its loss.

    It owns no weight and is given the embedding, so that the tie needs no care: nothing that
    copies, casts or shards the model can undo it.
    """

    bias: nn.Parameter | None

    def __init__(
        self, mesh: Mesh, vocab_size: int, *, bias_divisible_by: int | None = None
    ) -> None:
        """bias_divisible_by: as of the embedding, for a bias of each token; None for no biases."""
        super().__init__()
        self.axis = mesh.tensor
        self.vocab_size = vocab_size
        if bias_divisible_by is None:
            self.register_parameter("bias", None)
            return
        spec = ShardingSpec(
            shape=(vocab_size,),
            cuts=((0, mesh.tensor),),
            padded_rows=_padded(vocab_size, bias_divisible_by, mesh),
            partial=(mesh.data,),
            decay=False,
        )
        self.add_parameter("bias", spec)

    def forward(
        self,
        x: Tensor,
        embedding: VocabParallelEmbedding,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x [n, h] to this rank's logits [n, v/t], the loss of labels [n], or the sum of scales [n]
        x loss: as linear_cross_entropy, which never holds all logits."""
        weight, view = embedding.weight, embedding.gradient_views.get("weight")
        if labels is not None and scales is not None:
            others = (self.axis, self.vocab_size, view)
            return linear_cross_entropy(x, weight, self.bias, labels, scales, *others)
        logits = linear(x, weight, self.bias, axis=self.axis, view=view)
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels, self.axis, self.vocab_size)


class LayerNorm(ShardedModule):
    """Layer norm of [n, h], whole on every rank, computed in fp32 or wider."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        shape, partial = (hidden_size,), (mesh.data,)
        spec = ShardingSpec(shape=shape, partial=partial, fill=1, decay=False)
        self.add_parameter("weight", spec)
        self.add_parameter("bias", ShardingSpec(shape=shape, partial=partial, decay=False))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.epsilon)


class ApexLayerNorm(LayerNorm):
    """The same by the kernel of NVIDIA apex's FusedLayerNorm, which computes in fp32 too."""

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float) -> None:
        super().__init__(mesh, hidden_size, epsilon=epsilon)
        self.kernel = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.kernel(x, self.weight, self.bias, self.weight.shape, self.epsilon)
        return normalised


LAYER_NORMS = {"torch": LayerNorm, "apex": ApexLayerNorm}


class SharedDropout(nn.Module):
    """Dropout outside the parallel region: the same draw on every tensor-parallel rank."""

    def __init__(self, streams: RandomStreams, p: float, name: str) -> None:
        """name: of the random numbers; another one draws others."""
        super().__init__()
        self.streams, self.p, self.name = streams, p, name

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        with self.streams.shared(self.name):
            return kernels.dropout(x, self.p)


class AttentionCore(nn.Module):
    """q [b, a/t, s, d], k and v [b, a/t, m, d] to [b, a/t, s, d].

    Dropout differs between ranks, as heads do.
    """

    def __init__(self, streams: RandomStreams, dropout: float, name: str) -> None:
        """name: as of SharedDropout."""
        super().__init__()
        self.streams, self.dropout, self.name = streams, dropout, name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """mask: bool [b or 1, 1, s, m], True where a query may look.

        None: the causal mask where s = m; a single query, the last of m tokens, sees all.
        """
        is_causal = mask is None and q.shape[2] > 1
        assert not is_causal or q.shape[2] == k.shape[2]
        dropout = self.dropout if self.training else 0.0
        with self.streams.per_rank(self.name) if dropout else nullcontext():
            return kernels.attention(q, k, v, mask, dropout, is_causal)
