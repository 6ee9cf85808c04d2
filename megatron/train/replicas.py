"""The replica check: values that several ranks hold in common must be equal, bit for bit.

All ranks of the data axis hold the same parameters, masters and moments. All ranks of the tensor
axis share those that are not sharded along it, the counters and the samples. Pipeline stages share
tied parameters. The values stay equal because every rank computes them from the same sums; they are
not sent again. So a flipped bit, a faulty processor or another file on one node does not show in
the loss: this check finds it.

Each tensor is reduced to a hash of 64 bits, so only a few kilobytes are sent per axis.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.config.launch import Stopped
from megatron.data.batch import Batch
from megatron.parallel.agree import AgreedError
from megatron.parallel.collectives import all_reduce
from megatron.parallel.compare import listed
from megatron.parallel.mesh import Axis, Mesh
from megatron.train.state import TrainState

# Elements hashed at a time: at 8 bytes each they fit into a CPU's cache, or fill a GPU.
CHUNK = {"cpu": 2**18, "cuda": 2**22}
# Odd, so that multiplication is a bijection of 64 bits: the next chunk loses no difference.
FACTOR = 0x9E3779B97F4A7C15 - 2**64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes per element


class ReplicaDrift(AgreedError):  # noqa: N818
    """Ranks that should hold the same hold different values; every rank raises the same error.

    names: of all values that differ, tensors first. axes: those along which the first one differs.
    camps: groups of ranks that agree on it, the largest first.
    """

    names: list[str]
    axes: tuple[str, ...]
    camps: list[list[str]]


def check_replicas(
    state: TrainState,
    batches: Sequence[Batch],
    passed: int | None = None,
    wants_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Compare all values that ranks hold in common; every rank calls this, after the same step.

    batches: this rank's micro-batches of the step. passed: the step of the last check that found no
    drift, for the message. wants_stop: once it returns True, which it then always must, this rank
    reads no more tensors. Raises ReplicaDrift on every rank, or Stopped on every rank if one stops.
    """
    mesh = state.mesh
    axes = [axis for axis in mesh.axes if axis.size > 1]
    if not axes:
        return
    shared = list(_shared(state, batches, wants_stop))
    outcome = torch.tensor([wants_stop(), 0], dtype=torch.int64, device=mesh.device)
    for axis in [*axes, *_ties(state)]:
        hashes = torch.stack([digest for _, along, digest in shared if axis.name in along])
        # The largest hash h, and the largest ~h, which is the complement of the smallest h.
        largest, smallest = all_reduce(torch.stack([hashes, ~hashes]), axis, ReduceOp.MAX)
        outcome[1] |= (largest != ~smallest).any()
    for axis in axes:  # ranks that share no axis with the odd one must know, too
        all_reduce(outcome, axis, ReduceOp.MAX)
    stops, differs = outcome.tolist()
    if stops:
        raise Stopped
    if not differs:
        return

    # By value: the ranks that hold it in common, in camps that agree.
    who = f"({mesh.describe_rank()}) on {socket.gethostname()}"
    local = {name: (along, int(digest)) for name, along, digest in shared}
    ranks = mesh.control.gather((mesh.coordinates, who, local))
    drifts = []  # (name, axes, camps)
    for name in dict.fromkeys(name for *_, values in ranks for name in values):
        groups: dict[tuple[int, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for coordinates, who, values in ranks:
            if name not in values:  # belongs to another pipeline stage
                continue
            along, digest = values[name]
            is_tied = not {*along} <= {axis.name for axis in mesh.axes}
            joined = {*along, *["pipeline"] * is_tied}
            elsewhere = tuple(index for axis, index in coordinates.items() if axis not in joined)
            groups[elsewhere][digest].append(who)
        for by_digest in groups.values():
            if len(by_digest) > 1:
                drifts.append((name, along, sorted(by_digest.values(), key=len, reverse=True)))
    drifted = list(dict.fromkeys(name for name, *_ in drifts))
    _, along, camps = drifts[0]
    cure = "no check of this run had passed: start again from what it started from"
    if passed is not None:
        cure = f"all were equal at step {passed}: resume from the checkpoint of then"
    error = ReplicaDrift(
        f"replica drift at step {state.step} in {listed(drifted)}; in the first, along "
        f"{' and '.join(along)}: {' against '.join(map(listed, camps))}\n"
        "a rank has another processor, versions, threads or files behind --data-path, a bit "
        f"flipped there, or a callback of yours changed it; {cure}, without that host"
    )
    error.names, error.axes, error.camps = drifted, along, camps
    raise error


def _shared(
    state: TrainState, batches: Sequence[Batch], wants_stop: Callable[[], bool]
) -> Iterator[tuple[str, tuple[str, ...], Tensor]]:
    """Yields (name, axes whose ranks hold it in common, hash) for all tensors of a checkpoint, with
    padding rows, for the batches and for the counters."""
    mesh = state.mesh
    axes, ties = _several(mesh.axes), tuple(axis.name for axis in _ties(state))
    for each in state.slices():
        copies = {axis.name for axis in each.spec.copied_over(*mesh.axes)}
        if along := tuple(name for name in axes + ties if name in copies):
            read = each.local.new_empty(0) if wants_stop() else each.local
            yield each.key, along, digest(read).to(mesh.device)  # some are on the host
    along = _several(mesh.of_one_batch)
    for field in fields(batches[0]) if batches and along else ():
        arrays = [getattr(batch, field.name) for batch in batches]
        content = b"".join(
            b"none" if array is None else repr(array.shape).encode() + array.tobytes()
            for array in arrays
        )
        yield f"batch.{field.name}", along, _digest_bytes(content, mesh)
    for name, value in state.counters().items():
        content = json.dumps(value, sort_keys=True).encode()
        yield f"counters.{name}", axes, _digest_bytes(content, mesh)


def _ties(state: TrainState) -> list[Axis]:
    """Axes of the stages that hold copies of a parameter, without the whole pipeline axis."""
    partial = (axis for each in state.slices() for axis in each.spec.partial)
    ties = {axis.name: axis for axis in partial if axis.is_of_stages and axis.size > 1}
    return [ties[name] for name in sorted(ties) if ties[name] is not state.mesh.pipeline]


def _several(axes: Sequence[Axis]) -> tuple[str, ...]:
    """The names of the axes that have several ranks."""
    return tuple(axis.name for axis in axes if axis.size > 1)


@torch.no_grad()
def digest(tensor: Tensor, chunk: int | None = None) -> Tensor:
    """A hash of the bits of a tensor: int64 scalar on its device, the same in every run.

    Multiplies every 32 bits (16 or 8 in narrower dtypes) by an odd number for their position in the
    chunk, and sums up with wrapping. One flipped bit adds an odd number times a power of two, which
    is never 0; two exchanged values go unnoticed about once in 2^31. chunk: elements hashed at a
    time, 16 bytes each.
    """
    words = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    weights = _weights(tensor.device, chunk or CHUNK[tensor.device.type])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), len(weights)):
        chunk_words = words[start : start + len(weights)].to(torch.int64)
        total.mul_(FACTOR).add_(chunk_words.mul_(weights[: len(chunk_words)]).sum())
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
