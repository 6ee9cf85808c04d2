"""The grid of ranks: the only place where ranks are computed.

A mesh has named axes (a tensor has dims). The tensor axis varies fastest, so that the ranks that
share a layer are in one server:

    world of 8, tensor 4:      tensor ->  0  1  2  3     (one model)
                         data |           4  5  6  7     (its copy, on other samples)

Axes that act together form a union, which has a name, too. Code asks for the union that it means
(`mesh.loss`). A new axis is an entry in axes.py and a field of Mesh.

Some tensor-parallel modes replace the tensor axis by several axes; axes.py has the table. Ranks of
one model then read different samples, too, and the hidden states are cut along their hidden dim.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.parallel.axes import INNER, OUTER, UNIONS, token_pieces

CALLS: dict[str, Calls] = {}
"""Calls, by name, of each axis of several ranks, channel and control group that was used."""


@dataclass(slots=True)
class Calls:
    """Counts the collectives that this rank starts over one group, or the messages over one
    channel, for the failure watch.

    ranks: members of the group. started: number of calls started. waits: (number from 1, name,
    shape) of the call in which a thread waits, or None; it stays set if the collective raises.
    span: context of each wait, called with its name; a profile sets record_function.
    """

    name: str
    ranks: list[int]
    started: int = 0
    waits: tuple[int, str, object] | None = None
    span: ClassVar[Callable[[str], AbstractContextManager[object]]] = nullcontext

    def start(self, name: str, shape: object) -> tuple[int, str, object]:
        self.started += 1
        return self.started, name, shape

    def wait_for(self, call: tuple[int, str, object], wait: Callable[[], object]) -> None:
        self.waits = call
        with Calls.span(f"wait for {self.name}: {call[1]}"):
            wait()
        self.waits = None


def _watched(name: str, ranks: list[int]) -> Calls:
    """New Calls that the failure watch reads."""
    calls = CALLS[name] = Calls(name, ranks)
    return calls


@dataclass(frozen=True, eq=False)
class Axis:
    """A named axis of the grid, or a union of axes; by default of a single rank.

    Modules keep axes, not groups: a module that holds a ProcessGroup cannot be deep-copied. The
    deep copy of an axis is the axis itself.
    """

    name: str
    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    parts_of_union: tuple[Axis, ...] = ()
    is_of_stages: bool = False
    """Whether it joins pipeline stages: ranks hold other layers, and copies of tied parameters."""

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The axes of a union, slowest first; for a plain axis only the axis itself."""
        return self.parts_of_union or (self,)

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.process_group is not None, f"axis {self.name!r} has one rank and so no group"
        return self.process_group

    @cached_property
    def calls(self) -> Calls:
        return _watched(self.name, dist.get_process_group_ranks(self.group))

    @cached_property
    def channels(self) -> dict[tuple[int, int], Calls]:
        """Calls for the messages between this rank and its neighbours in the ring of the axis, by
        (sender, receiver). Both ends count the same messages."""
        ranks, channels = dist.get_process_group_ranks(self.group), {}
        for neighbour in {(self.rank + step) % self.size for step in (-1, 1)}:
            for one, two in ((self.rank, neighbour), (neighbour, self.rank)):
                name = f"{self.name} {one} -> {two}"
                channels[one, two] = _watched(name, [ranks[one], ranks[two]])
        return channels

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self


ALONE = Axis("alone")
"""An axis of one rank, the default of functions that take an axis."""


