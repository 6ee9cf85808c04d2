"""Finds, by running them, the devices, libraries, links and limits that a run here would use.

    python tools/doctor.py
    torchrun --nproc-per-node 2 tools/doctor.py --tensor-model-parallel-size 2

Exits with status 0 unless something that training needs is broken. Problems are listed last, each
with a cure.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.config.checks import writable
from megatron.config.launch import interruptible, world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.data.files import write_atomically

REINSTALL = "install the versions of requirements.txt; for a GPU, torch's build for its driver"
CURES = {  # of libraries that requirements.txt does not have
    "torch.compile": REINSTALL,
    "apex": "pip uninstall apex, or scripts/setup.sh --with-apex DIR",
}
NETWORK = "see that the ranks reach each other: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Settings:
    save: str = "."
    """Folder in which a run would save its checkpoints."""

    json: Path | None = None
    """JSON file for all results, for scripts."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        writable(self, "json")


@interruptible(os.environ)
def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Every rank runs the all-reduces; the first runs everything else."""
    with user_errors(environ):
        settings = parse(Settings, arguments, environ, description=__doc__ or "")
        settings.parallel.check(world_size(environ))

    from megatron.train.launch import launch
    from tools.doctor import links, machine
    from tools.doctor.findings import Report

    report = Report()
    with launch(settings.parallel, environ) as mesh:
        report.run("ranks", "ranks", partial(links.ranks, mesh), cure=NETWORK)
        report.run("all-reduce", "all-reduce", partial(links.all_reduces, mesh), cure=NETWORK)
        device, is_first = mesh.device, mesh.is_first
    if not is_first:
        return 0
    processes = int(environ.get("LOCAL_WORLD_SIZE", "1"))  # of this run on this machine
    probes = {
        "versions": machine.versions,
        "devices": partial(machine.devices, device, processes),
        "limits": partial(machine.limits, settings.save, device),
        "environment": partial(machine.environment, environ),
        "speed": partial(machine.speed, device),
    }
    for section, probe in probes.items():
        report.run(section, section, probe, cure=REINSTALL)
    for name, probe in machine.libraries(device).items():
        cure = CURES.get(name, f"install {name} again; requirements.txt names the release")
        report.run("libraries", name, probe, cure=cure, is_needed=False)
    with user_errors(environ):
        print(report.text())
        if settings.json is not None:
            write_atomically(settings.json, (json.dumps(report.record(), indent=1) + "\n").encode())
    return 0 if report.is_healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
