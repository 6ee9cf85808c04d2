"""A model's parameters as DTensors, for torch's own tools, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel.bucket import require_whole
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec, load_whole, sharding_specs


def to_dtensors(
    model: nn.Module, mesh: Mesh, specs: Mapping[str, ShardingSpec] | None = None
) -> dict[str, Tensor]:
    """{name: the parameter as a DTensor of its whole shape}, for torch's own tools, such as
    torch.distributed.checkpoint (every rank calls this).

    On one rank they are plain tensors. They share the parameters' memory, except for parameters
    with padding rows, which DTensor does not have: see `from_dtensors`. Raises ValueError for a dim
    that axes cut in another order than the mesh's, which DTensor cannot express, and for a model in
    ZeRO stage 3. specs: see GradientBuckets.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    require_whole(model, "to_dtensors")
    parameters, table = dict(model.named_parameters()), sharding_specs(model, specs, mesh=mesh)
    axes = [axis for axis in mesh.axes if axis.size > 1]
    if not axes:
        return {name: spec.real(parameters[name].detach()) for name, spec in table.items()}
    grid, found = mesh.device_mesh(), dict[str, Any]()
    for name, spec in table.items():
        shards = [(part, dim) for dim, axis in spec.shards for part in axis.parts if part.size > 1]
        for dim in range(len(spec.shape)):
            order = [axes.index(part) for part, its_dim in shards if its_dim == dim]
            if order != sorted(order):
                raise ValueError(f"{name}: the axes that cut dim {dim} are not in the mesh's order")
        dims = dict(shards)
        placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes]
        local = parameters[name].detach()
        whole: Any = DTensor.from_local(local, grid, placements, run_check=False)
        if spec.padded_rows is not None:
            whole = whole[: spec.shape[0]].redistribute(placements=placements)
        found[name] = whole
    return found


def from_dtensors(
    model: nn.Module, tensors: Mapping[str, Tensor], specs: Mapping[str, ShardingSpec] | None = None
) -> None:
    """Copy the tensors of `to_dtensors`, with values that were read into them, to the parameters
    (every rank calls this). Call it before an optimizer is built, as its masters are copies. Raises
    ValueError for a model in ZeRO stage 3."""
    require_whole(model, "from_dtensors")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, spec in sharding_specs(model, specs).items():
            tensor: Any = tensors[name]
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            load_whole(parameters[name], whole.clone(), spec)
