"""Figures of a machine, from a TOML file in which each figure is a table of value and source, and
of measured = true if the machine attains it. A table [software."NAME"] has figures that replace
them for one program, and one source."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import tomllib
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import UsageError
from tools.plan.layers import Layer, Shape, read_layers

if TYPE_CHECKING:
    from tools.plan.trace import Step

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "hardware"
PROGRAMS = ("this project", *(f"megatron {year}" for year in (2019, 2020, 2021, 2022)))
# see software.py
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "message")
Table = Sequence[tuple[float, float]]  # measured (bytes, seconds)
Tables = Mapping[int | str, Table]
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
    host_bandwidth: float = 0.0  # of a device's link to the host, in one direction; 0: not known
    host_memory_bandwidth: float = 0.0  # a device's share of the host's
    base_latency: float  # of an all-reduce
    link_latency: float  # of a hop inside a server
    network_latency: float  # of a hop between servers
    attained_share: float = 1.0  # of peak and memory bandwidth; from the anchor if there is one
    memory_share: float | None = None  # of memory bandwidth, where it differs from attained_share
    unaligned_share: float | None = None  # of peak, by matmuls that tensor cores do not like
    message_share: float | None = None  # of the network by messages; None: network_share
    tensor_network_share: float | None = None  # the same by tensor parallelism over servers
    layer_floor: float = 0.0  # seconds in which the host starts the kernels of a layer, both ways
    unfused_floor: float = 0.0  # more of it where the fused softmax does not take the shape
    layer_overhead: float = 0.0  # seconds of a layer and micro-batch beside its kernels
    tensor_overhead: float = 0.0  # more of it for each doubling of the tensor-parallel size
    head_overhead: float = 0.0  # seconds of a micro-batch beside the kernels of head and loss
    optimizer_bandwidth: float | None = None  # bytes a second; None: those of other kernels
    step_overhead: float = 0.0  # seconds of a step beside micro-batches, optimizer and gradients
    concurrent_devices: int = 0
    """How many devices of a server compute at full speed at a time, where these are processes that
    share cores; 0: all."""
    all_reduce: Tables = field(default_factory=dict)
    """Measured (bytes, seconds), which replace the ring: by number of ranks in a server, or for
    ranks of several servers by "ranks/servers"."""
    all_gather: Tables = field(default_factory=dict)
    reduce_scatter: Tables = field(default_factory=dict)
    message: Tables = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    """Measured layers, which replace their kernels and collectives; the first of a shape counts."""
    anchor: Anchor | None
    software: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By program: figures that replace those above, fitted to its runs."""
    sources: Mapping[str, str]
    are_measured: tuple[str, ...] = ()  # names of figures

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
    def moved_per_second(self) -> float:
        """Bytes that kernels other than matmuls read and write in a second."""
        share = self.attained_share if self.memory_share is None else self.memory_share
        return self.memory_bandwidth * share

    def measured(self, step: Step) -> Layer | None:
        """The measured layer of the step's shape, if there is one. On a CPU processes share cores
        and memory, so it is one of as many processes alone."""
        if self.is_cpu and step.ranks % self.devices_per_server:
            return None
        shape = Shape.of(step) if self.layers else None
        return next((each for each in self.layers if each.shape == shape), None)

    def shares_cores(self, ranks: int) -> bool:
        """Whether so many processes of a server have fewer cores than they keep busy."""
        return 0 < self.concurrent_devices < ranks <= self.devices_per_server

    def measures(self, step: Step) -> bool:
        """Whether the layers and the edge of the step were measured, and are not derived."""
        return (found := self.measured(step)) is not None and found.edge is not None

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

    A broadcast or a reduce passes all of its bytes from one rank to the next. span: of the ranks
    from its first to its last one and their neighbours; None: ranks x stride.
    """

    ranks: int
    stride: int
    span: int | None = None

    def seconds(
        self,
        size: float,
        hardware: Hardware,
        passes: int = 2,
        *,
        is_rooted: bool = False,
        kind: str = "all_gather",
    ) -> float:
        """Seconds of a collective of `size` bytes while the other rings of the job do the same.
        kind: of COLLECTIVES, of one that takes one pass."""
        if self.ranks == 1:
            return 0.0
        if not is_rooted:
            if passes == 1 and (table := self._measured(kind, hardware)):
                return interpolated(table, size)
            if table := self._measured("all_reduce", hardware):
                return passes / 2 * interpolated(table, size)
        sent = size if is_rooted else passes * (self.ranks - 1) / self.ranks * size
        return sent / self.bandwidth(hardware) + self.latency(hardware, passes)

    def message(self, size: float, hardware: Hardware) -> float:
        """Seconds to send `size` bytes from one rank to the next, while all ranks do the same."""
        pair = Ring(2, self.stride)
        if table := pair._measured("message", hardware):
            return interpolated(table, size)
        if hardware.message_share is not None:
            hardware = replace(hardware, network_share=hardware.message_share)
        return pair.shift(size, hardware)

    def shift(self, size: float, hardware: Hardware) -> float:
        """Seconds in which each rank sends `size` bytes to the next one."""
        is_inside = self.inside(hardware) == self.ranks
        hop = hardware.link_latency if is_inside else hardware.network_latency
        return size / self.bandwidth(hardware) + hardware.base_latency + hop

    def _measured(self, kind: str, hardware: Hardware) -> Table:
        inside, tables = self.inside(hardware), vars(hardware)[kind]
        key = self.ranks if inside == self.ranks else f"{self.ranks}/{self.ranks // inside}"
        found: Table = tables.get(key, ())
        return found

    def inside(self, hardware: Hardware) -> int:
        """Number of the ring's ranks in one server."""
        if self.span is not None and self.span <= hardware.devices_per_server:
            return self.ranks
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
        return moved / hardware.moved_per_second


