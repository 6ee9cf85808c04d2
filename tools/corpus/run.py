"""Runs the steps of a corpus one after another, as a TOML file describes them.

    python -m tools.corpus run corpus.toml
    python -m tools.corpus run --input raw/ --output corpus/

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
from pathlib import Path
from typing import Annotated

import tyro

from megatron.errors import UsageError
from tools.corpus import plan
from tools.corpus.early import check_early
from tools.corpus.files import Compression
from tools.corpus.pipeline import Job, as_keys, check_given, describe_given
from tools.corpus.settings import program, say


@dataclass(frozen=True, kw_only=True)
class Settings:
    config: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file; scripts/corpus/ has two.  Without it, give --input and --output."""

    input: tuple[Path, ...] = ()
    """Files of JSON lines or text, or folders of them, to clean, de-duplicate and split."""

    output: Path | None = None
    """Folder to fill."""

    until: str | None = None
    """Last step to run, such as dedup."""

    workers: int | None = None
    """Processes of every step; overrides the file."""

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

    allow_overcommit: bool = False
    """Continue even if the estimate says that it cannot fit."""

    def __post_init__(self) -> None:
        check_given(self.config, self.input, self.output)

    @property
    def flags(self) -> dict[str, str | int | bool]:
        """Flags of the steps, as far as given."""
        names = ("workers", "scheduler", "memory", "compress")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "overwrite": True} if self.overwrite else given


def run(settings: Settings) -> None:
    description = describe_given(settings.config, settings.input, settings.output)
    jobs = jobs_until(description.jobs(settings.flags), settings.until)
    check_early(description, jobs)
    if settings.plan:
        removal = plan.check(description, jobs, settings.flags, plan_settings(settings))
        if removal is not None and "expected_removal" not in description.tables.get("dedup", {}):
            flags = {**settings.flags, "expected_removal": removal}
            jobs = jobs_until(description.jobs(flags), settings.until)
    for number, job in enumerate(jobs, start=1):
        say(f"[{number}/{len(jobs)}] {job.name}")
        try:
            job.run()
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            said = as_keys(error, job.settings) if settings.config else error
            raise kind(f"[{job.name}] {said}{advice(settings, error)}") from error


def plan_settings(settings: Settings) -> plan.Settings:
    return plan.Settings(
        config=settings.config,
        input=settings.input,
        output=settings.output,
        allow_overcommit=settings.allow_overcommit,
    )


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


def advice(settings: Settings, error: Exception) -> str:
    """How to continue if a step refuses to replace existing output."""
    if "--overwrite" not in str(error):
        return ""
    given = f"`python -m tools.corpus run {settings.config} --overwrite`"
    if settings.config is None:
        given = "the same command with --overwrite"
    return f"\n{given} does this step and those after it again"


if __name__ == "__main__":
    program("tools.corpus.run")
