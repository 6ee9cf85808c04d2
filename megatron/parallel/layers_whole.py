"""Small linear layers outside the parallel region, whose weights in 1D are whole on every rank."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import gather_with_gradient, own_rows
from megatron.parallel.layers import STD, as_before, as_rows, over
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import Modes, ShardedModule


class Linear(ShardedModule):
    """x [n, in] to [n, out] outside the parallel region: for what is small beside a layer."""

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
        shape, partial = (out_features, in_features), mesh.of_stream
        shards = self.shards(mesh)
        of_bias = [each for each in shards if each[0] == 0]
        self.add_parameter("weight", shape, shards, std=std, partial=partial)
        self.add_bias(bias, (out_features,), tuple(of_bias), partial=partial)

    def shards(self, mesh: Mesh) -> tuple[tuple[int, Axis], ...]:
        """Of the weight: none, as x is whole."""
        return ()

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(self, x, self.weight.shape[1])
        return as_before(F.linear(rows, self.weight, self.bias), x.shape[:-1])


class InputLinear(Linear):
    """x [n, in], whole on every rank, to the stream [n, out]."""

    def shards(self, mesh: Mesh) -> tuple[tuple[int, Axis], ...]:
        return over(0, mesh.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(own_rows(x, self.mesh.stream))


class OutputLinear(Linear):
    """The stream [n, in] to [n, out], whole on every rank."""

    def shards(self, mesh: Mesh) -> tuple[tuple[int, Axis], ...]:
        return over(1, mesh.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return gather_with_gradient(super().forward(x), 0, self.mesh.stream)


class Gather(nn.Module):
    """The stream [n, h] whole on every rank, for layers that all ranks compute alike."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return gather_with_gradient(x, 0, self.mesh.stream)
