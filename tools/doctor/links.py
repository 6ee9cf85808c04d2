"""The ranks, and an all-reduce of several sizes between them along each axis."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis, Mesh
from tools.doctor.findings import Fact, Finding, Problem

FORMULA = "bus bandwidth = 2 (n - 1) / n x bytes / seconds, n ranks of the axis"
SIZES = {"cpu": (2**10, 2**20, 2**23), "cuda": (2**10, 2**20, 2**26)}  # bytes
ROUNDS = 5
UNITS = ((2**20, "MB"), (2**10, "KB"))


def ranks(mesh: Mesh) -> Iterator[Finding]:
    """Each rank with its coordinates, host, device and version of torch; every rank calls this."""
    own = {
        "coordinates": mesh.coordinates,
        "host": socket.gethostname(),
        "device": str(mesh.device),
        "torch": torch.__version__,
    }
    everyone = mesh.control.gather(own)
    for rank, each in enumerate(everyone):
        place = ", ".join(f"{name} {number}" for name, number in each["coordinates"].items())
        text = f"({place}), {each['device']} of {each['host']}, torch {each['torch']}"
        yield Fact(f"rank {rank}", each, text)
    found = sorted({each["torch"] for each in everyone})
    if len(found) > 1:
        cure = "install the same version everywhere: other versions round differently"
        yield Problem(f"ranks run different versions of torch: {', '.join(found)}", cure)


def all_reduces(mesh: Mesh) -> Iterator[Finding]:
    """All-reduces; the figures are those of the slowest rank. Every rank calls this."""
    yield Fact("formula", FORMULA)
    for axis in mesh.named_axes:
        if axis.size == 1:
            yield Fact(f"{axis.name} axis", {"size": 1}, "1 rank: nothing to send")
            continue
        backend = dist.get_backend(axis.group)
        for size in SIZES[mesh.device.type]:
            yield from _one_size(axis, backend, size, mesh)


def _one_size(axis: Axis, backend: str, size: int, mesh: Mesh) -> Iterator[Finding]:
    buffer = torch.full((size // 4,), axis.rank + 1.0, device=mesh.device)
    expected = axis.size * (axis.size + 1) / 2
    is_right = bool((all_reduce(buffer, axis) == expected).all())
    seconds = median(_seconds(buffer.zero_(), axis, mesh.device) for _ in range(ROUNDS))
    everyone = mesh.control.gather((is_right, seconds))
    slowest = max(each for _, each in everyone)
    wrong = [str(rank) for rank, (is_right, _) in enumerate(everyone) if not is_right]
    bus = 2 * (axis.size - 1) / axis.size * size / slowest
    record = {
        "size": axis.size,
        "backend": backend,
        "bytes": size,
        "seconds": slowest,
        "bus_bytes_per_second": bus,
        "right": not wrong,
    }
    name = f"{axis.name} axis, {told_size(size)}"
    text = f"{axis.size} ranks, {backend}: {1e3 * slowest:.3f} ms, {bus / 1e9:.3f} GB/s"
    yield Fact(name, record, text + (" and a WRONG SUM" if wrong else ""))
    if wrong:
        cure = "suspect the network or a GPU of these ranks; run the doctor on fewer nodes"
        what = f"the all-reduce along the {axis.name} axis gave a wrong sum on rank"
        yield Problem(f"{what} {', '.join(wrong)}", cure, is_needed=True)


def _seconds(buffer: torch.Tensor, axis: Axis, device: torch.device) -> float:
    start = time.perf_counter()
    all_reduce(buffer, axis)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def told_size(size: int) -> str:
    unit, name = next(pair for pair in UNITS if size >= pair[0])
    return f"{size // unit} {name}"
