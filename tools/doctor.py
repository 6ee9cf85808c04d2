"""Finds, by running them, the devices, kernels, links and limits that a run here would use.

    python tools/doctor.py
    torchrun --nproc-per-node 2 tools/doctor.py --tensor-model-parallel-size 2

Exits with status 0 unless something that training needs is broken. Problems are listed last, each
with a cure.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.launch import world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.errors import UsageError

if TYPE_CHECKING:
    import torch

    from tools.probes.findings import Report

REINSTALL = "install the versions of requirements.txt; for a GPU, torch's build for its driver"


@dataclass(frozen=True, kw_only=True)
class Settings:
    save: str = "."
    """Folder in which a run would save its checkpoints."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision in which the layers are run; auto is the default of training."""

    json: str | None = None
    """JSON file for all results, for scripts."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def check(self, world: int) -> None:
        """Raise ValueError or OSError if the number of processes or the file is not possible."""
        self.parallel.check(world)
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise UsageError("--json", self.json, "in a folder that is there")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Every rank runs the all-reduces; the first runs everything else."""
    # Below this level torch's profiler reports on standard error that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
        settings.check(world_size(environ))

    from megatron.train.launch import launch
    from tools.probes import links
    from tools.probes.findings import Report

    report = Report()
    with launch(settings.parallel, environ) as mesh:
        network = "see that the ranks reach each other: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        report.run("ranks", "ranks", partial(links.ranks, mesh), cure=network)
        report.run("all-reduce", "all-reduce", partial(links.all_reduces, mesh), cure=network)
        device, is_first = mesh.device, mesh.is_first
    if not is_first:
        return 0
    examine(report, settings, device, environ)
    print(report.text())
    if settings.json is not None:
        Path(settings.json).write_text(json.dumps(report.record(), indent=1) + "\n")
    return 0 if report.is_healthy else 1


def local_processes(environ: Mapping[str, str]) -> int:
    """Number of processes of this run on this machine."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1"))


def examine(
    report: Report, settings: Settings, device: torch.device, environ: Mapping[str, str]
) -> None:
    """Add the findings that need only one process."""
    from megatron.train.launch import default_precision
    from megatron.train.state import DTYPES
    from tools.probes import kernels, libraries, machine

    precision = default_precision(device) if settings.precision == "auto" else settings.precision
    probes = {
        "versions": machine.versions,
        "devices": partial(machine.devices, device, precision, local_processes(environ)),
        "limits": partial(machine.limits, settings.save, device),
        "environment": partial(machine.environment, environ),
        "speed": partial(machine.speed, device),
    }
    for section, probe in probes.items():
        report.run(section, section, probe, cure=REINSTALL)
    compiler = partial(libraries.layer_compiler, device)
    report.run("libraries", "torch.compile", compiler, cure=REINSTALL, is_needed=False)
    for package, probe in libraries.PROBES.items():
        cure = f"pip uninstall {package}, which is optional, or install it again"
        report.run("libraries", package, probe, cure=cure, is_needed=False)
    has_apex = device.type == "cuda" and libraries.lack_of_apex() is None
    for name, probe in kernels.probes(device, DTYPES[precision], apex=has_apex).items():
        report.run("kernels", name, probe, cure=REINSTALL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
