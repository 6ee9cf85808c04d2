"""The page that shows what the steps did to a corpus: `python -m tools.corpus.report`.

Reads manifest.json and run.json of every step, and no text but what they quote.  Writes one HTML
file without scripts and network access: the funnel, losses of each source and where, lengths,
languages, duplicates with their texts, leakage, time and memory, settings and checksums.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checks import at_least
from megatron.data.files import atomic_writer, sha256
from megatron.errors import UsageError
from tools.corpus.report.page import page
from tools.corpus.report.steps import Steps, read_steps
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import progress, say


@dataclass(frozen=True, kw_only=True)
class Settings:
    input: tuple[Path, ...]
    """Output folders of the steps, in the order in which they ran; or one folder that holds them
    all, in which case they are put into the order of the pipeline."""

    output: Path
    """HTML file to write."""

    verify: bool = False
    """Read every shard of every step again and compare it with the checksum in its manifest; a
    shard that differs or is missing is named on the page and ends the command with status 2."""

    workers: int = len(os.sched_getaffinity(0))
    """Processes that --verify reads with."""

    def __post_init__(self) -> None:
        at_least(self, workers=1)
        if self.output.is_dir():
            raise UsageError(
                "--output",
                self.output,
                "a file, not a folder",
                works=("--output", str(self.output / "report.html")),
            )


def run(settings: Settings) -> None:
    steps = read_steps(settings.input)
    faults = list(verify(steps, settings.workers)) if settings.verify else None
    # Invalid Unicode (half of a surrogate pair in a quoted text) becomes "?".
    content = page(steps, faults).encode("utf-8", "replace")
    with atomic_writer(settings.output) as file:
        file.write(content)
    say(f"report: {settings.output}")
    if faults:
        raise ValueError(f"--verify: {len(faults)} shards are not as written, first {faults[0]}")


def verify(steps: Steps, workers: int) -> Iterator[str]:
    """The shards that differ from their manifest, and why."""
    shards = [(folder, shard) for folder in steps.folders for shard in folder.shards]
    calls = [Call(find_fault, (folder.path / s["name"], s["sha256"])) for folder, s in shards]
    faults: dict[int, str] = {}
    with open_scheduler("local", workers, 0) as scheduler, progress("verify", len(calls), 0) as bar:
        for number, fault in scheduler.run(calls) if calls else ():
            bar.update()
            if fault:
                faults[number] = fault
    for number in sorted(faults):
        folder, shard = shards[number]
        yield f"{folder.path.name}/{shard['name']}: {faults[number]}"


def find_fault(file: Path, expected: str) -> str | None:
    """The fault of a shard, None if it has the checksum."""
    if not file.is_file():
        return "gone"
    return None if sha256(file) == expected else "another checksum than its manifest gives"
