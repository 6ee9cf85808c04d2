"""The steps of a run tried on a sample, and what that says of the whole.

Everything is scaled by bytes: of the input as it lies on disk for the first steps, then of what the
steps before have left of the sample.
"""

import contextlib
import io
import json
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron.data.json_lines import MANIFEST, WORK
from tools.corpus.pipeline import Description, Job
from tools.corpus.program import Unfinished, say
from tools.corpus.sample import draw, input_files

HOLDING = ("dedup", "split")  # steps of which a task holds up to --memory
UNIT_BYTES = 32_000_000  # of steps that have no --unit
WARM_UP = 8  # the sample that goes first, so that loading is not counted, is this much smaller


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one job, at full size.  Sizes are bytes, times seconds."""

    name: str
    documents_in: int = 0
    documents_out: int = 0
    text_out: int = 0
    disk: int = 0
    temporary: int = 0
    memory: int = 0
    """Of all workers together."""
    core_seconds: float = 0
    seconds: float = 0
    """By the clock, all workers at work."""
    removal: float | None = None
    """Of dedup: the share of the documents that it will hardly exceed; None if that is not told."""
    note: str = ""


class Amount(NamedTuple):
    """Of a file or folder of the sample."""

    size: int
    factor: float
    """How much of the whole each of its bytes stands for."""


class Sample(NamedTuple):
    description: Description
    """As the run's, but of the sample."""
    inputs: dict[Path, Amount]


def raw_inputs(description: Description, jobs: Sequence[Job]) -> dict[str, Any]:
    """Settings, or what has their `input`, by the name of what reads from outside."""
    raw = {job.name: job.settings for job in jobs if job.step == "extract"}
    if given := description.head.get("input"):
        raw["input"] = SimpleNamespace(input=tuple(map(Path, given)))
    return raw


def total_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: sum(file.size for file in input_files(settings)) for name, settings in raw.items()
    }


def take_sample(
    description: Description, raw: Mapping[str, Any], sizes: Mapping[str, int], budget: int,
    seed: int, folder: Path,
) -> Sample:  # fmt: skip
    """Draw about `budget` bytes, from each source its share, into the folder."""
    inputs: dict[Path, Amount] = {}
    head, tables = dict(description.head), dict(description.tables)
    for name, settings in raw.items():
        place = folder / name
        share = max(1, budget * sizes[name] // sum(sizes.values()))
        copies = draw(input_files(settings), sizes[name], share, seed, place)
        taken = sum(path.stat().st_size for path in copies)
        if not taken:
            raise ValueError(f"--sample {share} bytes of {name} hold no document; more would work")
        if getattr(settings, "format", "jsonl") != "jsonl":
            copies = [place]
        inputs |= {path: Amount(size_of(path), sizes[name] / taken) for path in copies}
        named = [str(path) for path in copies]
        if name == "input":
            head["input"] = named
        else:
            source = name.removeprefix("extract.")
            given = {**tables["extract"], source: {**tables["extract"][source], "input": named}}
            tables["extract"] = given
    head["output"] = str(folder / "out")
    return Sample(replace(description, head=head, tables=tables), inputs)


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def estimate(
    jobs: Sequence[Job], samples: tuple[Sample, Sample], flags: Mapping[str, Any]
) -> Iterator[Estimate]:
    """One of each job; samples: the small one that goes first, and the one that counts.

    ValueError where a step refuses its settings: it would refuse them in the run, too.
    """
    small = {**flags, "workers": 1, "scheduler": "local", "overwrite": False}
    tried = [sample.description.jobs(small) for sample in samples]
    amounts = dict(samples[1].inputs)
    failed = ""
    for job, warm, real in zip(jobs, *(each[: len(jobs)] for each in tried), strict=True):
        say(f"plan: {job.name}")
        facts = {"error": failed} if failed else in_new_process(warm, real)
        if "error" in facts:
            if is_of_settings(facts["error"]):
                raise ValueError(f"{job.where} {facts['error']} (tried on a sample)")
            failed = failed or f"after {job.name}"
            yield Estimate(name=job.name, note=f"not estimated: {facts['error']}")
            continue
        inputs = [amounts[path] for path in real.settings.input]
        factor = sum(a.size * a.factor for a in inputs) / sum(a.size for a in inputs)
        bytes_in = factor * sum(a.size for a in inputs)
        for folder in (real.output, *real.output.glob("*/")):
            amounts[folder] = Amount(size_of(folder), factor)
        yield scale(job, facts, factor, bytes_in)


def is_of_settings(error: str) -> bool:
    """Whether a flag is at fault, and not what happens to be in the sample."""
    return error.startswith("--") and not error.startswith("--input ")


def scale(job: Job, facts: Mapping[str, Any], factor: float, bytes_in: float) -> Estimate:
    """bytes_in: of the files that the job reads, at full size."""
    settings = job.settings
    unit = getattr(settings, "unit_bytes", UNIT_BYTES)
    busy = min(settings.workers, max(1, math.ceil(bytes_in / unit)))
    text_out, core_seconds = facts["text_out"] * factor, facts["cpu_seconds"] * factor
    held = facts["peak"]
    if job.step in HOLDING:  # never more than a few times all of the text
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
    """The share of the documents that dedup will hardly exceed, from what it removed of a sample.

    Of near-duplicates, which are pairs, a share p of the documents holds the share p * p; so each
    one found stands for factor^2, with two standard deviations and some for none being found.
    None where that is over a half, and says nothing.
    """
    found = facts["documents_in"] - facts["documents_out"]
    most = (found + 2 * math.sqrt(found) + 3) * factor / max(1, facts["documents_in"])
    return most if most <= 0.5 else None


def in_new_process(warm: Job, real: Job) -> dict[str, Any]:
    """measure() where no other step has used memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, warm, real).result()


def measure(warm: Job, real: Job) -> dict[str, Any]:
    """Do both jobs in this process; what the second took, or {"error": why it cannot be told}."""
    with contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(ValueError, OSError):  # may be too small for the step
            warm.run()
        try:
            temporary = run_and_look(real)
        except (ValueError, OSError) as error:
            return {"error": str(error)}
    manifest = json.loads((real.output / MANIFEST).read_bytes())
    stages = json.loads((real.output / "run.json").read_bytes())["stages"]
    return {
        "documents_in": manifest["input"]["documents"],
        "documents_out": manifest["output"]["documents"],
        "text_out": manifest["output"]["bytes"],
        "disk": size_of(real.output),
        "temporary": temporary,
        "cpu_seconds": sum(stage["cpu_seconds"] for stage in stages),
        "peak": max(stage["peak_bytes"] for stage in stages),
    }


def run_and_look(job: Job) -> int:
    """Do the job; the bytes that it held in .work at its end.

    As the only one of an array of jobs it leaves .work to the run without --shard.
    """
    with contextlib.suppress(Unfinished):
        replace(job, settings=replace(job.settings, shard="0/1")).run()
    temporary = size_of(job.output / WORK)
    job.run()
    return temporary
