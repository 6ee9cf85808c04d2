"""The parallel region in 3D (Bian et al., 2021, arXiv:2105.14450), on l x l x l ranks.

             rank (i, j, k) holds                 gathered       summed
    x        tokens of (i, j), [n, h/l by k]      over j, to those of i
    A        [out/l by j, in/l by k and i]        over i
    X A      tokens of (i, k), [n, out/l by j]                   over k
    B        [out/l by k, in/l by j and i]        over i
    X A B    tokens of (i, j), [n, h/l by k]      X A over k     over j

i, j and k are the mesh's axes `weight`, `input` and `output`. A rank reads the samples of (i, j).
Between A and B, where heads attend, it holds those that (i, k) read, so that what attention knows
of them, its mask and positions, is exchanged (`exchange`). Norms, embeddings and what else lies
outside are layers of layers_2d.py, of l^2 x l ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from megatron.parallel.collectives import gather_from
from megatron.parallel.layers import STD
from megatron.parallel.layers_2d import (
    Gathered,
    GroupedQueryLinear2D,
    LayerNorm2D,
    Linear2D,
    Place,
    RMSNorm2D,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import Modes


def entering(mesh: Mesh) -> Place:
    division = Gathered((0, mesh.input), (1, mesh.weight), mesh.output)
    inputs = (mesh.output, mesh.weight)
    return Place(division, mesh.output, inputs, mesh.input, mesh.inner_tokens)


def leaving(mesh: Mesh) -> Place:
    division = Gathered((0, mesh.output), (1, mesh.weight), mesh.input)
    return Place(division, mesh.input, (mesh.input, mesh.weight), mesh.output, mesh.tokens)


class Linear3D(Linear2D):
    """x [n, in/l] outside the parallel region to [n, parts x out/l] inside; or from inside to
    outside, as of every second layer."""

    modes: ClassVar[Modes] = ("3d",)

    def __init__(
        self,
        mesh: Mesh,
        in_features: int,
        out_features: int,
        *,
        is_inside: bool = False,
        parts: int = 1,
        bias: bool = True,
        std: float = STD,
    ) -> None:
        """is_inside: whether x is inside. parts: as of ColumnParallelLinear."""
        self.is_inside = is_inside
        super().__init__(mesh, in_features, out_features, parts=parts, bias=bias, std=std)

    def make_place(self, mesh: Mesh) -> Place:
        return leaving(mesh) if self.is_inside else entering(mesh)


class GroupedQueryLinear3D(GroupedQueryLinear2D):
    """x [n, h/l] outside the parallel region to queries, keys and values inside."""

    modes: ClassVar[Modes] = ("3d",)

    def make_place(self, mesh: Mesh) -> Place:
        return entering(mesh)


class LayerNorm3D(LayerNorm2D):
    """Layer norm of x [n, h/l] outside or, with is_inside, inside the parallel region."""


class RMSNorm3D(RMSNorm2D):
    """RMSNorm of x [n, h/l], as of LayerNorm3D."""


def exchange(mesh: Mesh, x: Any) -> Any:
    """x [b, ..] of the samples that this rank reads, to the same of those that it holds inside the
    parallel region; no gradient is recorded."""
    if x is None or mesh.input.size == 1:
        return x
    if x.dtype == torch.bool:
        return exchange(mesh, x.to(torch.uint8)).bool()
    return gather_from(x, 0, mesh.input).chunk(mesh.input.size)[mesh.output.rank]
