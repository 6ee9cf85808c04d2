"""Layers of Llama that GPT-2 and BERT lack: shared key/value heads, RMSNorm, rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import copy_to
from megatron.parallel.layers import STD, as_before, as_rows, linear
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import ShardedModule


class GroupedQueryLinear(ShardedModule):
    """x [n, h] to queries [n, a/t x d], keys and values [n, g x d], with fewer key/value heads than
    query heads: a/g queries share one (Ainslie et al., 2023, arXiv:2305.13245).

        heads of the queries      0 1 2 3 4 5 | 6 7 8 9 10 11      a = 12, t = 2
        their keys and values     0 0 0 0 1 1 | 1 1 2 2 2  2       3 of them, g = 2 on each rank

    Where t divides the number of key/value heads, their weight is cut like that of the queries.
    Where it does not, every rank holds it whole and multiplies by the rows that its queries need,
    so that its gradient is partial over the tensor axis.

    of_query: int64 [a/t], which of the g heads each query head of this rank uses.
    """

    query: nn.Parameter
    query_bias: nn.Parameter | None
    key_value: nn.Parameter
    key_value_bias: nn.Parameter | None
    of_query: Tensor

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
    ) -> None:
        super().__init__(mesh)
        tensor, self.head_size = mesh.tensor, head_size
        if heads % key_value_heads or heads % tensor.size:
            raise ValueError(
                f"{heads} heads are no multiple of {key_value_heads} key/value heads and of "
                f"{tensor.size} tensor-parallel ranks"
            )
        own = range(tensor.rank * heads // tensor.size, (tensor.rank + 1) * heads // tensor.size)
        needed = [head * key_value_heads // heads for head in own]
        self.of_query = torch.tensor([head - needed[0] for head in needed], device="cpu")
        self.rows: slice | None = None
        shards: tuple[tuple[int, Axis], ...] = ((1, tensor),)
        partial_axes: tuple[Axis, ...] = (mesh.replicas,)
        if key_value_heads % tensor.size:
            self.rows = slice(needed[0] * head_size, (needed[-1] + 1) * head_size)
            shards, partial_axes = (), (mesh.replicas, tensor)
        size = heads * head_size
        self.add_parameter("query", (size, hidden_size), ((0, tensor),), std=std)
        self.add_bias(bias, (size,), ((0, tensor),), "query_bias")
        size = key_value_heads * head_size
        self.add_parameter(
            "key_value", (2, size, hidden_size), shards, partial=partial_axes, std=std
        )
        self.add_bias(bias, (2, size), shards, "key_value_bias", partial=partial_axes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leading = x.shape[:-1]
        x = copy_to(as_rows(self, x, self.query.shape[1]), self.mesh.tensor, self.mesh.stream)
        q = linear(x, self.query, self.query_bias, view=self.gradient_views.get("query"))
        weight: Tensor = self.key_value
        bias: Tensor | None = self.key_value_bias
        view = None
        if self.rows is None:
            view = self.gradient_views.get("key_value")
        else:  # autograd adds the gradient of the rows to that of the whole
            weight = weight[:, self.rows]
            bias = None if bias is None else bias[:, self.rows]
        k, v = linear(x, weight, bias, view=view).chunk(2, dim=1)
        q, k, v = (as_before(each, leading) for each in (q, k, v))
        return q, k, v


class RMSNorm(ShardedModule):
    """x / sqrt(mean of x^2 + epsilon) over the last dim of [n, h] in fp32 or wider, then x weight
    in the dtype of x (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    weight: nn.Parameter

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        shape = (hidden_size,)
        self.add_parameter("weight", shape, fill=1, decay=False, partial=mesh.of_stream)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[0])
        wide = rows.to(torch.promote_types(x.dtype, torch.float32))
        y = F.rms_norm(wide, self.weight.shape, eps=self.epsilon).to(x.dtype) * self.weight
        return as_before(y, x.shape[:-1])


class RotaryEmbedding(nn.Module):
    """Turns each pair of channels (c, c + d/2) of a head by position x base^(-2c/d) (Su et al.,
    2021, arXiv:2104.09864; the order of channels is Llama's)."""

    def __init__(self, head_size: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_size, self.base = head_size, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [b, a, s, d]. positions: int64 [b, s]. Angles are fp32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        channels = torch.arange(0, self.head_size, 2, device=x.device, dtype=wide)
        frequencies = self.base ** (-channels / self.head_size)
        angles = positions[:, None, :, None].to(wide) * frequencies  # [b, 1, s, d/2]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.to(wide).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(x.dtype)
