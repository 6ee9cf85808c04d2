"""A description of this machine for tools/plan.py, found by running it.

Matmuls and all-reduces are those that tools/doctor.py times. Under torchrun the all-reduce runs
over all processes, and each process is one device: on a CPU it has its share of the cores.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron.data.files import write_atomically
from megatron.parallel.mesh import Mesh
from tools.doctor import links, machine
from tools.doctor.findings import Fact

COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than caches hold
RESERVED = {"cpu": 1e9, "cuda": 2e9}  # bytes
ROUNDS = 7

Figures = dict[str, tuple[Any, str]]


def measure(mesh: Mesh) -> Figures | None:
    """{figure: (value, source)} on the first rank, else None; every rank calls this."""
    found = [each.value for each in links.all_reduces(mesh) if isinstance(each, Fact)]
    reduced = [each for each in found if isinstance(each, dict) and "seconds" in each]
    bandwidth = _memory_bandwidth(mesh.device)
    if not mesh.is_first:
        return None
    kind, date = mesh.device.type, f"{datetime.now(UTC):%Y-%m-%d}"
    source = f"measured by --measure, {date}, torch {torch.__version__}"
    if kind == "cuda":
        memory = float(torch.cuda.mem_get_info(mesh.device)[1])
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size()
    link, latency, shown = bandwidth / 6, 0.0, "not measured, a sixth of memory; torchrun does"
    if reduced:
        small, large = reduced[0], reduced[-1]
        ranks, latency = large["size"], small["seconds"]
        sent = 2 * (ranks - 1) / ranks * (large["bytes"] - small["bytes"])
        if (seconds := large["seconds"] - small["seconds"]) <= 0:
            raise RuntimeError("a large all-reduce took no longer than a small one: a busy machine")
        link = sent / seconds
        shown = f"{large['backend']}, {ranks} ranks, {small['bytes']} and {large['bytes']} bytes"
    attained, in_server = (1.0, "what was measured is attained"), "not measured: as in the server"
    speeds = [fact for fact in machine.speed(mesh.device) if isinstance(fact, Fact)]
    return {
        "devices_per_server": (mesh.size(), f"{mesh.size()} processes on this machine"),
        "memory": (memory, f"of this machine, for each of {mesh.size()} processes"),
        "reserved_memory": (RESERVED[kind], "an allowance for the program and its libraries"),
        "memory_bandwidth": (bandwidth, f"{source}: copies of {COPIED[kind] >> 20} MiB"),
        **{
            f"peak.{fact.name.removeprefix('product, ')}": (
                fact.value["flops_per_second"],
                f"{source}: {fact}",
            )
            for fact in speeds
        },
        "link_bandwidth": (link, f"{source}: {shown}"),
        "link_share": attained,
        "network_bandwidth": (link, in_server),
        "network_share": attained,
        "base_latency": (latency, f"{source}: {shown}"),
        "link_latency": (0.0, "part of base_latency"),
        "network_latency": (0.0, "not measured"),
    }


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / median(times)


def write(file: Path, figures: Figures, device: torch.device) -> None:
    """TOML, as tools/plan/hardware.py reads it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        facts = (each for each in machine.devices(device, 1) if isinstance(each, Fact))
        name = next(str(each) for each in facts if each.name == "CPU")
    lines = [f"name = {json.dumps(name)}", f"is_cpu = {json.dumps(device.type == 'cpu')}"]
    for figure, (value, source) in figures.items():
        number = f"{value:.6g}" if isinstance(value, float) else value
        lines += ["", f"[{figure}]", f"value = {number}", f"source = {json.dumps(source)}"]
    write_atomically(file, ("\n".join(lines) + "\n").encode())


def shown(figures: Figures) -> str:
    width = max(map(len, figures))
    rows = (f"  {n:<{width}}  {value:<12.6g}  {source}" for n, (value, source) in figures.items())
    return "\n".join(rows)
