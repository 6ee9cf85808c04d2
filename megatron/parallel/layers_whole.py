"""Small linear layers outside the parallel region, whose weights in 1D are whole on every rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron.parallel.collectives import Cut, own_rows
from megatron.parallel.layers import Gathered, ParallelLinear, Partition, require_mode
from megatron.parallel.mesh import Mesh
from megatron.parallel.regions import gather_with_gradient


class Linear(ParallelLinear):
    """x [n, in] to [n, out] outside the parallel region, for matmuls that are small next to a
    layer. settings: see ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        require_mode(mesh, "Linear", "1d")
        partition = Partition(x_rows=(mesh.stream,), y_rows=(mesh.stream,))
        super().__init__(mesh, in_features, out_features, partition, **settings)


class InputLinear(ParallelLinear):
    """x [n, in], whole on every rank that reads it, to the stream [n, out/c]. settings: see
    ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        rows, division = mesh.of_stream[1:], Gathered(x=Cut(terms=mesh.hidden))
        partition = Partition(division, outputs=mesh.hidden, x_rows=rows, y_rows=rows)
        super().__init__(mesh, in_features, out_features, partition, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(own_rows(x, self.mesh.stream))


class OutputLinear(ParallelLinear):
    """The stream [n, in/c] to [n, out], whole on every rank that reads these tokens. settings: see
    ColumnParallelLinear."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, **settings: Any) -> None:
        rows, division = mesh.of_stream[1:], Gathered(y=Cut(terms=mesh.hidden))
        axis = mesh.hidden
        partition = Partition(division, (axis,), x_columns=axis, x_rows=rows, y_rows=rows)
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
