"""A description of the machine at hand, found by running it; the one part here that needs torch.

Matrix products and all-reduces are those that tools/doctor.py times. Under torchrun the all-reduce
goes over all processes, and each is one device: on a CPU it has its share of the cores.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron.parallel.mesh import Mesh
from tools.probes import links, machine
from tools.probes.findings import Fact

COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than caches hold
ROUNDS = 7
RESERVED = {"cpu": 1e9, "cuda": 2e9}  # bytes

Figures = dict[str, tuple[Any, str]]


def measure(mesh: Mesh) -> Figures | None:
    """{figure: (value, source)} on the first rank, else None; every rank calls this."""
    found = [each.value for each in links.all_reduces(mesh) if isinstance(each, Fact)]
    reduced = [each for each in found if isinstance(each, dict) and "seconds" in each]
    bandwidth = _memory_bandwidth(mesh.device)
    if not mesh.is_first:
        return None
    return dict(_figures(mesh, bandwidth, reduced))


def _figures(
    mesh: Mesh, bandwidth: float, reduced: list[dict[str, Any]]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    kind, tool = mesh.device.type, f"measured by --measure, {datetime.now(UTC):%Y-%m-%d}, torch"
    source = f"{tool} {torch.__version__}"
    size, allowance = _memory(mesh), "an allowance for the program itself and its libraries"
    yield "devices_per_server", (mesh.size, f"{mesh.size} processes on this machine")
    yield "memory", (size, f"of this machine, for each of {mesh.size} processes")
    yield "reserved_memory", (RESERVED[kind], allowance)
    yield "memory_bandwidth", (bandwidth, f"{source}: copies of {COPIED[kind] >> 20} MiB")
    for fact in machine.speed(mesh.device):
        assert isinstance(fact, Fact)
        rate = fact.value["flops_per_second"]
        yield f"peak.{fact.name.removeprefix('product, ')}", (rate, f"{source}: {fact}")
    speed, latency, told = _link(reduced, bandwidth)
    yield "link_bandwidth", (speed, f"{source}: {told}")
    yield "link_share", (1.0, "what was measured is attained")
    yield "network_bandwidth", (speed, "not measured: that inside the server")
    yield "network_share", (1.0, "what was measured is attained")
    yield "base_latency", (latency, f"{source}: {told}")
    yield "link_latency", (0.0, "part of base_latency")
    yield "network_latency", (0.0, "not measured")


def _memory(mesh: Mesh) -> float:
    """Bytes of one device."""
    if mesh.device.type == "cuda":
        return float(torch.cuda.mem_get_info(mesh.device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second, by a copy."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * source.numel() * 4 / median(times)


def _link(reduced: list[dict[str, Any]], bandwidth: float) -> tuple[float, float, str]:
    """(bytes a second in one direction, seconds of a small all-reduce, how that was found)."""
    if not reduced:
        return bandwidth / 6, 0.0, "not measured, a sixth of memory; torchrun measures it"
    small, large = reduced[0], reduced[-1]
    ranks, extra = large["size"], large["seconds"] - small["seconds"]
    sent = 2 * (ranks - 1) / ranks * (large["bytes"] - small["bytes"])
    told = f"{large['backend']}, {ranks} ranks, {small['bytes']} and {large['bytes']} bytes"
    return sent / extra, small["seconds"], told


def write(file: Path, figures: Figures, device: torch.device) -> None:
    """TOML, as hardware.py reads it."""
    lines = [f"name = {json.dumps(_name(device))}", f"is_cpu = {json.dumps(device.type == 'cpu')}"]
    for figure, (value, source) in figures.items():
        lines += ["", f"[{figure}]", f"value = {value:.6g}" if isinstance(value, float)
                  else f"value = {value}", f"source = {json.dumps(source)}"]  # fmt: skip
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = machine.devices(device, "fp32", 1)
    return next(str(each) for each in found if isinstance(each, Fact) and each.name == "CPU")


def told(figures: Mapping[str, tuple[Any, str]]) -> str:
    width = max(map(len, figures))
    return "\n".join(
        f"  {name:<{width}}  {value:<12.6g}  {source}" for name, (value, source) in figures.items()
    )
