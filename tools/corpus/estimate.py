"""Runs the steps on a sample, and scales the results to the whole input.

Everything is scaled by bytes: for the first steps, of the input on disk; then, of the previous
steps' output from the sample.
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
from tools.corpus.sample import draw, input_files
from tools.corpus.settings import Unfinished, say

HOLDING = ("dedup", "split")  # steps whose tasks hold up to --memory
UNIT_BYTES = 32_000_000  # for steps that have no --unit
WARM_UP = 8  # times smaller: the sample that runs first, so that loading is not counted


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


class Amount(NamedTuple):
    """Size of a file or folder of the sample."""

    size: int
    factor: float
    """Bytes of the whole that each of its bytes represents."""


class Sample(NamedTuple):
    description: Description
    """The run's description, with the sample as its input."""
    inputs: dict[Path, Amount]


def raw_inputs(description: Description, jobs: Sequence[Job]) -> dict[str, Any]:
    """Settings (or an object with `input`) of everything that reads raw input, by name."""
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
    """Draw about `budget` bytes into the folder, from each source in proportion to its size."""
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
    """One estimate per job.  samples: the small one that runs first, and the one that counts.

    Raises ValueError if a step refuses its settings: it would refuse them in the run, too.
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
    """Whether a flag is at fault, not the content of the sample."""
    return error.startswith("--") and not error.startswith("--input ")


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


def in_new_process(warm: Job, real: Job) -> dict[str, Any]:
    """measure() in a process where no other step has used memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, warm, real).result()


def measure(warm: Job, real: Job) -> dict[str, Any]:
    """Run both jobs in this process.  Returns what the second took, or {"error": the reason}."""
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
    """Run the job.  Returns the bytes in .work at its end.

    As the only job of an array (--shard) it leaves .work to the run without --shard.
    """
    with contextlib.suppress(Unfinished):
        replace(job, settings=replace(job.settings, shard="0/1")).run()
    temporary = size_of(job.output / WORK)
    job.run()
    return temporary