@dataclass(frozen=True)
class ControlGroup:
    """All ranks of a run, for exchanging small Python values outside training's collectives.

    They have their own gloo group, which waits neither for training's collectives nor for a GPU.
    Another thread needs another group, because the calls over one group must come in order.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    name: str = "control"
    axis_class: ClassVar[type[Axis]] = Axis

    @cached_property
    def calls(self) -> Calls:
        ranks = [] if self.group is None else dist.get_process_group_ranks(self.group)
        return _watched(self.name, ranks)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        call = self.calls.start("gather", type(value).__name__)
        self.calls.wait_for(call, lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def another(self, name: str = "save") -> ControlGroup:
        """The same ranks over a new group; every rank calls this."""
        return self if self.size == 1 else connect_control(self.timeout, name)

    def new_axis(
        self,
        name: str,
        groups: torch.Tensor,
        parts: tuple[Axis, ...] = (),
        is_of_stages: bool = False,
    ) -> Axis:
        """The axis of this rank's group; every rank calls this, in the same order. groups: [number
        of groups, ranks of each]; this rank may be in none of them."""
        group = self.new_group(name, groups.tolist()) if groups.shape[1] > 1 else None
        if group is None:
            return Axis(name, is_of_stages=is_of_stages)
        axis = self.axis_class(name, group.size(), group.rank(), group, parts, is_of_stages)
        _ = axis.calls  # enters it in CALLS, which the failure watch reads
        return axis

    def new_group(self, name: str, groups: list[list[int]]) -> dist.ProcessGroup | None:
        """Returns this rank's group; traces of a GPU show the name."""
        made = [dist.new_group(ranks, self.timeout, group_desc=name) for ranks in groups]
        return next((made[n] for n, ranks in enumerate(groups) if self.rank in ranks), None)

    def __deepcopy__(self, memo: dict[int, object]) -> ControlGroup:
        return self


