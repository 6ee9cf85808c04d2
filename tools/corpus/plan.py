"""Estimates the documents, disk, memory and time of a run from a sample.

    python tools/corpus.py plan scripts/corpus/corpus.toml
    python tools/corpus.py plan --input raw.jsonl --output corpus --sample 32MB

A sample of the input, drawn by a seed from all over it, goes through the steps themselves, in a
temporary folder and with the run's settings.  Their counts and costs are scaled up by bytes: for
the first steps, of the input on disk; then, of the previous steps' output.  If disk or memory do
not suffice, the command ends with status 2 and names the step.

A sample of a share p of the documents has only p * p of the near-duplicates, which are pairs.  If
it is not too small, it gives a likely upper bound of what dedup removes, for --expected-removal.
The output of dedup is estimated as if it removed no more than it does in the sample.
"""

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron.data.json_lines import LONGEST_LINE, MANIFEST, WORK, find_shards, is_text, read_lines
from megatron.errors import UsageError
from tools.corpus import readers
from tools.corpus.engine import write_json
from tools.corpus.pipeline import Description, Job, RunSettings, as_toml, preflight
from tools.corpus.settings import StepSettings, Unfinished, parse_size, program, say
from tools.report import numbers

SAMPLE, SEED = "8MB", 1234
UNPLANNED = ("report",)  # takes next to nothing
# Flags that a step refuses because of the text, of which a sample may hold more than the whole.
OF_CONTENT = ("--input", "--max-cluster", "--max-source-loss", "--expected-removal", "--ratio")
HOLDING = ("dedup", "split")  # steps whose tasks hold up to --memory
UNIT_BYTES = 32_000_000  # for steps that have no --unit
PLACES = 16  # parts of the input from which a sample is drawn
WARM_UP = "0/8"  # share of a step's first stage that runs first, so that loading is not counted
CGROUP = {  # by type of mount: files of a group's limit and use, name of the cache in memory.stat
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    sample: str = SAMPLE
    """Size of the sample of the input."""

    seed: int = SEED
    """Seed of the sample; another seed draws another sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_size("--sample", self.sample)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one job at full size.  Sizes are in bytes, times in seconds."""

    name: str
    documents_in: int = 0
    documents_out: int = 0
    text_out: int = 0
    disk: int = 0
    temporary: int = 0
    memory: int = 0
    """Memory of all workers together."""
    core_seconds: float = 0
    seconds: float = 0
    """Wall-clock time, with all workers busy."""
    removal: float | None = None
    """dedup only: likely upper bound of the share of documents removed; None if unknown."""
    note: str = ""
    """Why there is no estimate; empty if there is one."""


def run(settings: Settings) -> None:
    description = settings.description()
    flags = {} if settings.workers is None else {"workers": settings.workers}
    jobs = description.jobs(flags)
    preflight(description, jobs)
    check(
        description,
        jobs,
        flags,
        sample=settings.sample,
        seed=settings.seed,
        allow_overcommit=settings.allow_overcommit,
    )


def check(
    description: Description,
    jobs: Sequence[Job],
    flags: Mapping[str, Any],
    *,
    sample: str = SAMPLE,
    seed: int = SEED,
    allow_overcommit: bool = False,
) -> float | None:
    """Estimate, print, write OUTPUT/plan.json.  Raises ValueError if the jobs to do cannot fit.

    Returns the likely upper bound of the share that dedup removes, None if unknown.
    """
    jobs = [job for job in jobs if job.step not in UNPLANNED]
    left = [job for job in jobs if not (job.output / MANIFEST).exists()]
    if not left:
        return None
    estimates = estimate(description, jobs, flags, parse_size("--sample", sample), seed)
    print_estimates(estimates)
    faults = find_faults(left, estimates, Path(description.head["output"]))
    if faults and not allow_overcommit:
        raise ValueError("; ".join([*faults, "--allow-overcommit goes on all the same"]))
    for fault in faults:
        say(f"warning: {fault}")
    return next((each.removal for each in estimates if each.removal is not None), None)


def estimate(
    description: Description,
    jobs: Sequence[Job],
    flags: Mapping[str, Any],
    sample_bytes: int,
    seed: int,
) -> list[Estimate]:
    """One estimate per job; those of OUTPUT/plan.json if they were made for the same run.

    Raises ValueError if a step refuses its settings: it would refuse them in the run, too.
    """
    output = Path(description.head["output"])
    file = output / "plan.json"
    sources = {job.name: job.settings for job in jobs if job.step == "extract"}
    if given := description.head.get("input"):
        sources["input"] = StepSettings(input=tuple(map(Path, given)), output=output)
    sizes = {name: sum(file.size for file in input_files(each)) for name, each in sources.items()}
    total = sum(sizes.values())
    if not total:
        raise ValueError(f"{description.origin}: the input is empty")
    facts = [sizes, sample_bytes, seed, [job.settings for job in jobs]]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    if file.exists():
        kept = json.loads(file.read_bytes())
        if kept["fingerprint"] == fingerprint:
            return [Estimate(**each) for each in kept["steps"]]
    drawn = numbers.size(min(sample_bytes, total))
    say(f"plan: {drawn} of {numbers.size(total)} as a sample")
    with tempfile.TemporaryDirectory(prefix="corpus-plan-") as folder:
        trial, factors = draw_sample(description, sources, sizes, sample_bytes, seed, Path(folder))
        estimates = list(try_jobs(jobs, trial, factors, flags))
    content = {
        "fingerprint": fingerprint,
        "input_bytes": sizes,
        "sample_bytes": sample_bytes,
        "seed": seed,
        "steps": [asdict(each) for each in estimates],
    }
    write_json(file, content)
    return estimates


class File(NamedTuple):
    path: Path
    size: int
    whole: bool
    """It is one document; lines are taken from other files."""


def input_files(settings: Any) -> Iterator[File]:
    """The files that a step with these settings reads, without empty ones."""
    if not hasattr(settings, "format"):
        sizes = {path: path.stat().st_size for path in find_shards(settings.input)}
        yield from (File(path, size, is_text(path)) for path, size in sizes.items() if size)
        return
    splits, loose = readers.find_input(settings.input, settings.format, settings.unit_bytes)
    units = {split.unit.file: split.unit.size for split in splits}
    yield from (File(Path(name), size, is_text(name)) for name, size in units.items())
    for each in loose:
        folder = each.root if each.root.is_dir() else each.root.parent
        for name, status in readers.walk_loose(each.root):
            if status.st_size:
                yield File(folder / name, status.st_size, True)


def draw_sample(
    description: Description,
    sources: Mapping[str, Any],
    sizes: Mapping[str, int],
    budget: int,
    seed: int,
    folder: Path,
) -> tuple[Description, dict[Path, float]]:
    """Draw about `budget` bytes into the folder, from each source in proportion to its size.

    Returns the run with the sample as its input, and for each path of that input how many bytes
    of the whole one of its bytes stands for.
    """
    factors: dict[Path, float] = {}
    head = {**description.head, "output": str(folder / "out")}
    tables = dict(description.tables)
    for name, settings in sources.items():
        place = folder / name
        share = max(1, budget * sizes[name] // sum(sizes.values()))
        copies = draw(input_files(settings), sizes[name], share, seed, place)
        taken = sum(path.stat().st_size for path in copies)
        if not taken:
            raise UsageError("--sample", f"{budget}B", f"more: no document of {name} is in it")
        if getattr(settings, "format", "jsonl") != "jsonl":
            copies = [place]
        factors |= dict.fromkeys(copies, sizes[name] / taken)
        given = list(map(str, copies))
        if name == "input":
            head["input"] = given
        else:
            source = name.removeprefix("extract.")
            table = {**tables["extract"][source], "input": given}
            tables["extract"] = {**tables["extract"], source: table}
    return replace(description, head=head, tables=tables), factors


def draw(files: Iterable[File], total: int, budget: int, seed: int, folder: Path) -> list[Path]:
    """Copy about `budget` of the `total` bytes: a stretch at random of each of PLACES equal parts.

    The beginning of a compressed file is taken, because it cannot be read from the middle; its
    reader rejects the broken end.  Returns the copies, each in a folder of its own.
    """
    coin = random.Random(seed)
    stretches: list[tuple[int, int]] = []
    for k in range(PLACES):
        low, high = total * k // PLACES, total * (k + 1) // PLACES
        length = min(max(1, budget // PLACES), high - low)
        start = coin.randint(low, high - length)
        stretches.append((start, start + length))
    copies: list[Path] = []

    def copy(file: Path, content: bytes) -> None:
        if content:
            target = folder / f"{len(copies):03}" / file.name
            target.parent.mkdir(parents=True)
            target.write_bytes(content)
            copies.append(target)

    starts: dict[Path, int] = {}  # bytes to take of the beginning of a file
    begin = 0
    for file in files:
        stretches = [pair for pair in stretches if pair[1] > begin]
        inside = [
            (max(0, start - begin), min(file.size, stop - begin))
            for start, stop in stretches
            if start < begin + file.size
        ]
        begin += file.size
        for start, stop in inside:
            if file.whole or readers.is_packed(file.path.name):
                more = LONGEST_LINE + 1 if file.whole else stop - start
                starts[file.path] = min(file.size, starts.get(file.path, 0) + more)
            else:
                lines = read_lines(file.path, start, stop)
                copy(file.path, b"".join(each.content + b"\n" for each in lines if not each.fault))
    for path, length in starts.items():
        with path.open("rb") as stream:
            copy(path, stream.read(length))
    return copies


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def try_jobs(
    jobs: Sequence[Job], trial: Description, factors: dict[Path, float], flags: Mapping[str, Any]
) -> Iterator[Estimate]:
    """Run the jobs on the sample.  factors: as draw_sample returned them."""
    factors = dict(factors)
    small = {**flags, "workers": 1, "scheduler": "local", "overwrite": False}
    trials = trial.jobs(small)[: len(jobs)]  # --until may leave out the last
    failed = ""
    for job, tried in zip(jobs, trials, strict=True):
        if failed:
            yield Estimate(name=job.name, note=f"not estimated: after {failed}")
            continue
        say(f"plan: {job.name}")
        # The peak of memory is that of a process, so each job has a new one.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                facts = pool.submit(measure, tried).result()
            except (ValueError, OSError) as error:
                if isinstance(error, UsageError) and error.flag not in OF_CONTENT:
                    reason = as_toml(error, job.settings)
                    raise ValueError(f"{job.where} {reason} (tried on a sample)") from error
                # The content of the sample is at fault, and may be rarer in the whole.
                failed = job.name
                yield Estimate(name=job.name, note=f"not estimated: {error}")
                continue
        sizes = {path: size_of(path) for path in tried.settings.input}
        bytes_in = sum(size * factors[path] for path, size in sizes.items())
        factor = bytes_in / sum(sizes.values())
        for folder in (tried.output, *tried.output.glob("*/")):
            factors[folder] = factor
        yield scale(job, facts, factor, bytes_in)


def measure(job: Job) -> dict[str, Any]:
    """Run the job in this process.  Returns its counts and what it took."""

    def share(which: str) -> None:
        with contextlib.suppress(Unfinished):
            replace(job, settings=replace(job.settings, shard=which)).run()

    with contextlib.redirect_stderr(io.StringIO()):
        share(WARM_UP)
        shutil.rmtree(job.output, ignore_errors=True)
        share("0/1")  # the only job of an array leaves .work to the run without --shard
        temporary = size_of(job.output / WORK)
        job.run()
    manifest = json.loads((job.output / MANIFEST).read_bytes())
    stages = json.loads((job.output / "run.json").read_bytes())["stages"]
    return {
        "documents_in": manifest["input"]["documents"],
        "documents_out": manifest["output"]["documents"],
        "text_out": manifest["output"]["bytes"],
        "disk": size_of(job.output),
        "temporary": temporary,
        "cpu_seconds": sum(stage["cpu_seconds"] for stage in stages),
        "peak": max(stage["peak_bytes"] for stage in stages),
    }


def scale(job: Job, facts: Mapping[str, Any], factor: float, bytes_in: float) -> Estimate:
    """Scale `facts`.  bytes_in: size of the files that the job reads, at full size."""
    settings = job.settings
    unit = getattr(settings, "unit_bytes", UNIT_BYTES)
    busy = min(settings.workers, max(1, math.ceil(bytes_in / unit)))
    text_out, core_seconds = facts["text_out"] * factor, facts["cpu_seconds"] * factor
    held = facts["peak"]
    if job.step in HOLDING:  # at most a few times the whole text
        held += round(min(settings.memory_bytes, 3 * text_out))
    return Estimate(
        name=job.name,
        documents_in=round(facts["documents_in"] * factor),
        documents_out=round(facts["documents_out"] * factor),
        text_out=round(text_out),
        disk=round(facts["disk"] * factor),
        temporary=round(facts["temporary"] * factor),
        memory=busy * held,
        core_seconds=core_seconds,
        seconds=core_seconds / busy,
        removal=removal(facts, factor) if job.step == "dedup" else None,
    )


def removal(facts: Mapping[str, Any], factor: float) -> float | None:
    """Likely upper bound of the share that dedup removes, from what it removed of a sample.

    A share p of the documents has the share p * p of the near-duplicates, which are pairs, so each
    one found represents factor^2.  Two standard deviations and a constant, in case none is found,
    are added.  None if the bound is over a half, which says nothing.
    """
    found = facts["documents_in"] - facts["documents_out"]
    most = (found + 2 * math.sqrt(found) + 3) * factor / max(1, facts["documents_in"])
    return most if most <= 0.5 else None


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
                f"{job.name}: needs {numbers.size(need)} of disk in {output}, with the output of "
                f"the steps before it, and {numbers.size(disk)} are free"
            )
        if each.memory > memory and job.settings.scheduler == "local":
            workers = max(1, int(job.settings.workers * memory / each.memory))
            faults.append(
                f"{job.name}: needs up to {numbers.size(each.memory)} of memory, and "
                f"{numbers.size(memory)} are free; --workers {workers} or a smaller --memory works"
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


def print_estimates(estimates: Sequence[Estimate]) -> None:
    rows = [COLUMNS]
    for each in estimates:
        if each.note:
            rows.append((each.name, *["?"] * (len(COLUMNS) - 1)))
            continue
        documents = f"{each.documents_in:,}", f"{each.documents_out:,}"
        sizes = map(numbers.size, (each.text_out, each.disk, each.temporary, each.memory))
        times = map(numbers.duration, (each.core_seconds, each.seconds))
        rows.append((each.name, *documents, *sizes, *times))
    print(numbers.aligned(rows, right=True))
    for each in estimates:
        if each.note:
            print(f"{each.name}: {each.note}")
        if each.removal is not None:
            share = numbers.percent(each.removal)
            print(f"{each.name}: removes at most {share} of its documents, by the sample")
    print(
        f"in all: {numbers.size(sum(e.disk for e in estimates))} of disk when all is done, "
        f"{numbers.duration(sum(e.core_seconds for e in estimates))} of one core, "
        f"{numbers.duration(sum(e.seconds for e in estimates))} by the clock"
    )


if __name__ == "__main__":
    program("tools.corpus.plan")
