"""The replica check: what several ranks hold in common has to be equal on them, bit for bit.

All ranks of the data axis hold the same parameters, masters and moments; all ranks of the tensor
axis those that are not cut along it, the counters and the samples. They stay equal because every
rank computes them from the same sums; nothing sends them again. So a flipped bit, a faulty
processor or another file on one node does not show in the loss: this check finds it.

Each tensor is reduced to a hash of 64 bits, so that a few kilobytes an axis are sent.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.data.batch import Batch
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Mesh
from megatron.train.state import TrainState

# Elements that are hashed at a time: their products of 8 bytes fit a processor's cache, or fill a
# GPU.
CHUNK = {"cpu": 2**18, "cuda": 2**22}
# Odd, and so a bijection of 64 bits: what one chunk adds to the hash is not lost in the next.
FACTOR = 0x9E3779B97F4A7C15 - 2**64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element
NAMED = 5  # tensors or ranks that a message names; of more it gives the number


class ReplicaDrift(RuntimeError):  # noqa: N818
    """Ranks that should hold the same hold different values; every rank raises the same error.

    names: of all that differs, tensors first. axes: along which the first of them differs. camps:
    the ranks that agree with each other in it, the largest camp first.
    """

    def __init__(
        self,
        message: str,
        names: Sequence[str],
        axes: Sequence[str],
        camps: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(message)
        self.names, self.axes, self.camps = names, axes, camps


@dataclass(frozen=True)
class Entry:
    """One thing that the ranks of `axes` hold in common, and its hash here: int64 scalar."""

    name: str
    axes: tuple[str, ...]
    digest: Tensor


def check_replicas(state: TrainState, batches: Sequence[Batch], passed: int | None = None) -> None:
    """Compare all that ranks hold in common; every rank calls this, after the same step.

    batches: this rank's micro-batches of the step. passed: the step of the last check that found
    nothing, for the message. Raises ReplicaDrift, on every rank.
    """
    mesh = state.mesh
    if mesh.size == 1:
        return
    entries = list(_entries(state, batches))
    if _is_equal(entries, mesh):
        return
    own = {entry.name: int(entry.digest) for entry in entries}
    name = f"({mesh.describe_rank()}) on {socket.gethostname()}"
    ranks = mesh.control.gather((mesh.coordinates, name, own))
    drifts = []  # (entry, camps of ranks)
    for entry in entries:
        groups: dict[tuple[int, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for coordinates, name, digests in ranks:
            elsewhere = tuple(rank for axis, rank in coordinates.items() if axis not in entry.axes)
            groups[elsewhere][digests[entry.name]].append(name)
        for camps in groups.values():
            if len(camps) > 1:
                drifts.append((entry, sorted(camps.values(), key=len, reverse=True)))
    first, camps_of_first = drifts[0]
    names = list(dict.fromkeys(entry.name for entry, _ in drifts))
    cause = "a rank's hardware, or its versions and threads, are suspect"
    if first.name.startswith("batch."):
        cause = "the files behind --data-path differ between machines, or a bit has flipped"
    cure = f"resume from the checkpoint of step {passed}, when ranks were equal, or an earlier one"
    if passed is None:
        cure = "ranks were never seen equal in this run: start again from what it started from"
    raise ReplicaDrift(
        f"replica drift at step {state.step} along the {' and '.join(first.axes)} axes in "
        f"{_listed(names)}; of the first: {_odd_ranks(camps_of_first)}\n{cause}; {cure}, without "
        "the hosts of the ranks that differ",
        names,
        first.axes,
        camps_of_first,
    )


def _odd_ranks(camps: Sequence[Sequence[str]]) -> str:
    majority, *odd = camps
    if 2 * len(majority) > sum(map(len, camps)):
        ranks = [rank for camp in odd for rank in camp]
        return f"the {len(majority)} other ranks agree, but not {_listed(ranks)}"
    return f"{' against '.join(map(_listed, camps))}, without a majority"


def _listed(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _entries(state: TrainState, batches: Sequence[Batch]) -> Iterator[Entry]:
    """All tensors of a checkpoint, padding rows included; the batches; the counters."""
    mesh = state.mesh
    axes = tuple(axis.name for axis in mesh.axes if axis.size > 1)
    for each in state.slices():
        cut = {axis.name for _, axis in each.spec.cuts}
        if shared := tuple(axis for axis in axes if axis not in cut):
            yield Entry(each.key, shared, digest(each.local))
    for field in fields(batches[0]) if batches and mesh.model.size > 1 else ():
        arrays = [getattr(batch, field.name) for batch in batches]
        content = b"".join(
            b"none" if array is None else repr(array.shape).encode() + array.tobytes()
            for array in arrays
        )
        yield Entry(f"batch.{field.name}", (mesh.model.name,), _digest_bytes(content, mesh))
    for name, value in state.counters().items():
        content = json.dumps(value, sort_keys=True).encode()
        yield Entry(f"counters.{name}", axes, _digest_bytes(content, mesh))


def _is_equal(entries: Sequence[Entry], mesh: Mesh) -> bool:
    """Whether no rank of the run sees a difference: two small all-reduces an axis."""
    axes = [axis for axis in mesh.axes if axis.size > 1]
    differs = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for axis in axes:
        own = torch.stack([entry.digest for entry in entries if axis.name in entry.axes])
        # The largest hash h, and the largest ~h, which is the complement of the smallest h.
        largest, smallest = all_reduce(torch.stack([own, ~own]), axis, ReduceOp.MAX)
        differs |= (largest != ~smallest).any()
    for axis in axes:  # ranks that share no axis with the odd one have to know as well
        all_reduce(differs, axis, ReduceOp.MAX)
    return not differs.item()


@torch.no_grad()
def digest(tensor: Tensor, chunk: int | None = None) -> Tensor:
    """A hash of the bits of a tensor: int64 scalar on its device, the same in every run.

    Every 32 bits (16, 8 in narrower dtypes) times an odd number of their position in the chunk,
    summed with wrapping: one flipped bit adds an odd number times a power of two, which is never 0;
    two values that are exchanged go unnoticed about once in 2^31. chunk: elements at a time, of
    which each takes 16 bytes.
    """
    words = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    weights = _weights(tensor.device, chunk or CHUNK[tensor.device.type])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), len(weights)):
        part = words[start : start + len(weights)].to(torch.int64)
        total.mul_(FACTOR).add_(part.mul_(weights[: len(part)]).sum())
    return total


@cache
def _weights(device: torch.device, chunk: int) -> Tensor:
    """Odd numbers, one for each position in a chunk: int64 [chunk]."""
    numbers = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (chunk,), generator=numbers)
    return weights.bitwise_or_(1).to(device)


def _digest_bytes(content: bytes, mesh: Mesh) -> Tensor:
    number = hashlib.blake2b(content, digest_size=8).digest()
    return torch.tensor(int.from_bytes(number, "little", signed=True), device=mesh.device)
