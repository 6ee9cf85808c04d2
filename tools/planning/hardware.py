"""What a machine can do: a TOML file whose every figure is a table of value and source."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.config.checks import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "hardware"


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """What a run on one device is known to attain, in FLOP/s with recomputation and padding."""

    flops_per_second: float
    software: str  # a key of SOFTWARE
    precision: str
    num_layers: int
    hidden_size: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of a server and its devices, in bytes, seconds and FLOP/s."""

    name: str
    is_cpu: bool
    devices_per_server: int
    memory: float
    reserved_memory: float  # that no tensor can have
    memory_bandwidth: float
    peaks: Mapping[str, float]  # of matrix products, by precision
    multiprocessors: int  # 0: products are not cut into tiles
    tile: tuple[int, int]  # rows and columns of a result that one multiprocessor computes at a time
    link_bandwidth: float  # of one device inside a server, in one direction
    link_share: float  # of it that an all-reduce attains
    network_bandwidth: float  # of a server, in one direction
    network_share: float
    base_latency: float  # of an all-reduce
    link_latency: float  # of a hop inside a server
    network_latency: float  # of a hop between servers
    attained_share: float  # of peak and of memory bandwidth; by anchor.py where there is an anchor
    anchor: Anchor | None
    sources: Mapping[str, str]

    def peak(self, precision: str) -> float:
        """ValueError where the device has none."""
        if precision not in self.peaks:
            works = " or ".join(f"--{'no-bf16' if p == 'fp32' else p}" for p in self.peaks)
            raise ValueError(f"{self.name} has no peak in {precision}; {works} would work")
        return self.peaks[precision]

    @property
    def default_precision(self) -> str:
        """bf16 where the device multiplies in it."""
        return "bf16" if self.peaks.get("bf16", 0) > self.peaks["fp32"] else "fp32"


# Figures that a file need not have, because not every machine has what they are about.
ABSENT = {"multiprocessors": 0, "tile": [1, 1], "attained_share": 1.0}
# Fields that are no tables of value and source.
APART = ("name", "is_cpu", "peaks", "anchor", "sources")


def known_hardware() -> list[str]:
    """Names of the files in scripts/hardware/."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """name: of a file in scripts/hardware/, or a file. ValueError, with a cure, for others."""
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        known = known_hardware()
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise UsageError(
            "--hardware",
            name,
            f"one of {', '.join(known)}, or a file that --measure wrote",
            works=("--hardware", nearest),
        )
    try:
        return read_hardware(tomllib.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "--hardware",
            file,
            f"a description like scripts/hardware/cpu.toml ({type(error).__name__}: {error})",
        ) from error


def read_hardware(text: Mapping[str, Any]) -> Hardware:
    """text: {figure: {"value", "source"}}, with peaks by precision below "peak"."""
    peaks = text["peak"]
    sources = {f"peak.{each}": peaks[each]["source"] for each in peaks}
    values: dict[str, Any] = {"name": text["name"], "is_cpu": text.get("is_cpu", False)}
    for field in fields(Hardware):
        if field.name in APART:
            continue
        figure = text.get(field.name)
        if figure is None:
            values[field.name] = ABSENT[field.name]
        else:
            values[field.name] = figure["value"]
            sources[field.name] = figure["source"]
    values["tile"] = tuple(values["tile"])
    values["anchor"] = Anchor(**text["anchor"]) if "anchor" in text else None
    known = Hardware(
        **values, peaks={each: peaks[each]["value"] for each in peaks}, sources=sources
    )
    for name in ("memory", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        if not getattr(known, name) > 0:
            raise ValueError(f"{name} is {getattr(known, name)}, and has to be above 0")
    if not all(each > 0 for each in (known.peaks["fp32"], *known.peaks.values())):
        raise ValueError(f"peaks are {known.peaks}, and have to be above 0")
    return known