def connect_control(timeout: timedelta | None, name: str = "control") -> ControlGroup:
    """The control group of all ranks of the initialised process group (every rank calls this)."""
    backend = "gloo" if dist.get_backend() == "nccl" else None
    group = dist.new_group(backend=backend, timeout=timeout)
    return ControlGroup(dist.get_world_size(), dist.get_rank(), group, timeout, name)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """The axes over which this run is divided, their unions, and the device of this rank.

    Unions, by what their ranks hold:

        tensor             parts of one layer: as many as --tensor-model-parallel-size counts; in
                           2.5D depth is one of its axes, whose ranks hold copies
        copies             copies of the model that compute independently
        batch              different samples
        loss               different tokens of the loss; the denominators are summed over it
        loss_sums          `loss` and the pipeline stages; the last stage has the sums of the terms
        replicas           the same shard of every parameter
        model_parallel     together one copy of the model: they agree on overflow and gradient norm
        tokens, hidden     hidden states of different samples; different columns of them
        inner_tokens, inner_hidden    the same inside the parallel region; and different heads
        vocabulary         different columns of the logits
        embedding_group    the word embedding, which the first and last pipeline stages share
        stream             different rows of the hidden states between layers: the tensor axis under
                           sequence parallelism, otherwise an axis of one rank

    In 1D, copies and batch are the data axis, replicas and loss the data and context axes.
    """

    device: torch.device
    control: ControlGroup = ControlGroup()
    tensor_parallel_mode: str = "1d"
    """How layers are cut: a key of megatron.parallel.axes.INNER."""
    cp_comm_type: str = "a2a"
    """How ranks of the context axis attend to each other's tokens: a2a or p2p, see context.py."""

    pipeline: Axis = Axis("pipeline", is_of_stages=True)
    data: Axis = Axis("data")
    context: Axis = Axis("context")
    # The axes from here to `output` cut layers in 2D, 2.5D and 3D: see the table in axes.py.
    depth: Axis = Axis("depth")
    row: Axis = Axis("row")
    column: Axis = Axis("column")
    weight: Axis = Axis("weight")
    input: Axis = Axis("input")
    output: Axis = Axis("output")

    tensor: Axis = Axis("tensor")
    copies: Axis = Axis("copies")
    batch: Axis = Axis("batch")
    loss: Axis = Axis("loss")
    loss_sums: Axis = Axis("loss_sums")
    replicas: Axis = Axis("replicas")
    model_parallel: Axis = Axis("model_parallel")
    tokens: Axis = Axis("tokens")
    hidden: Axis = Axis("hidden")
    inner_tokens: Axis = Axis("inner_tokens")
    inner_hidden: Axis = Axis("inner_hidden")
    vocabulary: Axis = Axis("vocabulary")
    embedding_group: Axis = Axis("embedding_group", is_of_stages=True)
    stream: Axis = Axis("stream")

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis, slowest first."""
        return tuple(getattr(self, name) for name in (*OUTER, *INNER[self.tensor_parallel_mode]))

    @property
    def partial_axes(self) -> tuple[Axis, ...]:
        """Axes over which gradients of parameters that act on rows of hidden states are summed."""
        return self.replicas, self.stream, self.tokens

    @property
    def of_one_batch(self) -> tuple[Axis, ...]:
        """Axes along which ranks read the same samples."""
        return tuple(axis for axis in self.axes if axis not in self.batch.parts)

    @property
    def named_axes(self) -> tuple[Axis, ...]:
        """Axes that messages and records name: data, tensor, and others of more than one rank."""
        return tuple(each for each in self.axes if each.size > 1 or each.name in ("data", "tensor"))

    @property
    def coordinates(self) -> dict[str, int]:
        return {axis.name: axis.rank for axis in self.named_axes}

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.named_axes}

    def describe_rank(self) -> str:
        """This rank's coordinates for messages: "data 0, tensor 1"."""
        return ", ".join(f"{name} {rank}" for name, rank in self.coordinates.items())

    @property
    def token_multiple(self) -> int:
        """Number that must divide the tokens of a sample: the pieces that context parallelism cuts
        it into, times the ranks that cut the rows of the hidden states."""
        return token_pieces(self.context.size, self.cp_comm_type) * self.stream.size

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes logs and manifests."""
        return self.control.rank == 0

    def axis(self, name: str) -> Axis:
        """The axis, or union of axes, with this name. Raises ValueError if there is none."""
        axes = {each: value for each, value in vars(self).items() if isinstance(value, Axis)}
        if name not in axes:
            raise ValueError(f"a mesh has no axis {name!r}, but {', '.join(axes)}")
        return axes[name]

    def size(self, name: str | None = None) -> int:
        """Number of ranks along an axis or a union of axes; without a name, of all ranks."""
        return self.control.size if name is None else self.axis(name).size

    def rank(self, name: str | None = None) -> int:
        """This rank's index along an axis or a union of axes; without a name, among all ranks."""
        return self.control.rank if name is None else self.axis(name).rank

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of an axis, for torch's collectives. Raises ValueError for an axis of
        one rank, which has no group; `megatron.api.all_reduce` takes an axis of any size."""
        axis = self.axis(name)
        if axis.process_group is None:
            raise ValueError(f"{name} has one rank and so no group; all_reduce takes the axis")
        return axis.process_group

    def describe_ranks(self) -> list[str]:
        """A line for each rank, with its coordinates, host and device (every rank calls this)."""
        line = f"{self.describe_rank()}, on {socket.gethostname()}, {self.device}"
        lines = enumerate(self.control.gather(line))
        return [f"rank {rank} of {self.size()}: {line}" for rank, line in lines]

    def tie(self, stages: Iterable[int]) -> Axis:
        """The axis of the ranks that hold these pipeline stages, for a parameter that they share;
        every rank calls this, in the same order. stages: their indices along the pipeline axis."""
        ranks = sorted(set(stages))
        if len(ranks) == self.pipeline.size:
            return self.pipeline
        if ranks == [0, self.pipeline.size - 1]:
            return self.embedding_group
        sizes = {axis.name: axis.size for axis in self.axes}
        groups = _groups_along(sizes, ("pipeline",))[:, ranks]
        name = f"tie of stages {', '.join(map(str, ranks))}"
        return self.control.new_axis(name, groups, is_of_stages=True)

    def device_mesh(self) -> DeviceMesh:
        """The axes, without those of size 1, as a DeviceMesh for torch's own parallelism."""
        axes = [axis for axis in self.axes if axis.size > 1]
        ranks = torch.arange(self.size()).view([axis.size for axis in axes])
        names = tuple(axis.name for axis in axes)
        groups = [axis.group for axis in axes]
        only = groups[0] if len(groups) == 1 else groups
        return DeviceMesh.from_group(only, self.device.type, ranks, mesh_dim_names=names)


