"""How each parameter is sharded over the mesh, and over which axes its gradient is summed.

The layer that owns a parameter states its spec once. Initialisation, gradient reduction, the global
norm, checkpoints and conversion all read the table `sharding_specs(model)`. A spec belongs to the
module and not to the tensor, because `deepcopy`, `fully_shard` and functions that give a meta model
memory replace the tensor and lose its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce, gather_from
from megatron.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class FlatRange:
    """The elements [start, stop) of a flattened shard that is divided over the ranks of an axis
    (ZeRO); may be empty."""

    # Flat, because of a weight [3, h/t, h] that is cut along dim 0 one of four ranks has nothing.
    axis: Axis
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """One parameter, whole and sharded.

    shape: shape of the whole parameter as it is saved, with the true number of rows.
    shards: (dim, axis) for every dim that is cut into equal shards along an axis. If several axes
        cut one dim, the major one comes first.
    padded_rows: size of dim 0 with the padding that makes it divisible; None for no padding.
    partial: axes over which gradients are still to be summed: each rank has one term. A tied
        parameter has a copy on each rank of its tie's group, and is partial over that group, too.
    std: standard deviation of the normal initialisation; None for the constant `fill`.
    decay: whether weight decay applies (not to biases and norms).
    zero_gradient: whether its gradient may be zero in theory and only rounding in practice: a bias
        of keys adds the same to all scores of a query, unless positions rotate the keys.
    flat: this rank's range of the flattened shard; None for the whole shard, in its shape.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[int, Axis], ...] = ()
    padded_rows: int | None = None
    partial: tuple[Axis, ...] = ()
    std: float | None = None
    fill: float = 0.0
    decay: bool = True
    zero_gradient: bool = False
    flat: FlatRange | None = None

    def _extents(self) -> list[tuple[int, int]]:
        """(start, size) of this rank's shard in each dim, padding included."""
        starts = [0] * len(self.shape)
        sizes = list(self.shape)
        if self.padded_rows is not None:
            sizes[0] = self.padded_rows  # only the vocabulary is padded, and it is dim 0
        for dim, axis in self.shards:  # a dim's major axis first, so that starts add up
            if sizes[dim] % axis.size:
                raise ValueError(
                    f"dim {dim} of {self.shape} is {sizes[dim]}, no multiple of the {axis.size} "
                    f"ranks of the {axis.name} axis"
                )
            sizes[dim] //= axis.size
            starts[dim] += axis.rank * sizes[dim]
        return list(zip(starts, sizes, strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, padding included."""
        if self.flat is not None:
            return (self.flat.stop - self.flat.start,)
        return tuple(size for _, size in self._extents())

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """This rank's shard as slices of the whole parameter, without padding; may be empty."""
        return tuple(
            slice(min(start, whole), min(start + size, whole))
            for (start, size), whole in zip(self._extents(), self.shape, strict=True)
        )

    @property
    def shard_axes(self) -> set[Axis]:
        axes = [axis for _, axis in self.shards]
        if self.flat is not None:
            axes.append(self.flat.axis)
        return {part for axis in axes for part in axis.parts}

    def copied_over(self, *axes: Axis) -> set[Axis]:
        """The parts of these axes whose ranks hold the same shard; and the group of its tie, if
        several pipeline stages hold copies of the parameter (else stages hold other parameters)."""
        parts = {part for axis in axes for part in axis.parts if not part.is_of_stages}
        ties = {axis for axis in self.partial if axis.is_of_stages}
        return (parts | ties) - self.shard_axes

    def is_owner(self, *axes: Axis) -> bool:
        """Whether this rank counts for all that hold its shard along the axes, and along its tie:
        it is the first."""
        # By its place and not by an axis name, so that no kind of parallelism is a special case.
        return all(axis.rank == 0 for axis in self.copied_over(*axes))

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """Initial values of the whole parameter [shape], fp32 on the CPU."""
        # On the CPU and in fp32, so that they do not depend on device, dtype or layout.
        whole = torch.empty(self.shape, device="cpu", dtype=torch.float32)
        if self.std is None:
            return whole.fill_(self.fill)
        return whole.normal_(0.0, self.std, generator=generator)

    @property
    def of_shard(self) -> ShardingSpec:
        """The spec of the whole shard, without `flat`."""
        return replace(self, flat=None)

    def real(self, local: Tensor) -> Tensor:
        """View of this rank's shard without padding rows."""
        return local[tuple(slice(0, rows.stop - rows.start) for rows in self.local_slices)]

    def boxes(self, local: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """(view, its slices of the whole parameter) for this rank's part, without padding: one box,
        or at most 2 n - 1 for a flat range of n dims; none if the part is empty."""
        slices = self.local_slices
        sizes = [each.stop - each.start for each in slices]
        if self.flat is None:
            if all(sizes):
                yield self.real(local), slices
            return
        # Padding rows come last, so that the real elements of a shard are adjacent.
        stop = min(self.flat.stop, prod(sizes))
        at = 0
        # Checkpoints save boxes: at most 3 for a matrix, 5 for query, key and value as [3, h, h].
        for starts, shape in _boxes(sizes, self.flat.start, stop):
            box = []
            for whole, start, size in zip(slices, starts, shape, strict=True):
                box.append(slice(whole.start + start, whole.start + start + size))
            yield local[at : at + prod(shape)].view(shape), tuple(box)
            at += prod(shape)


def _boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """(where it starts, its shape) of consecutive boxes that together are the elements
    [start, stop) of a flattened tensor."""
    if not sizes and start < stop:
        yield [], []
        return
    row = prod(sizes[1:])
    while start < stop:
        index, before = divmod(start, row)
        rows = (stop - start) // row
        if before == 0 and rows > 0:
            yield [index, *[0] * (len(sizes) - 1)], [rows, *sizes[1:]]
            start += rows * row
        else:  # a part of one row
            after = min(stop - index * row, row)
            for starts, shape in _boxes(sizes[1:], before, after):
                yield [index, *starts], [1, *shape]
            start = index * row + after


@dataclass(frozen=True)
class TensorSlice:
    """This rank's slice of the logically whole tensor `key`, cut and padded as `spec` says."""

    key: str
    spec: ShardingSpec
    local: Tensor


class GradientViews(dict[str, Any]):
    """The GradientView (bucket.py) of each matrix of a module, by name of the parameter. A copy of
    the module has none, because its gradients are in no bucket."""

    def __deepcopy__(self, memo: dict[int, object]) -> GradientViews:
        return GradientViews()


class ShardedModule(nn.Module):
    """A module that says how its own parameters are sharded.

    If it is built under torch.device("meta"), its parameters stay there, and calling it raises an
    error, until `materialize` gives them values. Otherwise they have initial values on the mesh's
    device from the start: each rank draws the whole tensor from torch's CPU generator and keeps its
    shard, so that torch.manual_seed gives the same model at every layout.
    gradient_views: where the layer adds the gradients of matrices, by name; empty if it leaves that
        to autograd.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        # torch.device("meta") as a context shows only in the device of a new tensor.
        on_meta = "meta" in (torch.empty(0).device.type, mesh.device.type)
        self.attach(mesh, is_on_meta=on_meta)

    def attach(self, mesh: Mesh, *, is_on_meta: bool) -> None:
        """Add the attributes that a ShardedModule has in addition to those of nn.Module."""
        self.mesh = mesh
        self.specs: dict[str, ShardingSpec] = {}
        self.gradient_views = GradientViews()
        self.is_on_meta = is_on_meta
        self.values_check = is_on_meta and self.register_forward_pre_hook(_require_values)

    def shard_of(self, name: str) -> Any:
        """This rank's shard of the parameter, or None."""
        return self._parameters[name]

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        shards: tuple[tuple[int, Axis], ...] = (),
        **fields: Any,
    ) -> None:
        """fields: other fields of ShardingSpec. By default the gradient is partial over the
        replicas, which compute it from different samples."""
        fields = {"partial": (self.mesh.replicas,)} | fields
        spec = self.specs[name] = ShardingSpec(shape=shape, shards=shards, **fields)
        device = torch.device("meta") if self.is_on_meta else self.mesh.device
        local = torch.empty(spec.local_shape, device=device)
        if not self.is_on_meta:
            # Every rank draws the whole tensor: its generator is then where that of any layout is.
            load_whole(local, spec.draw(), spec)
        self.register_parameter(name, nn.Parameter(local))

    def add_bias(
        self,
        exists: bool,
        shape: tuple[int, ...],
        shards: tuple[tuple[int, Axis], ...] = (),
        name: str = "bias",
        **fields: Any,
    ) -> None:
        """A parameter of zeros that does not decay, or None."""
        if exists:
            self.add_parameter(name, shape, shards, decay=False, **fields)
        else:
            self.register_parameter(name, None)


class Tied(nn.Module):
    """Modules and parameters that several pipeline stages share, by the names of their ties.

    axes: by tie, the axis of the stages that hold copies.
    """

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        super().__init__()
        self.axes = axes


def _require_values(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A pre-hook of modules on meta. `give_memory` removes it, so it costs nothing after that."""
    if inputs and inputs[0].is_meta:  # a run that only computes shapes
        return
    if any(parameter.is_meta for parameter in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} has no weights yet: megatron.api.materialize gives them"
        )


def sharding_specs(
    model: nn.Module, others: Mapping[str, ShardingSpec] | None = None, *, mesh: Mesh | None = None
) -> dict[str, ShardingSpec]:
    """{full parameter name: spec}, in the order of `model.named_parameters()`.

    others: specs, by name, of parameters that no ShardedModule owns, such as those of torch's own
    layers. mesh: by default that of the ShardedModules. If all ranks of a model read the same rows
    of hidden states (in 1D without sequence parallelism), any other parameter is assumed to be
    whole on every rank, see `replicated`. Otherwise raises ValueError for it.
    """
    mesh = mesh or mesh_of(model)
    parameters = dict(model.named_parameters())
    for name, spec in (others or {}).items():
        if name not in parameters:
            raise ValueError(f"specs: the model has no parameter {name}")
        shape = tuple(parameters[name].shape)
        if spec.local_shape != shape:
            raise ValueError(f"specs: {name} is {shape} on this rank, its spec {spec.local_shape}")
    table = dict(others or {}) | owned_specs(model)
    for name, parameter in parameters.items():
        if name in table:
            continue
        if mesh is None or mesh.tensor_parallel_mode != "1d" or mesh.stream.size > 1:
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"{name} of {kind} has no sharding spec, and is not replicated here: use a layer "
                f"of megatron.api, or say how: specs={{{name!r}: replicated(parameter, mesh)}}"
            )
        table[name] = replicated(parameter, mesh)
    for prefix, module in model.named_modules():
        if isinstance(module, Tied):
            for name, _ in module.named_parameters():
                spec, axis = table[f"{prefix}.{name}"], module.axes[name.partition(".")[0]]
                table[f"{prefix}.{name}"] = replace(spec, partial=(*spec.partial, axis))
    return {name: table[name] for name in parameters}


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh of the ShardedModules in the model; None if there are none."""
    sharded = (each for each in model.modules() if isinstance(each, ShardedModule))
    return next((each.mesh for each in sharded), None)


def owned_specs(model: nn.Module) -> dict[str, ShardingSpec]:
    """Specs of the parameters of ShardedModules, by full name; the first if one is shared."""
    # named_parameters has a shared parameter once, under its first name.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    table: dict[str, ShardingSpec] = {}
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for name, spec in module.specs.items():
                table.setdefault(names[id(module.shard_of(name))], spec)
    return table


def replicated(parameter: Tensor, mesh: Mesh) -> ShardingSpec:
    """The spec of a parameter of torch's own layers that every rank holds whole, and that acts on
    rows of hidden states outside the parallel region. Matrices decay, vectors do not."""
    shape, decay = tuple(parameter.shape), parameter.dim() > 1
    return ShardingSpec(shape=shape, partial=mesh.partial_axes, decay=decay)


def load_whole(local: Tensor, whole: Tensor, spec: ShardingSpec) -> None:
    """Copy this rank's shard of a whole parameter into `local`; padding rows become zero."""
    assert whole.shape == spec.shape, f"{tuple(whole.shape)} is not {spec.shape}"
    local.zero_()  # rows of padding are in no box
    for part, where in spec.boxes(local):
        part.copy_(whole[where])


def gather_whole(local: Tensor, spec: ShardingSpec) -> Tensor:
    """The whole tensor; this rank holds `local` of it (every rank calls this)."""
    whole = local.detach()
    if spec.flat is not None:
        shard = whole.new_zeros(spec.of_shard.local_shape)
        shard.view(-1)[spec.flat.start : spec.flat.stop] = whole
        # A sum of zeros and one value each, since the parts of a parameter are not of equal size.
        whole = all_reduce(shard, spec.flat.axis)
    for dim, axis in reversed(spec.shards):  # the minor axis of a dim comes last
        whole = gather_from(whole, dim, axis)
    if spec.padded_rows is None:
        return whole.clone()
    rows = spec.shape[0]
    assert not whole[rows:].any(), "padding rows are not zero"
    return whole[:rows].clone()
