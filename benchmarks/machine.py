"""What every benchmark tells of the machine and of its figures."""

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tyro

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json")]


def facts(*packages: str) -> dict[str, Any]:
    """Commit, processor, cores, memory, Python, and the versions of these packages as far as
    installed."""
    from megatron.train.state import commit  # brings torch, which not every benchmark needs

    found = {
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB",
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def told(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items())


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (lower to upper quartile)."""
    lower, upper = np.quantile(values, [0.25, 0.75])
    return f"{median(values):.{digits}f} ({lower:.{digits}f} to {upper:.{digits}f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def installed(contestants: dict[str, tuple[str | None, Any]]) -> dict[str, Any]:
    found = {}
    for name, (package, function) in contestants.items():
        if package is None or importlib.util.find_spec(package):
            found[name] = function
        else:
            print(f"{name} is left out: pip install {package}")
    return found


def write_json(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")
