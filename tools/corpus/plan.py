"""Estimates the documents, disk, memory and time of a run from a sample.

A sample of the input goes through the steps themselves, in a temporary folder and with the run's
settings; their counts and costs are scaled up.  If disk or memory do not suffice, the command ends
with status 2 and names the step.

A sample with a share p of the documents has only p * p of the near-duplicates, which are pairs.  If
it is not too small, it gives a likely upper bound of what dedup removes, for --expected-removal.
The output of dedup is estimated as if it removed no more than it does in the sample.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import tyro

from megatron.data.files import atomic_writer
from megatron.data.json_lines import MANIFEST
from tools.corpus.early import check_early
from tools.corpus.estimate import (
    WARM_UP,
    Estimate,
    estimate,
    raw_inputs,
    take_sample,
    total_sizes,
)
from tools.corpus.pipeline import Description, Job, check_given, describe_given
from tools.corpus.settings import parse_size, program, say

UNPLANNED = ("report",)  # takes next to nothing
CGROUP = {  # by type of mount: files of a group's limit and use, name of the cache in memory.stat
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    config: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file of a run (python -m tools.corpus run); without it, give --input and --output."""

    input: tuple[Path, ...] = ()
    """Files of JSON lines or text, or folders of them, to clean, de-duplicate and split."""

    output: Path | None = None
    """Folder that the run would fill."""

    workers: int | None = None
    """Processes of every step; overrides the file."""

    sample: str = "8MB"
    """Size of the sample of the input."""

    seed: int = 1234
    """Seed of the sample; another seed draws another sample."""

    allow_overcommit: bool = False
    """Only warn if disk or memory do not suffice."""

    def __post_init__(self) -> None:
        check_given(self.config, self.input, self.output)
        self.sample_bytes  # noqa: B018, the property checks what it reads

    @property
    def sample_bytes(self) -> int:
        return parse_size("--sample", self.sample)


def run(settings: Settings) -> None:
    description = describe_given(settings.config, settings.input, settings.output)
    flags = {} if settings.workers is None else {"workers": settings.workers}
    jobs = description.jobs(flags)
    check_early(description, jobs)
    check(description, jobs, flags, settings)


def check(
    description: Description, jobs: Sequence[Job], flags: Mapping[str, Any], settings: Settings
) -> float | None:
    """Estimate, print, write OUTPUT/plan.json.  Raises ValueError if the jobs to do cannot fit.

    Returns the likely upper bound of the share that dedup removes, None if unknown.
    """
    jobs = [job for job in jobs if job.step not in UNPLANNED]
    left = [job for job in jobs if not (job.output / MANIFEST).exists()]
    if not left:
        return None
    estimates = make_plan(description, jobs, flags, settings)
    print_plan(estimates)
    faults = list(find_faults(left, estimates, Path(description.head["output"])))
    if faults and not settings.allow_overcommit:
        raise ValueError("; ".join([*faults, "--allow-overcommit would go on all the same"]))
    for fault in faults:
        say(f"warning: {fault}")
    return next((each.removal for each in estimates if each.removal is not None), None)


