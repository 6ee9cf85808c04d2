"""The grid of ranks: the only place where ranks are computed.

A mesh has named axes; the tensor axis is the fastest, so that the ranks that share a model sit in
one server:

    world of 8, tensor 4:      tensor ->  0  1  2  3     (one model)
                         data |           4  5  6  7     (its copy, on other samples)

Say *axis* for the mesh and *dim* for a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

CALLS: dict[str, Calls] = {}
"""Of each axis and control group over which this process has communicated, by name."""


class Calls:
    """The collectives that this rank has started over one group, noted for the failure watch.

    begun: how many. waits: (its number from 1, its name, the shape) of the one in which a thread
    waits, or None; it stays set where a collective raises. ranks: the members of the group.
    """

    __slots__ = ("begun", "ranks", "waits")

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.begun = 0
        self.waits: tuple[int, str, object] | None = None
        self.ranks = [] if group is None else dist.get_process_group_ranks(group)
        CALLS[name] = self

    def begin(self, name: str, shape: object) -> tuple[int, str, object]:
        self.begun += 1
        return self.begun, name, shape


@dataclass(frozen=True)
class Axis:
    """One named axis of the grid; without a `grid` it is an axis of size 1.

    Modules keep axes, not groups: a module that holds a ProcessGroup cannot be deep-copied, and an
    axis can, because its copy is itself. Size, rank and group are looked up once, since the look-up
    in a DeviceMesh costs as much as a small collective.
    """

    name: str
    grid: DeviceMesh | None = None

    @cached_property
    def size(self) -> int:
        return 1 if self.grid is None else self.grid[self.name].size()

    @cached_property
    def rank(self) -> int:
        return 0 if self.grid is None else self.grid.get_local_rank(self.name)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        assert self.grid is not None, f"axis {self.name!r} has one rank and so no group"
        return self.grid.get_group(self.name)

    @cached_property
    def calls(self) -> Calls:
        return Calls(self.name, self.group)

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self


@dataclass(frozen=True)
class ControlGroup:
    """All ranks of a run, for small Python values beside training's collectives.

    They have a gloo group of their own, which waits neither for training's collectives nor for a
    GPU; a thread that talks to its peers needs another one: a group's calls must come in order.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    name: str = "control"

    @cached_property
    def calls(self) -> Calls:
        return Calls(self.name, self.group)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self.calls.waits = self.calls.begin("gather", type(value).__name__)
        dist.all_gather_object(values, value, group=self.group)
        self.calls.waits = None
        return values

    def another(self, name: str = "save") -> ControlGroup:
        """The same ranks over a new group; every rank calls this."""
        return self if self.size == 1 else connect_control(self.timeout, name)

    def __deepcopy__(self, memo: dict[int, object]) -> ControlGroup:
        return self


def connect_control(timeout: timedelta | None, name: str = "control") -> ControlGroup:
    """All ranks of the initialised process group (every rank calls this)."""
    backend = "gloo" if dist.get_backend() == "nccl" else None
    group = dist.new_group(backend=backend, timeout=timeout)
    return ControlGroup(dist.get_world_size(), dist.get_rank(), group, timeout, name)


@dataclass(frozen=True)
class Mesh:
    """The axes over which this run is cut, and the device this rank computes on."""

    tensor: Axis
    data: Axis
    device: torch.device
    control: ControlGroup = field(default=ControlGroup())

    @property
    def model(self) -> Axis:
        """All ranks that together hold one model: they agree on overflow and gradient norm."""
        return self.tensor

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis, the slowest first."""
        return self.data, self.tensor

    @property
    def coordinates(self) -> dict[str, int]:
        return {axis.name: axis.rank for axis in self.axes}

    def describe_rank(self) -> str:
        """This rank's coordinates for messages: "data 0, tensor 1"."""
        return ", ".join(f"{name} {rank}" for name, rank in self.coordinates.items())

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes logs and manifests."""
        return self.control.rank == 0

    @property
    def size(self) -> int:
        return self.control.size


def build_mesh(
    tensor_parallel_size: int, device: torch.device, timeout: timedelta | None = None
) -> Mesh:
    """Cut the initialised process group into data x tensor ranks (every rank calls this).

    timeout: after which torch gives up a collective; None for torch's default.
    """
    world, tensor = dist.get_world_size(), tensor_parallel_size
    assert world % tensor == 0, f"tensor axis of {tensor} in a world of {world} ranks"
    sizes = {"data": world // tensor, "tensor": tensor}
    names = tuple(name for name, size in sizes.items() if size > 1)
    ranks = torch.arange(world).view([sizes[name] for name in names])
    grid = None
    if names:
        # init_device_mesh has no argument for the groups' timeout.
        groups = [
            dist.new_subgroups_by_enumeration(
                ranks.movedim(dim, -1).reshape(-1, sizes[name]).tolist(), timeout=timeout
            )[0]
            for dim, name in enumerate(names)
        ]
        only = groups[0] if len(groups) == 1 else groups
        grid = DeviceMesh.from_group(only, device.type, ranks, mesh_dim_names=names)
    axes = {name: Axis(name, grid if name in names else None) for name in sizes}
    for axis in axes.values():
        # Looked up now: torch.compile cannot trace the first access to a cached property.
        _ = (axis.size, axis.rank, axis.group, axis.calls) if axis.size > 1 else axis.rank
    return Mesh(**axes, device=device, control=connect_control(timeout))


def serial_mesh(device: torch.device | str = "cpu") -> Mesh:
    """A mesh of one rank, which needs no torch.distributed."""
    return Mesh(tensor=Axis("tensor"), data=Axis("data"), device=torch.device(device))
