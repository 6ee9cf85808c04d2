"""A page that shows what the steps did to a corpus: `python tools/corpus.py report`.

    python tools/corpus.py report --input corpus --output corpus.html
    python tools/corpus.py report --input clean unique split --output corpus.html --verify

Reads manifest.json and run.json of every step, and no text but what they quote.  Writes one HTML
file without scripts and network access: documents kept and dropped, losses of each source and
where, lengths, languages, duplicates with their texts, leakage, time and memory, settings and
checksums.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.config.checks import at_least
from megatron.data.files import sha256, write_atomically
from megatron.data.json_lines import MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus.scheduler import open_scheduler
from tools.corpus.settings import program, progress, say
from tools.report.corpus import Facts, Folder, Step, page, read_json

ORDER = ("urls", "extract", "clean", "decontaminate", "dedup", "split", "tokenise")
NEEDED = {"step", "settings", "input", "output", "dropped", "pieces"}  # keys of a manifest


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
            works = ("--output", str(self.output / "report.html"))
            raise UsageError("--output", self.output, "a file, not a folder", works=works)


def run(settings: Settings) -> None:
    steps = read_steps(settings.input)
    faults = verify(steps, settings.workers) if settings.verify else None
    write_atomically(settings.output, page(steps, faults).html())
    say(f"report: {settings.output}")
    if faults:
        raise ValueError(f"--verify: {len(faults)} shards are not as written, first {faults[0]}")


def verify(steps: Sequence[Step], workers: int) -> list[str]:
    """The shards that differ from their manifest, and why."""
    shards = []
    for folder in (folder for step in steps for folder in step.folders):
        for shard in folder.manifest.get("shards", []):
            shards.append((folder.path / shard["name"], shard["sha256"]))
    calls = [partial(find_fault, *shard) for shard in shards]
    faults: dict[int, str] = {}
    with open_scheduler("local", workers, 0) as run_calls, progress("verify", len(calls), 0) as bar:
        for number, fault in run_calls(calls) if calls else ():
            bar.update()
            if fault:
                file, _ = shards[number]
                faults[number] = f"{file.parent.name}/{file.name}: {fault}"
    return [faults[number] for number in sorted(faults)]


def find_fault(file: Path, expected: str) -> str | None:
    """The fault of a shard, None if it has the checksum."""
    if not file.is_file():
        return "gone"
    return None if sha256(file) == expected else "another checksum than its manifest gives"


def read_steps(paths: Sequence[Path]) -> list[Step]:
    """Raises UsageError for --input if a path neither is nor contains a step's output."""
    folders: list[Folder] = []
    for path in paths:
        found = find_folders(path, 2)
        if not found:
            allowed = f"the output of a finished step, with a {MANIFEST}, or a folder of several"
            raise UsageError("--input", path, allowed)
        folders += sorted(found, key=lambda folder: place_of(folder.manifest["step"]))
    if not folders:
        raise UsageError("--input", None, "followed by the output folders of the steps")
    seen: set[Path] = set()
    for folder in folders:
        if folder.path.resolve() in seen:
            raise UsageError("--input", folder.path, "given once")
        seen.add(folder.path.resolve())
    # Neighbours that ran the same step on parts of the corpus are one step, unless one read the
    # output of the other.
    steps: list[Step] = []
    for folder in folders:
        parts = steps[-1].folders if steps else ()
        written = {file["sha256"] for part in parts for file in part.manifest.get("shards", [])}
        read = {file["sha256"] for file in folder.manifest.get("inputs", [])}
        name = folder.manifest["step"]
        if steps and steps[-1].name == name and not read & written:
            steps[-1] = Step(name, (*parts, folder))
        else:
            steps.append(Step(name, (folder,)))
    return steps


def place_of(step: str) -> int:
    return ORDER.index(step) if step in ORDER else len(ORDER)


def find_folders(path: Path, depth: int) -> list[Folder]:
    """The path if it is the output of a step; else the steps in it.

    A run has a folder for each step, with subfolders if it ran the step on parts.
    """
    manifest = read_facts(path / MANIFEST)
    if manifest.keys() >= NEEDED:
        return [Folder(path, manifest, read_facts(path / "run.json"))]
    if not manifest and (path / WORK).exists():
        say(f"warning: {path} is left out, its step has not finished")
        return []
    inside = sorted(each for each in path.glob("*") if each.is_dir()) if depth else []
    return [folder for each in inside for folder in find_folders(each, depth - 1)]


def read_facts(file: Path) -> Facts:
    """Empty if the file is missing."""
    content = read_json(file) if file.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; the step run again writes it")
    return content


if __name__ == "__main__":
    program("tools.corpus.report")
