"""The parallel region in 3D (Bian et al., 2021, arXiv:2105.14450), on l x l x l ranks.

             rank (i, j, k) holds                 gathered       summed
    x        tokens of (i, j), [n, h/l by k]      over j, to those of i
    A        [out/l by j, in/l by k and i]        over i
    X A      tokens of (i, k), [n, out/l by j]                   over k
    B        [out/l by k, in/l by j and i]        over i
    X A B    tokens of (i, j), [n, h/l by k]      X A over k     over j

i, j and k are the mesh's axes `weight`, `input` and `output`. A rank reads the samples of (i, j).
Between A and B, in attention, it holds the samples that (i, k) read, so attention's mask and
positions are exchanged (`exchange`). Norms, embeddings and all else outside the parallel region are
layers of layers_2d.py, on l^2 x l ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.parallel.collectives import cut, gather_from
from megatron.parallel.layers import Gathered, LayerNorm, ParallelLinear, Partition, require_mode
from megatron.parallel.layers_llama import GroupedQueryLinear, RMSNorm
from megatron.parallel.mesh import Mesh


def entering(mesh: Mesh) -> Partition:
    """From outside the parallel region to inside."""
    require_mode(mesh, "entering", "3d")
    y = cut(0, mesh.output)
    division = Gathered(cut(0, mesh.input), cut(1, mesh.weight), y)
    inputs = (mesh.output, mesh.weight)
    return Partition(division, inputs, mesh.input, mesh.output, (mesh.inner_tokens,))


def leaving(mesh: Mesh) -> Partition:
    """From inside the parallel region to outside."""
    require_mode(mesh, "leaving", "3d")
    division = Gathered(cut(0, mesh.output), cut(1, mesh.weight), cut(0, mesh.input))
    inputs = (mesh.input, mesh.weight)
    return Partition(division, inputs, mesh.output, mesh.input, (mesh.tokens,))


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


LayerNorm3D, RMSNorm3D = LayerNorm, RMSNorm


def exchange(mesh: Mesh, x: Any) -> Any:
    """x [b, ..] of the samples that this rank reads, to x of those that it holds inside the
    parallel region; no gradient is recorded."""
    if x is None or mesh.input.size == 1:
        return x
    if x.dtype == torch.bool:
        return exchange(mesh, x.to(torch.uint8)).bool()
    return gather_from(x, 0, mesh.input).chunk(mesh.input.size)[mesh.output.rank]
