"""The ranks, an all-reduce of several sizes between them along each axis, and, for the planner,
tables of every kind of collective inside and between servers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megatron.parallel.collectives import (
    all_reduce,
    start_gather,
    start_receive,
    start_send,
    start_sum,
)
from megatron.parallel.mesh import Axis, Mesh
from tools.doctor.findings import Fact, Finding, Problem

FORMULA = "bus bandwidth = 2 (n - 1) / n x bytes / seconds, n ranks of the axis"
SIZES = {"cpu": (2**10, 2**20, 2**23), "cuda": (2**10, 2**20, 2**26)}  # bytes
TABLED = {"cpu": (2**6, 2**16, 2**20, 2**23, 2**25), "cuda": (2**10, 2**20, 2**24, 2**28)}
ROUNDS = 5
Tables = dict[str, dict[str, list[tuple[int, float]]]]
"""(bytes, seconds) by kind of collective, and by "ranks" or "ranks/servers"."""
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
    buffer.zero_()
    call = partial(all_reduce, buffer, axis)
    typical = median(seconds(call, mesh.device) for _ in range(ROUNDS))
    everyone = mesh.control.gather((is_right, typical))
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
    unit, letters = next(pair for pair in UNITS if size >= pair[0])
    name = f"{axis.name} axis, {size // unit} {letters}"
    text = f"{axis.size} ranks, {backend}: {1e3 * slowest:.3f} ms, {bus / 1e9:.3f} GB/s"
    yield Fact(name, record, text + (" and a WRONG SUM" if wrong else ""))
    if wrong:
        cure = "suspect the network or a GPU of these ranks; run the doctor on fewer nodes"
        what = f"the all-reduce along the {axis.name} axis gave a wrong sum on rank"
        yield Problem(f"{what} {', '.join(wrong)}", cure, is_needed=True)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done the call."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def tables(mesh: Mesh, in_server: int) -> Tables:
    """Times of collectives of whole tensors of each size, while other groups of as many ranks do
    the same; each is the median over rounds of the slowest rank. in_server: ranks of each server,
    filled in the order of ranks. Every rank calls this."""
    ranks = torch.arange(mesh.size())
    groups = {
        str(size): ranks.view(-1, size) for size in range(2, in_server + 1) if in_server % size == 0
    }
    if (servers := mesh.size() // in_server) > 1:
        groups[f"{mesh.size()}/{servers}"] = ranks.view(1, -1)
        groups[f"{servers}/{servers}"] = ranks.view(servers, in_server).T
        if servers > 2:  # for messages; ranks of an odd last server have no partner
            paired = ranks[: servers // 2 * 2 * in_server].view(-1, 2, in_server)
            groups["2/2"] = paired.transpose(1, 2).reshape(-1, 2)
    found: Tables = {}
    for name, members in groups.items():
        axis = mesh.control.new_axis(f"measured {name}", members)
        for size in TABLED[mesh.device.type]:
            for kind, call in _calls(axis, size, mesh.device).items():
                times = [_together(call, axis, mesh) for _ in range(1 + ROUNDS)][1:]
                slowest = map(max, zip(*mesh.control.gather(times), strict=True))
                rows = found.setdefault(kind, {}).setdefault(name, [])
                rows.append((size, median(slowest)))
    return found


def _together(call: Callable[[], object], axis: Axis, mesh: Mesh) -> float:
    """Seconds of a call that the ranks of the axis start at about the same time."""
    seconds(lambda: all_reduce(torch.zeros(1, device=mesh.device), axis), mesh.device)
    return seconds(call, mesh.device)


def _calls(axis: Axis, size: int, device: torch.device) -> Mapping[str, Callable[[], object]]:
    """By kind, for tensors of about `size` bytes of which each rank has or gets an equal part."""
    part = torch.zeros(max(1, size // 4 // axis.size), device=device)
    whole = torch.zeros(len(part) * axis.size, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, axis),
        "all_gather": lambda: start_gather(part, axis, whole)(),
        "reduce_scatter": lambda: start_sum(whole, axis, axis, part)(),
    }
    if axis.size == 2:
        pass_on = start_receive if axis.rank else start_send
        calls["message"] = lambda: pass_on(whole, axis, 1 - axis.rank, "a measured message")()
    elif axis.size == 1:  # a rank without a partner: all ranks gather the times of each kind
        calls["message"] = lambda: None
    return calls
