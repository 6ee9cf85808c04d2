"""Figures of a machine, from a TOML file in which each figure is a table of value and source."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "hardware"
PROGRAMS = ("this project", "megatron 2019", "megatron 2020")  # see software.py
POSITIVE = ("memory", "memory_bandwidth", "link_bandwidth", "network_bandwidth")


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A run of a GPT-2 on one device; its FLOP/s include recomputation and padding."""

    flops_per_second: float
    software: str  # one of PROGRAMS
    precision: str
    num_layers: int
    hidden_size: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    source: str

    def __post_init__(self) -> None:
        if self.software not in PROGRAMS:
            raise ValueError(f"software {self.software!r} is none of {', '.join(PROGRAMS)}")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A server and its devices, in bytes, seconds and FLOP/s. A file may omit defaults."""

    name: str
    is_cpu: bool
    devices_per_server: int
    memory: float
    reserved_memory: float  # that tensors cannot use
    memory_bandwidth: float
    peaks: Mapping[str, float]  # of matmuls, by precision
    multiprocessors: int = 0  # 0: matmuls are not cut into tiles
    tile: tuple[int, int] = (1, 1)  # rows and columns that a multiprocessor computes at a time
    link_bandwidth: float  # of one device inside a server, in one direction
    link_share: float  # fraction of it that an all-reduce attains
    network_bandwidth: float  # of a server, in one direction
    network_share: float
    base_latency: float  # of an all-reduce
    link_latency: float  # of a hop inside a server
    network_latency: float  # of a hop between servers
    attained_share: float = 1.0  # of peak and memory bandwidth; from the anchor if there is one
    anchor: Anchor | None
    sources: Mapping[str, str]

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matmuls. Raises ValueError if the device has none in this precision."""
        if precision not in self.peaks:
            works = " or ".join(f"--{'no-bf16' if p == 'fp32' else p}" for p in self.peaks)
            raise ValueError(f"{self.name} has no peak in {precision}; {works} works")
        return self.peaks[precision]

    @property
    def device(self) -> str:
        """torch's name of the device type."""
        return "cpu" if self.is_cpu else "cuda"

    @property
    def limit(self) -> float:
        """Bytes available to tensors."""
        return self.memory - self.reserved_memory

    @property
    def default_precision(self) -> str:
        """bf16 if its peak is above that of fp32, else fp32."""
        return "bf16" if self.peaks.get("bf16", 0) > self.peaks["fp32"] else "fp32"


# A reduced byte moves 6 bytes in memory on each rank: in each of two rounds the rank writes what
# its neighbour sends, reads it, and reads or writes its own.
RING_PASSES = 6


@dataclass(frozen=True)
class Ring:
    """Ranks that communicate, `stride` apart; servers are filled in the order of ranks.

    A collective runs as a ring, as in NCCL over NVLink and over the network. In a pass each of r
    ranks sends, and receives, (r - 1) / r of the bytes. An all-reduce takes two passes: one to sum
    the parts, one to send the sums round. The slowest hop of the ring sets the pace:

        seconds = passes (r - 1) / r x bytes / bandwidth + latency: a start, passes (r - 1) hops

    A broadcast or a reduce passes all of its bytes from one rank to the next.
    """

    ranks: int
    stride: int

    def seconds(
        self, size: float, hardware: Hardware, passes: int = 2, *, is_rooted: bool = False
    ) -> float:
        """Seconds of a collective of `size` bytes while the other rings of the job do the same."""
        if self.ranks == 1:
            return 0.0
        sent = size if is_rooted else passes * (self.ranks - 1) / self.ranks * size
        return sent / self.bandwidth(hardware) + self.latency(hardware, passes)

    def message(self, size: float, hardware: Hardware) -> float:
        """Seconds to send `size` bytes from one rank to the next, while all ranks do the same."""
        pair = Ring(2, self.stride)
        is_inside = pair.inside(hardware) == 2
        hop = hardware.link_latency if is_inside else hardware.network_latency
        return size / pair.bandwidth(hardware) + hardware.base_latency + hop

    def shift(self, size: float, hardware: Hardware) -> float:
        """Seconds in which each rank sends `size` bytes to the next one."""
        is_inside = self.inside(hardware) == self.ranks
        hop = hardware.link_latency if is_inside else hardware.network_latency
        return size / self.bandwidth(hardware) + hardware.base_latency + hop

    def inside(self, hardware: Hardware) -> int:
        """Number of the ring's ranks in one server."""
        return max(1, min(self.ranks, hardware.devices_per_server // self.stride))

    def bandwidth(self, hardware: Hardware) -> float:
        """Bytes a second through each hop in one direction."""
        inside = self.inside(hardware)
        link = hardware.link_bandwidth * hardware.link_share
        if inside == self.ranks:
            return link
        rings = hardware.devices_per_server // inside  # that share the server's adapters
        network = hardware.network_bandwidth * hardware.network_share / rings
        return network if inside == 1 else min(link, network)

    def latency(self, hardware: Hardware, passes: int = 2) -> float:
        inside, hops = self.inside(hardware), passes * (self.ranks - 1)
        outer = 0 if inside == self.ranks else min(hops, passes * self.ranks // inside)
        inner = (hops - outer) * hardware.link_latency
        return hardware.base_latency + inner + outer * hardware.network_latency

    def slowed(self, sent: float, hardware: Hardware) -> float:
        """Seconds of memory bandwidth that hidden collectives, sending `sent` bytes, take away."""
        moved = RING_PASSES * sent * self.ranks / (2 * (self.ranks - 1))
        return moved / (hardware.memory_bandwidth * hardware.attained_share)


def known_hardware() -> list[str]:
    """Names of the files in scripts/hardware/."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Reads scripts/hardware/NAME.toml, or the file `name`. Raises UsageError with a cure."""
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        known = known_hardware()
        allowed = f"one of {', '.join(known)}, or a file that --measure wrote"
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise UsageError("--hardware", name, allowed, works=("--hardware", nearest))
    try:
        return read_hardware(tomllib.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        allowed = f"a description like scripts/hardware/cpu.toml ({type(error).__name__}: {error})"
        raise UsageError("--hardware", file, allowed) from error


def read_hardware(text: dict[str, Any]) -> Hardware:
    """text: {figure: {"value", "source"}}, with peaks by precision below "peak"."""
    peaks = {f"peak.{name}": each for name, each in text["peak"].items()}
    known = {each.name for each in fields(Hardware)} - {"name", "is_cpu", "anchor"}
    figures = {name: each for name, each in text.items() if name in known}
    for name in ("peak.fp32", *peaks, *POSITIVE):
        if not (value := (figures | peaks)[name]["value"]) > 0:
            raise ValueError(f"{name} is {value}, and has to be above 0")
    return Hardware(
        name=text["name"],
        is_cpu=text.get("is_cpu", False),
        peaks={name: each["value"] for name, each in text["peak"].items()},
        anchor=Anchor(**text["anchor"]) if "anchor" in text else None,
        sources={name: each["source"] for name, each in (figures | peaks).items()},
        **{name: each["value"] for name, each in figures.items()},
    )
