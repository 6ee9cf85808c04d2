"""A description of this machine for tools/plan.py, found by running it.

Matmuls and all-reduces are those that tools/doctor.py times. Under torchrun each process is one
device, and collectives of several sizes are timed inside a server and between servers; with the
layouts of a model its layers are timed, too. On a CPU processes share cores and memory: what they
measure is true of runs of as many processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron.config.pretrain import PretrainConfig
from megatron.data.files import write_atomically
from megatron.parallel.mesh import Mesh
from tools.doctor import layers, links, machine
from tools.doctor.findings import Fact

COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than caches hold
RESERVED = {"cpu": 1e9, "cuda": 2e9}  # bytes
ROUNDS = 7

Figures = dict[str, tuple[Any, str]]


def measure(mesh: Mesh, in_server: int, configs: Sequence[PretrainConfig] = ()) -> Figures | None:
    """{figure: (value, source)} on the first rank, else None; every rank calls this. in_server:
    ranks of each server. configs: layouts whose layers are timed, of layers.variants; then the
    figure "layers" is a list of tables."""
    bandwidth = _memory_bandwidth(mesh.device)
    tables = links.tables(mesh, in_server)
    timed = layers.measure(configs, mesh)
    if not mesh.is_first:
        return None
    kind, date = mesh.device.type, f"{datetime.now(UTC):%Y-%m-%d}"
    source = f"measured by --measure, {date}, torch {torch.__version__}"
    if kind == "cuda":
        memory = float(torch.cuda.mem_get_info(mesh.device)[1])
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / in_server
    link, latency, shown = bandwidth / 6, 0.0, "not measured, a sixth of memory; torchrun does"
    reduced, servers = tables.get("all_reduce", {}), mesh.size() // in_server
    if in_server > 1:
        link, latency = _link(reduced[str(in_server)], in_server)
        shown = f"all-reduces of {in_server} ranks"
    network, between = link, "not measured: as in the server"
    if servers > 1:  # the ranks of a server share its adapters
        network = in_server * _link(reduced[f"{servers}/{servers}"], servers)[0]
        between = f"{source}: all-reduces of a rank of each of {servers} servers"
    attained = 1.0, "what was measured is attained"
    speeds = [fact for fact in machine.speed(mesh.device) if isinstance(fact, Fact)]
    found: Figures = {
        "devices_per_server": (in_server, f"{in_server} processes on this machine"),
        "memory": (memory, f"of this machine, for each of {in_server} processes"),
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
        "network_bandwidth": (network, between),
        "network_share": attained,
        "base_latency": (latency, f"{source}: {shown}"),
        "link_latency": (0.0, "part of base_latency"),
        "network_latency": (0.0, "not measured"),
        **{
            kind: (each, f"{source}: medians of the slowest rank, groups side by side")
            for kind, each in tables.items()
        },
    }
    if kind == "cpu":
        cores = machine.cores()
        threads = torch.get_num_threads()
        shown = f"{cores} cores, {threads} threads in each of {in_server} processes"
        found["concurrent_devices"] = (max(1, min(in_server, cores // threads)), shown)
    if timed.layers:
        shown = f"{source}: {mesh.size()} processes, {layers.MICRO_BATCHES} micro-batches, models "
        shown += f"of {layers.DEPTHS[0]} and {layers.DEPTHS[1]} layers in turns"
        found["optimizer_bandwidth"] = (timed.optimizer_bandwidth, shown)
        found["step_overhead"] = (timed.step_overhead, shown)
        found["layers"] = ([each.table() for each in timed.layers], shown)
    return found


def _link(rows: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """(bytes a second of each rank, seconds of a small one) of measured all-reduces. Raises
    RuntimeError where the largest took no longer than the smallest."""
    (small, latency), *_, (large, longest) = rows
    if longest <= latency:
        raise RuntimeError("a large all-reduce took no longer than a small one: a busy machine")
    return 2 * (ranks - 1) / ranks * (large - small) / (longest - latency), latency


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * source.nbytes / median(links.seconds(copy, device) for _ in range(ROUNDS))


def write(file: Path, figures: Figures, device: torch.device) -> None:
    """TOML, as tools/plan/hardware.py reads it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        facts = (each for each in machine.devices(device, 1) if isinstance(each, Fact))
        name = next(str(each) for each in facts if each.name == "CPU")
    lines = [f"name = {json.dumps(name)}", f"is_cpu = {json.dumps(device.type == 'cpu')}"]
    for figure, (value, source) in figures.items():
        cited = f"source = {json.dumps(source)}"
        if figure == "layers":
            for each in value:
                lines += ["", "[[layers]]", *(f"{k} = {_toml(v)}" for k, v in each.items()), cited]
        elif isinstance(value, dict):
            rows = (f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items())
            lines += ["", f"[{figure}]", cited, "", f"[{figure}.value]", *rows]
        else:
            lines += ["", f"[{figure}]", f"value = {_toml(value)}", cited]
    write_atomically(file, ("\n".join(lines) + "\n").encode())


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def shown(figures: Figures) -> str:
    """Figures that are single numbers, and a line for each measured layer."""
    width = max(map(len, figures))
    lines = [
        f"  {name:<{width}}  {value:<12.6g}  {source}"
        for name, (value, source) in figures.items()
        if isinstance(value, (int, float))
    ]
    for each in figures.get("layers", ([], ""))[0]:
        cut = f"tensor {each['tensor']}{', sequence' if each['sequence_parallel'] else ''}"
        settings = dict(word.partition("=")[::2] for word in each["settings"].split())
        if context := settings.get("context_parallel_size"):
            cut += f", context {context}"
        size = f"micro-batch {each['micro_batch']}, recompute {each['recompute']}"
        layer, edge = (
            1000 * (each[f"{part}forward"] + each[f"{part}backward"]) for part in ("", "edge_")
        )
        lines.append(f"  {cut}, {size}: a layer {layer:.4g} ms, the edge {edge:.4g} ms")
    return "\n".join(lines)