def _groups_along(sizes: Mapping[str, int], names: Sequence[str]) -> torch.Tensor:
    """The ranks of each group along these axes: [groups, ranks of each]. sizes: sizes of all axes,
    slowest first."""
    grid = torch.arange(prod(sizes.values())).view([*sizes.values()])
    dims = [[*sizes].index(name) for name in names]
    last = list(range(-len(dims), 0))
    return grid.movedim(dims, last).reshape(-1, prod(sizes[name] for name in names))


def build_mesh(
    sizes: Mapping[str, int],
    device: torch.device | str,
    timeout: timedelta | None = None,
    control: ControlGroup | None = None,
    *,
    tensor_parallel_mode: str = "1d",
    sequence_parallel: bool = False,
    cp_comm_type: str = "a2a",
) -> Mesh:
    """Divide the initialised process group into the axes (every rank calls this).

    sizes: sizes of some axes. Others have size 1, except data, which takes the remaining ranks.
    timeout: time after which torch gives up a collective; None for torch's default. control: the
    control group, if there is one already, with its timeout. Raises ValueError for an unknown axis,
    and for sizes whose product is not the number of ranks.
    """
    control, device = control or connect_control(timeout), torch.device(device)
    names = (*OUTER, *INNER[tensor_parallel_mode])
    if unknown := sizes.keys() - set(names):
        raise ValueError(f"a mesh has no axis {min(unknown)!r}, but {', '.join(names)}")
    others = prod(size for name, size in sizes.items() if name != "data")
    data = control.size // max(others, 1)
    all_sizes = dict.fromkeys(names, 1) | {"data": data} | dict(sizes)
    if min(all_sizes.values()) < 1 or prod(all_sizes.values()) != control.size:
        raise ValueError(f"axes {dict(sizes)}: their product is not the {control.size} ranks")
    axes = {}
    for name in names:
        groups = _groups_along(all_sizes, (name,))
        axes[name] = control.new_axis(name, groups, is_of_stages=name == "pipeline")
    # A union of one axis is that axis; unions of the same axes share the first's group and name.
    by_parts: dict[tuple[Axis, ...], Axis] = {(axis,): axis for axis in axes.values()}
    unions = {}
    for name, members in UNIONS[tensor_parallel_mode].items():
        parts = tuple(axes[member] for member in members if axes[member].size > 1)
        if parts and parts not in by_parts:
            by_parts[parts] = control.new_axis(name, _groups_along(all_sizes, members), parts)
        unions[name] = by_parts[parts] if parts else Axis(name)
    embedding_group = axes["pipeline"]
    if all_sizes["pipeline"] > 2:
        ends = _groups_along(all_sizes, ("pipeline",))[:, [0, -1]]
        embedding_group = control.new_axis("embedding_group", ends, is_of_stages=True)
    if axes["pipeline"].size > 1 and control.group is not None:
        # The first call over a group must involve all its ranks, which a message does not.
        dist.all_reduce(torch.zeros(1, device=device), group=axes["pipeline"].group)
    return Mesh(
        device=device,
        control=control,
        tensor_parallel_mode=tensor_parallel_mode,
        cp_comm_type=cp_comm_type,
        **axes | unions,
        embedding_group=embedding_group,
        stream=axes["tensor"] if sequence_parallel else Axis("stream"),
    )


def serial_mesh(device: torch.device | str = "cpu") -> Mesh:
    """A mesh of one rank, which needs no torch.distributed."""
    return Mesh(device=torch.device(device))
