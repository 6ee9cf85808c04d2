"""Ranks that are threads of this process, with collectives of their own: for more ranks than a
machine has room for as processes. Sent tensors are copied, as a real collective does."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel import collectives
from megatron.parallel.axes import INNER, OUTER, UNIONS
from megatron.parallel.mesh import Mesh, build_mesh
from tests.dist import PATIENCE
from tools.plan.absent import AbsentRanks


@dataclass
class Meeting:
    """Where the ranks of one group hand over what they send."""

    size: int
    barrier: threading.Barrier = field(init=False)
    sent: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.sent = threading.Barrier(self.size), [None] * self.size

    def exchange(self, rank: int, name: str, x: Any) -> list[Any]:
        """x: a copy of what the rank sends."""
        self.sent[rank] = name, x
        self.barrier.wait(PATIENCE)
        names, all_sent = zip(*self.sent, strict=True)
        self.barrier.wait(PATIENCE)
        assert {*names} == {name}, names
        return [*all_sent]


@dataclass(frozen=True)
class Control(AbsentRanks):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, "gather", deepcopy(value))


class Collectives:
    """The functions that megatron.parallel.collectives calls in torch.distributed."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        """meshes: of all ranks, in their order."""
        self.rooms: dict[Any, tuple[Meeting, int]] = {}  # by process group
        self.meetings: dict[tuple[int, ...], Meeting] = {}
        first = meshes[0]
        names = (*OUTER, *INNER[first.tensor_parallel_mode])
        for mesh in meshes:
            for union in (*names, *UNIONS[first.tensor_parallel_mode]):
                axis = mesh.axis(union)
                if axis.size == 1:
                    continue
                within = {part.name for part in axis.parts}
                others = [name for name in names if name not in within]
                ranks = tuple(
                    rank
                    for rank, other in enumerate(meshes)
                    if all(other.rank(name) == mesh.rank(name) for name in others)
                )
                meeting = self.meetings.setdefault(ranks, Meeting(len(ranks)))
                self.rooms[axis.group] = meeting, axis.rank

    def _meet(self, name: str, group: Any, x: Tensor) -> tuple[list[Tensor], int]:
        meeting, rank = self.rooms[group]
        return meeting.exchange(rank, f"{name} {list(x.shape)} {x.dtype}", x.clone()), rank

    def all_reduce(
        self, x: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        terms = torch.stack(self._meet(f"all_reduce {op}", group, x)[0])
        x.copy_(terms.sum(0) if op == ReduceOp.SUM else terms.amax(0))
        return _DONE

    def all_gather(self, out: list[Tensor], x: Tensor, group: Any) -> None:
        for each, its_x in zip(out, self._meet("all_gather", group, x)[0], strict=True):
            each.copy_(its_x)

    def all_gather_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        out.copy_(torch.cat(self._meet("all_gather", group, x)[0]))
        return _DONE

    def reduce_scatter_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        terms, rank = self._meet("reduce_scatter", group, x)
        out.copy_(torch.stack(terms).sum(0).view(len(terms), *out.shape)[rank])
        return _DONE

    def broadcast(self, x: Tensor, group_src: int, group: Any, async_op: bool) -> Any:
        x.copy_(self._meet(f"broadcast from {group_src}", group, x)[0][group_src])
        return _DONE

    def reduce(self, x: Tensor, group_dst: int, group: Any, async_op: bool) -> Any:
        terms, rank = self._meet(f"reduce to {group_dst}", group, x)
        # Nobody may read what is left on the others.
        x.copy_(torch.stack(terms).sum(0)) if rank == group_dst else x.fill_(torch.nan)
        return _DONE

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Any, sent: Any, group: Any, async_op: bool
    ) -> Any:
        """received, sent: number of rows from and to each rank."""
        meeting, rank = self.rooms[group]
        blocks = meeting.exchange(rank, f"all_to_all {x.dtype}", x.clone().split(sent))
        rows = [each[rank] for each in blocks]
        assert [len(each) for each in rows] == received
        out.copy_(torch.cat(rows))
        return _DONE

    def abort(self) -> None:
        for meeting in self.meetings.values():
            meeting.barrier.abort()


_DONE = SimpleNamespace(wait=lambda: None)


@contextmanager
def _in_place_of_torch(fake: Collectives) -> Iterator[None]:
    others = {
        "dist": fake,
        "_ALL_GATHER": fake.all_gather_single,
        "_REDUCE_SCATTER": fake.reduce_scatter_single,
    }
    with patch.multiple(collectives, **others):
        yield


def run(mode: str, sizes: dict[str, int], function: Callable[..., Any], *arguments: Any) -> Any:
    """Results of function(mesh, *arguments) on each rank of such a mesh, by rank; the first
    failure is raised."""
    world = prod(sizes.values())
    meeting = Meeting(world)
    controls = [Control(world, rank, meeting=meeting) for rank in range(world)]
    meshes = [
        build_mesh(sizes, "cpu", control=each, tensor_parallel_mode=mode) for each in controls
    ]
    fake, failures = Collectives(meshes), list[BaseException]()
    fake.meetings[()] = meeting

    def on_rank(mesh: Mesh) -> Any:
        try:
            # Else one thread of torch runs the backwards of all ranks on a GPU, and waits for ever.
            with torch.autograd.set_multithreading_enabled(False):
                return function(mesh, *arguments)
        except BaseException as error:
            failures.append(error)
            fake.abort()

    with _in_place_of_torch(fake), ThreadPoolExecutor(world) as threads:
        results = [*threads.map(on_rank, meshes)]
    if failures:
        raise failures[0]
    return results
