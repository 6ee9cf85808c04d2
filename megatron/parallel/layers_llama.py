"""Layers of Llama that GPT-2 and BERT lack: shared key/value heads, rotary positions, gated
activations. RMSNorm is in layers.py."""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import kernels, layers
from megatron.parallel.layers import STD, Partition, over
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import ShardedModule


def key_value_heads_in_use(
    heads: int, key_value_heads: int, axis: Axis
) -> tuple[slice, list[int] | None]:
    """(key/value heads that the query heads of this rank use; the index in them for each query
    head, or None if equally many adjacent query heads use each)."""
    share = heads // axis.size
    own = range(axis.rank * share, (axis.rank + 1) * share)
    used = [query * key_value_heads // heads for query in own]
    index = [head - used[0] for head in used]
    is_even = len({index.count(head) for head in index}) == 1
    return slice(used[0], used[-1] + 1), None if is_even else index


class GroupedQueryLinear(ShardedModule):
    """x [n, h] to queries [n, a/t x d], keys and values [n, g x d], with fewer key/value heads than
    query heads: several queries share one (Ainslie et al., 2023, arXiv:2305.13245).

        heads of the queries      0 1 2 3 4 5 | 6 7 8 9 10 11      a = 12, t = 2
        their keys and values     0 0 0 0 1 1 | 1 1 2 2 2  2       3 of them, g = 2 on each rank

    Where t divides the number of key/value heads, their weight is cut like that of the queries.
    Where it does not, every rank holds it whole and multiplies by the rows that its queries need,
    so that its gradient is partial over the tensor axis.

    kv_head_index: int64 [a/t], the one of the g heads that each query head of this rank uses; None
    if equally many adjacent query heads share each.
    """

    query: nn.Parameter
    query_bias: nn.Parameter | None
    key_value: nn.Parameter
    key_value_bias: nn.Parameter | None
    kv_head_index: Tensor | None

    def __init__(
        self,
        mesh: Mesh,
        hidden_size: int,
        *,
        heads: int,
        key_value_heads: int,
        head_size: int,
        bias: bool = True,
        std: float = STD,
        partition: Partition | None = None,
    ) -> None:
        """partition: by default `column_partition`, that of 1D."""
        super().__init__(mesh)
        partition = partition or layers.column_partition(mesh)
        ranks, self.head_size = mesh.inner_hidden, head_size
        if heads % key_value_heads or heads % ranks.size:
            raise ValueError(
                f"{heads} heads are no multiple of {key_value_heads} key/value heads and of "
                f"{ranks.size} {ranks.name} ranks"
            )
        self.division, db_partial = partition.division, partition.db_partial
        self.width = layers.own_width(hidden_size, partition.x_columns)
        size = heads * head_size
        shards: tuple[tuple[int, Axis], ...] = ((0, ranks),)
        summed_over: tuple[Axis, ...] = (mesh.replicas,)
        of_weight = shards + over(1, *partition.inputs)
        self.add_parameter("query", (size, hidden_size), of_weight, partial=summed_over, std=std)
        self.add_bias(bias, (size,), shards, "query_bias", partial=(*summed_over, *db_partial))

        own, used = key_value_heads_in_use(heads, key_value_heads, ranks)
        self.kv_head_index = None if used is None else torch.tensor(used, device="cpu")
        self.rows: slice | None = None  # of the whole key/value weight, if every rank has it
        size, shards = key_value_heads * head_size, ((1, ranks),)
        if key_value_heads % ranks.size:
            self.rows = slice(own.start * head_size, own.stop * head_size)
            shards, summed_over = (), (mesh.replicas, ranks)
        of_weight = shards + over(2, *partition.inputs)
        self.add_parameter(
            "key_value", (2, size, hidden_size), of_weight, partial=summed_over, std=std
        )
        self.add_bias(
            bias, (2, size), shards, "key_value_bias", partial=(*summed_over, *db_partial)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight: Tensor = self.key_value
        bias: Tensor | None = self.key_value_bias
        views = [self.gradient_views.get("query"), self.gradient_views.get("key_value")]
        if self.rows is not None:  # autograd adds the gradient of the rows to that of the whole
            weight, views[1] = weight[:, self.rows], None
            bias = None if bias is None else bias[:, self.rows]
        weights, biases = [self.query, weight], [self.query_bias, bias]
        rows = layers.as_rows(self, x, self.width)
        sequences = len(x) if x.dim() > 2 else 1
        q, kv = layers.multiply(rows, weights, biases, views, self.division, sequences=sequences)
        q, k, v = (layers.as_before(each, x.shape[:-1]) for each in (q, *kv.chunk(2, dim=1)))
        return q, k, v


class RotaryEmbedding(nn.Module):
    """Cosine and sine that rotate each pair of channels (c, c + d/2) of a head by position x
    base^(-2c/d) (Su et al., 2021, arXiv:2104.09864; the order of channels is Llama's).

    Frequencies are fp32 in every model, as in all other implementations, so that they agree.
    """

    def __init__(
        self,
        head_size: int,
        *,
        base: float = 10_000.0,
        scaling: tuple[float, float, float, float] | None = None,
    ) -> None:
        """scaling: (factor, low, high, positions) of a model that reads longer texts than the
        `positions` it was first trained on (Llama 3.1). A frequency with fewer than `low` turns
        over these is divided by factor, one with more than `high` stays, and in between the share
        that stays grows linearly."""
        super().__init__()
        channels = torch.arange(0, head_size, 2, device="cpu", dtype=torch.float32)
        frequencies = 1.0 / base ** (channels / head_size)
        if scaling is not None:
            factor, low, high, positions = scaling
            turns = positions / (2 * pi / frequencies)
            stays = ((turns - low) / (high - low)).clamp(0, 1)
            frequencies = (1 - stays) * frequencies / factor + stays * frequencies
        self.frequencies = frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [b, 1, s, d/2], in fp32 or wider. positions: int64 [b, s]. dtype: dtype
        of the heads."""
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = self.frequencies.to(positions.device)
        if not positions.is_meta:
            self.frequencies = frequencies  # a GPU waits for them only once
        angles = positions[:, None, :, None].to(wide) * frequencies.to(wide)
        return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        # Blocks on a CPU take heads one after another. GPU kernels take any strides and return
        # those of the queries, so one matmul's result reaches the next without a copy.
        is_kept = not kernels.is_on_cpu(x)
        layout = torch.preserve_format if is_kept else torch.contiguous_format
        return _turn(x, cos, sin, torch.empty_like(x, memory_format=layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dx = dy.new_empty(dy.transpose(1, 2).shape).transpose(1, 2)  # strides of a matmul's result
        return _turn(dy, cos, -sin, dx), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> Tensor:
    (first, second), (one, two) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    if x.dtype == cos.dtype:
        torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=two).addcmul_(first, sin)
    else:
        one.copy_((first * cos).addcmul_(second.to(sin.dtype), sin, value=-1))
        two.copy_((second * cos).addcmul_(first.to(sin.dtype), sin))
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [b, a, s, d] rotated by cos and sin, see RotaryEmbedding."""
    if torch.compiler.is_compiling():  # it makes one kernel, and cannot trace a strided `out`
        # Both y and dx have the memory order of a matmul's result, [b, s, a, d]: no copy of them.
        x, cos, sin = (each.transpose(1, 2) for each in (x, cos, sin))
        halves = x.unflatten(-1, (2, -1)).to(cos.dtype)
        turned = halves * cos[..., None, :] + halves.flip(-2) * torch.stack((-sin, sin), dim=-2)
        return turned.flatten(-2).to(x.dtype).transpose(1, 2)
    return _Rotate.apply(x, cos, sin)


Activation = Callable[[Tensor], Tensor]


class _Gated(torch.autograd.Function):
    """Saves only its input for the backward, not the activated gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        gate, y = x.chunk(2, dim=-1)
        return by(gate).mul_(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, y = x.chunk(2, dim=-1)
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.by(gate)
        dx = torch.empty_like(x)
        d_gate, dy = dx.chunk(2, dim=-1)
        d_gate.copy_(torch.autograd.grad(activated, gate, d_out * y)[0])
        torch.mul(d_out, activated.detach(), out=dy)
        return dx, None


def gated(x: Tensor, by: Activation) -> Tensor:
    """by(first half of the columns of x) x the second half (Shazeer, 2020, arXiv:2002.05202)."""
    if torch.compiler.is_compiling():
        gate, y = x.chunk(2, dim=-1)
        return by(gate) * y
    return _Gated.apply(x, by)