def interpolated(table: Table, size: float) -> float:
    """Seconds of `size` bytes between measured sizes. Below the smallest, half of its time does not
    depend on the size; above the largest, the time grows as the size does."""
    smallest, largest = table[0], table[-1]
    if size < smallest[0]:
        return smallest[1] * (1 + size / smallest[0]) / 2
    if size >= largest[0]:
        return largest[1] * size / largest[0]
    place = bisect([each for each, _ in table], size)
    (low, start), (high, end) = table[place - 1 : place + 1]
    return start + (end - start) * (size - low) / (high - low)


def _likeness(name: str, known: str) -> tuple[bool, bool, float]:
    """h100 is like dgx-h100, then like h200, and not like p100."""
    model = known.rpartition("-")[2]
    ratio = difflib.SequenceMatcher(None, name, known).ratio()
    return name in known, model[:1] == name[:1], ratio


def gpu_here() -> str:
    """The file of the first GPU of this machine that has one, by nvidia-smi: its name ends with the
    model's, and the memory is the same within 10 %. Raises UsageError where there is none."""
    known = known_hardware()
    if (program := shutil.which("nvidia-smi")) is None:
        found = "there is no nvidia-smi"
    else:
        query = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            run = subprocess.run([program, *query], capture_output=True, text=True, timeout=60)
            found = (run.stdout + run.stderr).strip() or "nvidia-smi lists no GPU"
        except (OSError, subprocess.TimeoutExpired) as error:
            found = str(error)
    for model, size in re.findall(r"\b([A-Z]\d{3})\b.*, *(\d+)$", found, re.MULTILINE):
        for name in known:  # NVIDIA H100 80GB HBM3, 81559
            is_near = name.endswith(model.lower()) and not load_hardware(name).is_cpu
            if is_near and abs(int(size) * 2**20 / load_hardware(name).memory - 1) < 0.1:
                return name
    allowed = f"given ({found.splitlines()[0]}): one of {', '.join(known)}"
    raise UsageError("--hardware", None, allowed, works=("--hardware", "dgx-a100"))


def known_hardware() -> list[str]:
    """Names of the files in scripts/hardware/."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Reads scripts/hardware/NAME.toml, or the file `name`. Raises UsageError with a cure."""
    known = known_hardware()
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        near = sorted(known, key=partial(_likeness, name), reverse=True)[:2]
        allowed = f"{' or '.join(near)}, one of {', '.join(known)}, or a file that --measure wrote"
        raise UsageError("--hardware", name, allowed, works=("--hardware", near[0]))
    try:
        return read_hardware(tomllib.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        allowed = f"a description like scripts/hardware/cpu.toml ({type(error).__name__}: {error})"
        raise UsageError("--hardware", file, allowed) from error


def read_hardware(text: dict[str, Any]) -> Hardware:
    """text: {figure: {"value", "source"}}, with peaks by precision below "peak", and measured
    layers."""
    peaks = {f"peak.{name}": each for name, each in text["peak"].items()}
    apart = {"name", "is_cpu", "anchor", "software", "layers", "sources", "are_measured"}
    known = {each.name for each in fields(Hardware)} - apart
    figures = {name: each for name, each in text.items() if name in known}
    for name in ("peak.fp32", *peaks, *POSITIVE):
        if not (value := (figures | peaks)[name]["value"]) > 0:
            raise ValueError(f"{name} is {value}, and has to be above 0")
    for name in {*COLLECTIVES} & figures.keys():
        figures[name] = figures[name] | {"value": _tables(name, figures[name]["value"])}
    for name in {"optimizer_bandwidth", "step_overhead", "concurrent_devices"} & figures.keys():
        if not figures[name]["value"] >= (name == "optimizer_bandwidth"):
            raise ValueError(f"{name} is {figures[name]['value']}, and has to be above 0")
    for program, values in (software := text.get("software", {})).items():
        for name in {program} - {*PROGRAMS} | set(values) - known - {"source"}:
            raise ValueError(f"software {program}: {name} is not known")
    return Hardware(
        name=text["name"],
        is_cpu=text.get("is_cpu", False),
        peaks={name: each["value"] for name, each in text["peak"].items()},
        anchor=Anchor(**text["anchor"]) if "anchor" in text else None,
        software=software,
        layers=read_layers(text.get("layers", ())),
        sources={name: each["source"] for name, each in (figures | peaks).items()},
        are_measured=tuple(name for name, each in figures.items() if each.get("measured")),
        **{name: each["value"] for name, each in figures.items()},
    )


def _tables(name: str, value: Mapping[str, Any]) -> Tables:
    """Raises ValueError for ranks that are none, and for sizes that do not grow."""
    found: dict[int | str, Table] = {}
    for ranks, rows in value.items():
        if not re.fullmatch(r"[1-9]\d*(/[1-9]\d*)?", ranks):
            raise ValueError(f"{name}.{ranks}: has to be ranks, or ranks/servers")
        table = [(float(size), float(seconds)) for size, seconds in rows]
        sizes = [size for size, _ in table]
        if not table or sizes != sorted({*sizes}) or min(min(each) for each in table) <= 0:
            raise ValueError(f"{name}.{ranks}: has to be [[bytes, seconds], ..], by growing bytes")
        found[ranks if "/" in ranks else int(ranks)] = table
    return found
