"""Runs the steps of a corpus one after another, as a TOML file describes them.

    python tools/corpus.py run corpus.toml
    python tools/corpus.py run --input raw/ --output corpus/

In the file each step has a table, whose keys are the step's flags; a step without one is skipped.
They run in the order extract, clean, decontaminate, dedup, split, tokenise, report.  Keys before
the first table: output (required), input (files that need no extraction), workers, scheduler,
memory, compress, unit.  The second command cleans, de-duplicates and splits.

Each step fills OUTPUT/STEP; steps whose manifest shows them done are skipped, and an interrupted
step continues.  If the file or the input has changed since, the first step affected refuses; with
--overwrite it and all later steps run again, and earlier ones do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.errors import UsageError
from tools.corpus import plan
from tools.corpus.files import Compression
from tools.corpus.pipeline import Job, RunSettings, as_toml, preflight
from tools.corpus.settings import program, say


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    until: str | None = None
    """Last step to run, such as dedup."""

    scheduler: str | None = None
    """local, slurm or an address; overrides the file."""

    memory: str | None = None
    """About how much memory a task may use at a time; overrides the file."""

    compress: Compression | None = None
    """Compression of shards; overrides the file."""

    overwrite: bool = False
    """Run again the steps whose settings or input have changed, and all later steps."""

    plan: bool = True
    """Estimate the needs of the run from a sample first, and refuse if it cannot fit."""


def run(settings: Settings) -> None:
    description = settings.description()
    flags: dict[str, Any] = {}
    for name in ("workers", "scheduler", "memory", "compress"):
        if (value := getattr(settings, name)) is not None:
            flags[name] = value
    if settings.overwrite:
        flags["overwrite"] = True
    jobs = jobs_until(description.jobs(flags), settings.until)
    preflight(description, jobs)
    if settings.plan:
        removal = plan.check(description, jobs, flags, allow_overcommit=settings.allow_overcommit)
        if removal is not None and "expected_removal" not in description.tables.get("dedup", {}):
            flags["expected_removal"] = removal
            jobs = jobs_until(description.jobs(flags), settings.until)
    for number, job in enumerate(jobs, start=1):
        say(f"[{number}/{len(jobs)}] {job.name}")
        try:
            job.run()
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            advice = ""
            if isinstance(error, UsageError) and "--overwrite" in error.works:
                error.works = ()
                given = f"`python tools/corpus.py run {settings.config} --overwrite`"
                if settings.config is None:
                    given = "the same command with --overwrite"
                advice = f"\n{given} does this step and those after it again"
            reason = str(error) if settings.config is None else as_toml(error, job.settings)
            raise kind(f"[{job.name}] {reason}{advice}") from error


def jobs_until(jobs: Sequence[Job], last: str | None) -> list[Job]:
    """All jobs up to those of the step `last`.  Raises ValueError, naming --until, without any."""
    steps = [job.step for job in jobs]
    if last is None:
        return list(jobs)
    if last not in steps:
        raise UsageError(
            "--until",
            last,
            f"a step of this run: {', '.join(dict.fromkeys(steps))}",
            works=("--until", steps[-1]),
        )
    return list(jobs[: len(steps) - steps[::-1].index(last)])


if __name__ == "__main__":
    program("tools.corpus.run")
