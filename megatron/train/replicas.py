"""The replica check: what several ranks hold in common has to be equal on them, bit for bit.

Every rank of the data axis holds the same parameters, masters and moments, and every rank of the
tensor axis those that are not cut along it (LayerNorm, positions, biases of row-parallel layers),
the counters and the samples it reads. They stay equal because every rank computes them alike from
the same sums; nothing sends them again. A flipped bit, a faulty processor or another file on one
node therefore stays unseen in the loss, and this check is what finds it.

A hash of 64 bits is made of each tensor, so that what travels is a few kilobytes an axis.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.data.batch import Batch
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Mesh
from megatron.train.state import TrainState

# Elements that are hashed at a time: their 8-byte products stay in a processor's cache, and fill a
# GPU.
PIECE = {"cpu": 2**18, "cuda": 2**22}
# Odd, and so a bijection of 64 bits: what one piece adds to the hash is not lost in the next.
FACTOR = 0x9E3779B97F4A7C15 - 2**64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element
BATCH = "batch."
WHY_TENSOR = (
    "a bit has flipped or a computation went wrong on a rank, and its hardware is suspect; other "
    "versions, another kind of processor or another number of threads there do the same"
)
WHY_BATCH = (
    "the tensor-parallel ranks of one model read other samples, so the files behind --data-path "
    "are not the same on their machines, or a bit has flipped on one of them"
)
NAMED = 5  # of a kind, which a message spells out


class ReplicaDrift(RuntimeError):  # noqa: N818
    """Ranks that should hold the same hold different values; every rank raises the same message."""


@dataclass(frozen=True)
class Entry:
    """One thing that the ranks of `axes` hold in common, and the hash of it here: int64 scalar."""

    name: str
    axes: tuple[str, ...]
    digest: Tensor


@dataclass(frozen=True)
class Holding:
    """What one rank holds: its coordinates and host, and {name: hash}."""

    coordinates: Mapping[str, int]
    host: str
    digests: Mapping[str, int]

    def __str__(self) -> str:
        place = ", ".join(f"{name} {rank}" for name, rank in self.coordinates.items())
        return f"({place}) on {self.host}"


@dataclass(frozen=True)
class Drift:
    """One thing that differs along its axes; camps: the ranks of each value, the largest first."""

    name: str
    axes: tuple[str, ...]
    camps: tuple[tuple[Holding, ...], ...]


def check_replicas(state: TrainState, batches: Sequence[Batch], passed: int | None = None) -> None:
    """Compare all that ranks hold in common; every rank calls this, after the same step.

    batches: this rank's micro-batches of the step. passed: the step of the last check that found
    nothing, for the message. Raises ReplicaDrift, on every rank.
    """
    mesh = state.mesh
    if mesh.size == 1:
        return
    entries = [*_tensors(state), *_batch(batches, mesh), *_counters(state)]
    if _is_equal(entries, mesh):
        return
    digests = {entry.name: int(entry.digest) for entry in entries}
    holdings = mesh.control.gather(Holding(mesh.coordinates, socket.gethostname(), digests))
    raise ReplicaDrift(_message(_find_drifts(entries, holdings), state.step, passed))


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor: int64 scalar on its device, the same in every run.

    Every 32 bits (16, 8 in narrower dtypes) times an odd number of their place, summed with
    wrapping: one flipped bit adds an odd number times a power of two, which is never 0; two values
    that change places go unnoticed about once in 2^31. Takes 16 bytes x PIECE, whatever the tensor.
    """
    words = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), len(weights)):
        piece = words[start : start + len(weights)].to(torch.int64)
        total.mul_(FACTOR).add_(piece.mul_(weights[: len(piece)]).sum())
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers, one for each place in a piece: int64 [PIECE]."""
    generator = torch.Generator().manual_seed(0)
    shape = (PIECE[device.type],)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).bitwise_or_(1).to(device)


def _tensors(state: TrainState) -> Iterator[Entry]:
    """All tensors of a checkpoint, padding rows included, over the axes that do not cut them."""
    for piece in state.pieces():
        axes = _shared(state.mesh, {axis.name for _, axis in piece.spec.cuts})
        if axes:
            yield Entry(piece.key, axes, digest(piece.local))


def _batch(batches: Sequence[Batch], mesh: Mesh) -> Iterator[Entry]:
    """What was read, which the tensor ranks of one data rank read each for itself."""
    for field in fields(batches[0]) if batches else ():
        arrays = [getattr(batch, field.name) for batch in batches]
        content = b"".join(
            b"none" if array is None else repr(array.shape).encode() + array.tobytes()
            for array in arrays
        )
        axes = _shared(mesh, {mesh.data.name})
        yield Entry(BATCH + field.name, axes, _digest_bytes(content, mesh))


def _counters(state: TrainState) -> Iterator[Entry]:
    for name, value in state.counters().items():
        content = json.dumps(value, sort_keys=True).encode()
        axes = _shared(state.mesh, set())
        yield Entry(f"counters.{name}", axes, _digest_bytes(content, state.mesh))


def _shared(mesh: Mesh, cut: set[str]) -> tuple[str, ...]:
    """The axes of several ranks that hold in common what is cut along the axes `cut`."""
    axes = (mesh.data, mesh.tensor)
    return tuple(axis.name for axis in axes if axis.size > 1 and axis.name not in cut)


def _digest_bytes(content: bytes, mesh: Mesh) -> Tensor:
    number = hashlib.blake2b(content, digest_size=8).digest()
    return torch.tensor(int.from_bytes(number, "little", signed=True), device=mesh.device)


def _is_equal(entries: Sequence[Entry], mesh: Mesh) -> bool:
    """Whether no rank of the run sees a difference: two small all-reduces an axis."""
    axes = [axis for axis in (mesh.data, mesh.tensor) if axis.size > 1]
    differs = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for axis in axes:
        own = torch.stack([entry.digest for entry in entries if axis.name in entry.axes])
        # Of the hashes h the largest h, and the largest ~h, which is the complement of the least.
        largest, least = all_reduce(torch.stack([own, ~own]), axis, ReduceOp.MAX)
        differs |= (largest != ~least).any()
    for axis in axes:  # those who share no axis with the odd rank have to know as well
        all_reduce(differs, axis, ReduceOp.MAX)
    return not differs.item()


def _find_drifts(entries: Sequence[Entry], holdings: Sequence[Holding]) -> list[Drift]:
    """All that differs between ranks, in the order of the entries; the same on every rank."""
    drifts = []
    for entry in entries:
        groups: dict[tuple[int, ...], list[Holding]] = {}
        for each in holdings:
            elsewhere = (rank for name, rank in each.coordinates.items() if name not in entry.axes)
            groups.setdefault(tuple(elsewhere), []).append(each)
        camps = [_camps(group, entry.name) for group in groups.values()]
        drifts += [Drift(entry.name, entry.axes, found) for found in camps if len(found) > 1]
    return drifts


def _camps(group: Sequence[Holding], name: str) -> tuple[tuple[Holding, ...], ...]:
    counts = Counter(each.digests[name] for each in group)
    return tuple(
        tuple(each for each in group if each.digests[name] == value)
        for value, _ in counts.most_common()
    )


def _message(drifts: Sequence[Drift], step: int, passed: int | None) -> str:
    assert drifts, "ranks saw a difference that is not in what they told each other"
    first = drifts[0]
    names = list(dict.fromkeys(drift.name for drift in drifts))
    axes = f"{' and '.join(first.axes)} {'axis' if len(first.axes) == 1 else 'axes'}"
    return "\n".join(
        [
            f"replica drift at step {step}: {first.name} is not the same along the {axes}",
            f"  who: {_who(first)}",
            f"  what: {len(names)} in all: {_listed(names)}",
            f"  why: {WHY_BATCH if first.name.startswith(BATCH) else WHY_TENSOR}",
            f"  cure: {_cure(passed)}",
        ]
    )


def _who(drift: Drift) -> str:
    majority, *odd = drift.camps
    if 2 * len(majority) > sum(len(camp) for camp in drift.camps):
        ranks = [str(each) for camp in odd for each in camp]
        verb = "differs" if len(ranks) == 1 else "differ"
        others = f"the {len(majority)} others" if len(majority) > 1 else "the other"
        return f"{_listed(ranks)} {verb} from {others}, which agree"
    camps = " against ".join(_listed([str(each) for each in camp]) for camp in drift.camps)
    return f"{camps}; no majority tells which of them is wrong"


def _listed(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _cure(passed: int | None) -> str:
    if passed is None:
        return (
            "no check has passed since this run started, so start again from what it started from, "
            "on other hardware than that of the rank that differs"
        )
    return (
        f"the last check passed at step {passed}: resume from the checkpoint of that step or an "
        "earlier one, on other hardware than that of the rank that differs; later checkpoints may "
        "hold the fault"
    )
