"""The steps of a corpus one after another, as a TOML file describes them.

Each step fills OUTPUT/STEP; those whose manifest shows them done are skipped, and one that was cut
short goes on.  Where the file or the input has changed since, the first step that this concerns
refuses; with --overwrite it and all after it are done again, and those before it are not.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from tools.corpus import plan
from tools.corpus.pipeline import STEPS, Job, read_description
from tools.corpus.program import program, say
from tools.corpus.shards import Compression

OTHERS = ("urls", "plan")


@dataclass(frozen=True, kw_only=True)
class Settings:
    config: Annotated[Path, tyro.conf.Positional]
    """TOML file; scripts/corpus/ has two."""

    until: str | None = None
    """Last step to do, such as dedup."""

    workers: int | None = None
    """Processes of every step, whatever the file says."""

    scheduler: str | None = None
    """local, slurm or an address, whatever the file says."""

    memory: str | None = None
    """About how much a task may hold at a time, whatever the file says."""

    compress: Compression | None = None
    """How shards are compressed, whatever the file says."""

    overwrite: bool = False
    """Do again the steps whose settings or input have changed, and those after them."""

    plan: bool = True
    """Estimate first, from a sample, what the run takes, and refuse where it cannot fit."""

    allow_overcommit: bool = False
    """Go on where the estimate says that it cannot fit."""

    @property
    def flags(self) -> dict[str, str | int | bool]:
        """Of the steps, as far as given."""
        names = ("workers", "scheduler", "memory", "compress")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "overwrite": True} if self.overwrite else given


def run(settings: Settings) -> None:
    description = read_description(settings.config)
    jobs = jobs_until(description.jobs(settings.flags), settings.until)
    if settings.plan:
        wanted = plan.Settings(config=settings.config, allow_overcommit=settings.allow_overcommit)
        removal = plan.check(description, jobs, settings.flags, wanted)
        if removal is not None and "expected_removal" not in description.tables.get("dedup", {}):
            flags = {**settings.flags, "expected_removal": removal}
            jobs = jobs_until(description.jobs(flags), settings.until)
    for number, job in enumerate(jobs, start=1):
        say(f"[{number}/{len(jobs)}] {job.name}")
        try:
            job.run()
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"[{job.name}] {error}{advice(settings, error)}") from error


def jobs_until(jobs: Sequence[Job], last: str | None) -> list[Job]:
    """All jobs up to those of the step `last`; ValueError, naming --until, if there are none."""
    steps = [job.step for job in jobs]
    if last is None:
        return list(jobs)
    if last not in steps:
        raise ValueError(
            f"--until {last}: no step of the file; {', '.join(dict.fromkeys(steps))} would work"
        )
    return list(jobs[: len(steps) - steps[::-1].index(last)])


def advice(settings: Settings, error: Exception) -> str:
    """How to go on where a step would not replace what is there."""
    if "--overwrite" not in str(error):
        return ""
    return (
        f"\n`python -m tools.corpus run {settings.config} --overwrite` does this step and those "
        "after it again"
    )


def list_steps() -> None:
    """Print what there is, a line each."""
    print("A corpus from raw dumps to training shards.  In this order:\n")
    for name, module in STEPS.items():
        print(f"  {name:14} {first_line(module)}\n  {'':14} {command(module)} --help")
    print("\nAnd beside them:\n")
    for name in OTHERS:
        module = f"tools.corpus.{name}"
        print(f"  {name:14} {first_line(module)}\n  {'':14} {command(module)} --help")
    print("\nAll in one run, as a file describes it:\n\n  python -m tools.corpus run corpus.toml")


def first_line(module: str) -> str:
    return (import_module(module).__doc__ or "").partition("\n")[0]


def command(module: str) -> str:
    if module.startswith("tools.corpus."):
        return f"python -m {module}"
    return f"python {module.replace('.', '/')}.py"


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["run"]:
        program("tools.corpus.__main__", argv[1:])
    elif not argv:
        list_steps()
    else:
        sys.exit(f"error: {argv[0]} is unknown; python -m tools.corpus run corpus.toml would work")


if __name__ == "__main__":
    main(sys.argv[1:])