def make_plan(
    description: Description, jobs: Sequence[Job], flags: Mapping[str, Any], settings: Settings
) -> list[Estimate]:
    """The estimates; those of OUTPUT/plan.json if they were made for the same run."""
    file = Path(description.head["output"]) / "plan.json"
    raw = raw_inputs(description, jobs)
    sizes = total_sizes(raw)
    if not sum(sizes.values()):
        raise ValueError(f"{description.origin}: the input is empty")
    facts = [sizes, settings.sample_bytes, settings.seed, [job.settings for job in jobs]]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    if file.exists():
        kept = json.loads(file.read_bytes())
        if kept["fingerprint"] == fingerprint:
            return [Estimate(**each) for each in kept["steps"]]
    total = sum(sizes.values())
    say(f"plan: {amount(min(settings.sample_bytes, total))} of {amount(total)} as a sample")
    with tempfile.TemporaryDirectory(prefix="corpus-plan-") as folder:
        warm, real = (
            take_sample(description, raw, sizes, settings.sample_bytes // part, seed, Path(at))
            for part, seed, at in (
                (WARM_UP, settings.seed + 1, f"{folder}/warm"),
                (1, settings.seed, f"{folder}/real"),
            )
        )
        estimates = list(estimate(jobs, (warm, real), flags))
    content = {
        "fingerprint": fingerprint,
        "input_bytes": sizes,
        "sample_bytes": settings.sample_bytes,
        "seed": settings.seed,
        "steps": [asdict(each) for each in estimates],
    }
    with atomic_writer(file) as stream:
        stream.write(json.dumps(content, indent=1).encode() + b"\n")
    return estimates


def find_faults(left: Sequence[Job], estimates: Sequence[Estimate], output: Path) -> list[str]:
    """Reasons why the run cannot fit, by step.  left: the jobs that are not done."""
    by_name = {each.name: each for each in estimates}
    disk, memory = free_disk(output), free_memory()
    faults, used = [], 0
    for job in left:
        each = by_name[job.name]
        need = used + each.disk + each.temporary
        used += each.disk
        if need > disk:
            faults.append(
                f"{job.name}: {amount(need)} of disk are needed in {output} with what the steps "
                f"before it write, and {amount(disk)} are free"
            )
        if each.memory > memory and job.settings.scheduler == "local":
            one = each.memory / job.settings.workers
            faults.append(
                f"{job.name}: up to {amount(each.memory)} of memory are needed, and "
                f"{amount(memory)} are free; --workers {max(1, int(memory / one))} or a smaller "
                "--memory would work"
            )
    return faults


def free_disk(folder: Path) -> int:
    """Free bytes on the disk where the folder is, or will be."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free


def free_memory(root: Path = Path("/")) -> int:
    """Bytes left to this process: the least of this machine and of every group that it is in.

    A group's file cache that is not in use counts as free.  root: where /proc and /sys are.
    """
    meminfo = (root / "proc" / "meminfo").read_text()
    lines = dict(line.split(":") for line in meminfo.splitlines())
    left = [int(lines["MemAvailable"].split()[0]) * 1024]
    has_groups = (root / "proc" / "self" / "cgroup").exists()
    for group, (most, used, cache) in memory_groups(root) if has_groups else ():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if (limit := (group / most).read_text().strip()) != "max":
                stat = (group / "memory.stat").read_text()
                facts = dict(line.split() for line in stat.splitlines())
                left.append(int(limit) - int((group / used).read_text()) + int(facts.get(cache, 0)))
    return max(0, min(left))


def memory_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """(folder, names of limit, use and cache in it) of each group that may limit this process: its
    own and those above, of cgroup v2 and of v1's memory controller."""
    own = [
        line.split(":", 2) for line in (root / "proc" / "self" / "cgroup").read_text().splitlines()
    ]
    for line in (root / "proc" / "self" / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        top, place = before.split()[3:5]  # the group that is mounted, and where
        kind, _, options = after.split(" ", 2)
        if kind not in CGROUP or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        controller = "memory" if kind == "cgroup" else ""  # v2 has one line, without names
        for path in [path for _, names, path in own if controller in names.split(",")]:
            # In a container the mounted group may be the one that the process is in.
            inside = PurePosixPath(path)
            below = inside.relative_to(top) if inside.is_relative_to(top) else PurePosixPath()
            for group in (below, *below.parents):
                yield root / place.lstrip("/") / group, CGROUP[kind]


COLUMNS = ("step", "documents in", "out", "text out", "disk", "temporary", "memory at most",
           "core time", "time")  # fmt: skip


def print_plan(estimates: Sequence[Estimate]) -> None:
    rows = [COLUMNS, *map(row, estimates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        name, *numbers = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join([name.strip().ljust(widths[0]), *numbers]))
    for each in estimates:
        if each.note:
            print(f"{each.name}: {each.note}")
        if each.removal is not None:
            print(
                f"{each.name}: removes {each.removal:.1%} of its documents at most, by the sample"
            )
    print(
        f"in all: {amount(sum(e.disk for e in estimates))} of disk when all is done, "
        f"{duration(sum(e.core_seconds for e in estimates))} of one core, "
        f"{duration(sum(e.seconds for e in estimates))} by the clock"
    )


def row(each: Estimate) -> tuple[str, ...]:
    if each.note.startswith("not estimated"):
        return (each.name, *["?"] * (len(COLUMNS) - 1))
    return (
        each.name,
        f"{each.documents_in:,}",
        f"{each.documents_out:,}",
        *map(amount, (each.text_out, each.disk, each.temporary, each.memory)),
        *map(duration, (each.core_seconds, each.seconds)),
    )


def amount(size: float) -> str:
    """Bytes in the largest unit in which the number is at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


if __name__ == "__main__":
    program("tools.corpus.plan")
