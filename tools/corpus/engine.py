"""The engine of all steps: an output folder that is filled once, whole, and can be resumed.

A step is a series of stages; a stage is a list of tasks that share only files.  Each task leaves a
marker in OUTPUT/.work when its output is in place; a task whose marker shows the same function,
arguments and input is not run again.  The manifest is written last and shows that all files are
there; then .work is removed.  manifest.json has facts that are the same in every run, run.json the
others.

OUTPUT/.work/begun.json, and later run.json, names the files that the step writes. Only these are
ever removed, and those of the names in NOT_SHARDS and unfinished ones (*.part).
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from megatron.config.checks import fillable
from megatron.data.files import atomic_writer, sha256
from megatron.data.json_lines import MANIFEST, NOT_SHARDS, WORK
from megatron.errors import UsageError
from tools.corpus.files import (
    BAD_LINE,
    DAMAGED_FILE,
    DocumentCounts,
    ShardWriter,
    Unit,
    concatenate,
    documents,
    read_manifest,
    read_object,
    recorded_checksums,
    scratch_writer,
    write_shard,
)
from tools.corpus.scheduler import open_scheduler
from tools.corpus.settings import ShardSettings, StepSettings, Unfinished, progress, say

BEGUN = "begun.json"  # in .work: which step it is, with which settings
RUN, REJECTED = "run.json", "rejected.jsonl"
SHARDS = "part-[0-9]*"
PARTIAL = f"*.{'[0-9a-f]' * 32}.part"  # unfinished files, see `atomic_writer`
PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "tokenizers", "gigatoken", "orjson")
REJECTED_SHOWN = 3


class Task(NamedTuple):
    key: str
    """Its name among the tasks of its stage, usable as a file name."""
    arguments: tuple[Any, ...]
    """Values that differ in their repr; files are described by a Unit."""
    weight: int = 1
    """Share of the stage's work, in bytes if possible, for the progress bar."""


class StepRun:
    """A running step and its output folder: `with StepRun(name, settings) as run`.

    run.done is true if a manifest shows that there is nothing left to do.
    """

    def __init__(
        self,
        name: str,
        settings: StepSettings,
        units: Sequence[Unit] | None = None,
        *,
        by_unit: bool = True,
        files: Sequence[str] = (SHARDS,),
    ) -> None:
        """units: the step's input, if it is not settings.units().

        by_unit: whether an unfinished run continues after part of the input has changed; False for
        a step that removes files of earlier stages.  files: patterns of the files that the step
        writes, beside those in NOT_SHARDS.

        Raises ValueError, naming the flag, for input that is missing or in the output folder, and
        for an output folder that another run is filling or that other settings have filled.
        """
        self.name = name
        self.settings = settings
        self.units = list(units) if units is not None else settings.units()
        check_paths(settings.input, self.units, settings.output)
        self.parameters = settings.parameters()
        self.output = settings.output
        self.work = settings.output / WORK
        self._by_unit = by_unit
        self._files = list(files)
        # With resolved paths, so that every path to a file gives the same unit.
        self._input = fingerprint_of(
            [dataclasses.replace(unit, file=str(Path(unit.file).resolve())) for unit in self.units]
        )
        self._fingerprint = fingerprint_of(name, self.parameters, self._input)
        self._stages_so_far = fingerprint_of(name, self.parameters)
        self._stage_facts: list[dict[str, Any]] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:  # undone if something here fails
            if not self.output.exists():
                self.output.mkdir(parents=True, exist_ok=True)  # another share may be as quick
                stack.callback(remove_if_empty, self.output)
            stack.enter_context(locked(self.output, shared=self.settings.shard is not None))
            if difference := self._difference():
                self._check_replaceable(difference)
            self.done = not difference and (self.output / MANIFEST).exists()
            if self.done:
                shutil.rmtree(self.work, ignore_errors=True)
                say(f"{self.name}: {self.output / MANIFEST} is there, nothing is left to do")
            else:
                settings = self.settings
                # First: what is there stays where the scheduler does not answer.
                self._run_calls = stack.enter_context(
                    open_scheduler(settings.scheduler, settings.workers, settings.memory_bytes)
                )
                if difference:
                    self._remove_other()
                self._write_begun(self.name, self.parameters, self._input, self._files)
                if settings.shard is None:
                    remove(self.output.rglob(PARTIAL))  # of dead workers
            self._exit = stack.pop_all()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._exit.close()
        if isinstance(error, OSError):
            raise OSError(
                f"step {self.name}: {error}; what is done is kept, and the same command goes on "
                "from there"
            ) from error

    def _write_begun(self, step: str, settings: Any, input: str | None, files: list[str]) -> None:
        begun = {"step": step, "settings": settings, "input": input, "files": files}
        write_json(self.work / BEGUN, begun)

    def _difference(self) -> str | None:
        """How the folder differs from this step's work, None if the step may continue there."""
        manifest, run = read_manifest(self.output), read_object(self.output / RUN)
        kept = manifest or read_object(self.work / BEGUN)
        if kept is None:
            if run is not None and "files" in run:
                return "has lost its manifest"
            if all(path == self.work for path in self.output.iterdir()):
                return None
            return "holds files that no step wrote"
        if kept["step"] != self.name:
            return f"holds the output of the step {kept['step']}"
        for name, value in self.parameters.items():
            if kept["settings"].get(name) != value:
                return f"was made with {name} {kept['settings'].get(name)} instead of {value}"
        if manifest is None:  # tasks whose input has changed since are run again
            is_other = kept["input"] != self._input and not self._by_unit
            return "was begun with other input" if is_other else None
        if (run or {}).get("fingerprint") != self._fingerprint and not self._has_read(
            manifest.get("inputs", [])
        ):
            return "was made from other input"
        lost = lost_shard(self.output, manifest["shards"])
        return f"has lost {lost.relative_to(self.output)}, or a part of it" if lost else None

    def _has_read(self, inputs: Sequence[dict[str, Any]]) -> bool:
        """Whether a manifest's inputs have the content of this input, in order, wherever it is."""
        files = {Path(unit.file): unit.size for unit in self.units}
        if found_deep(self.settings.input, [file.resolve() for file in files]):
            return False  # paths may be part of the output; single files have no checksums
        named = [(file.name, size) for file, size in files.items()]
        if named != [(each["name"], each["bytes"]) for each in inputs]:
            return False
        return all(
            (known or sha256(file)) == each["sha256"]
            for (file, known), each in zip(recorded_checksums(files).items(), inputs, strict=True)
        )

    def _check_replaceable(self, difference: str) -> None:
        """Raises UsageError where another step's output must stay."""
        begun, manifest = read_object(self.work / BEGUN), read_manifest(self.output)
        if manifest is None and begun is None and not (self.output / RUN).exists():
            raise UsageError("--output", self.output, f"a new or empty folder: this {difference}")
        is_share = self.settings.shard is not None
        if manifest is None and begun and begun["step"] == self.name and not is_share:
            # Its settings may be why it has not finished.
            say(f"{self.name}: {self.output} {difference}, and not finished: starting afresh")
        elif not self.settings.may_replace:
            works = () if is_share else ("--output", str(self.output), "--overwrite")
            allowed = f"another folder: this {difference}"
            raise UsageError("--output", self.output, allowed, works=works)

    def _remove_other(self) -> None:
        """Remove another step's output. A kill in between leaves an unfinished step of the other
        one, which the same command then replaces."""
        manifest, run = read_manifest(self.output), read_object(self.output / RUN) or {}
        kept = manifest or read_object(self.work / BEGUN) or {}
        files = kept.get("files") or run.get("files") or []
        if manifest is not None:
            files = run.get("files") or files_of(manifest)
            self._write_begun(manifest["step"], manifest.get("settings"), None, files)
            (self.output / MANIFEST).unlink()  # first: without it the rest is not taken as whole
        for pattern in (*files, *NOT_SHARDS):
            self._remove(pattern)
        remove(self.output.rglob(PARTIAL))
        # begun.json stays until that of this step replaces it.
        remove(path for path in self.work.glob("*") if path.name != BEGUN)

    def _remove(self, pattern: str) -> None:
        """Remove what a step has written, in the output folder alone, and folders left empty."""
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts or pattern == WORK:
            return
        for path in list(self.output.glob(pattern)):
            if path.is_dir() and fnmatch.fnmatch(path.name, SHARDS):
                continue  # somebody's folder: shards are files
            remove([path])
            if path.parent != self.output:
                remove_if_empty(path.parent)

    def stage(self, name: str, function: Callable[..., Any], tasks: Sequence[Task]) -> list[Any]:
        """Results of `function` for each task's arguments, as JSON: computed now, or before.

        function: of a module, because it is sent by name.  Raises Unfinished if --shard leaves
        tasks to others.
        """
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        markers = [folder / f"{task.key}.done.json" for task in tasks]
        fingerprints = []
        for task in tasks:
            facts = [
                each.__qualname__ if callable(each) else each
                for each in task.arguments
                if not isinstance(each, StepSettings)  # _stages_so_far has them
            ]
            fingerprints.append(
                fingerprint_of(self._stages_so_far, name, function.__qualname__, facts)
            )
        self._stages_so_far = fingerprint_of(self._stages_so_far, fingerprints)

        outcomes = list(map(read_marker, markers, fingerprints))
        k, n = self.settings.share
        mine = [i for i, outcome in enumerate(outcomes) if outcome is None and i % n == k]
        calls = [
            partial(execute, markers[i], fingerprints[i], function, tasks[i].arguments)
            for i in mine
        ]
        start = time.monotonic()
        total = sum(task.weight for task in tasks)
        done = total - sum(tasks[i].weight for i in mine)
        with (
            progress(f"{self.name}: {name}", total, done) as bar,
            contextlib.closing(self._run_calls(calls)) as results,  # workers end with it
        ):
            for number, outcome in results:
                outcomes[mine[number]] = outcome
                bar.update(tasks[mine[number]].weight)

        for i, outcome in enumerate(outcomes):
            if outcome is None:  # another share may have finished it in the meantime
                outcomes[i] = read_marker(markers[i], fingerprints[i])
        left = outcomes.count(None)
        if left:
            raise Unfinished(
                f"{self.name}: --shard {self.settings.shard} has done its share of the stage "
                f"{name}; others have {left} of its tasks left"
            )
        self._stage_facts.append(
            {
                "stage": name,
                "tasks": len(outcomes),
                "seconds": round(time.monotonic() - start, 2),
                "cpu_seconds": round(sum(outcome["cpu_seconds"] for outcome in outcomes), 2),
                "peak_bytes": max((outcome["peak_bytes"] for outcome in outcomes), default=0),
            }
        )
        return [outcome["result"] for outcome in outcomes]

    def finish(
        self,
        accounting: DocumentCounts,
        shards: Sequence[dict[str, Any]],
        *,
        place: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Check the counts, write the manifest and remove .work.  Returns the manifest.

        shards: facts of the shards written.  place: name of the output, if it will not stay in the
        folder.  more: the step's own keys.  Raises Unfinished with --shard; a run without finishes.
        """
        if self.settings.shard is not None:
            raise Unfinished(f"{self.name}: all is done but the manifest: run without --shard")
        accounting.check(self.name)
        if (path := lost_shard(self.output, shards)) is not None:
            raise RuntimeError(
                f"{self.name}: {path} is not as a worker wrote it; emptying --output and "
                "starting afresh would work (with --scheduler tcp://..., a folder that all see)"
            )
        names = {shard["name"] for shard in shards}
        # Shards of a run on other input, which may have had more.
        others = (path for path in self.output.glob(SHARDS) if path.name not in names)
        remove(path for path in others if path.is_file())
        remove(self.output.rglob(PARTIAL))

        dropped = self.list_dropped(accounting)
        manifest = {
            "step": self.name,
            "settings": self.parameters,
            "versions": versions(),
            "inputs": self._inputs(),
            **accounting.to_json(),
            **more,
            "shards": shards,
        }
        run = {
            "fingerprint": self._fingerprint,
            "machine": {"system": platform.platform(), "cores": os.cpu_count()},
            "settings": {"workers": self.settings.workers, "scheduler": self.settings.scheduler},
            "stages": self._stage_facts,
            "files": self._files,
        }
        write_json(self.output / RUN, run)
        write_json(self.output / MANIFEST, manifest)
        shutil.rmtree(self.work)
        say(
            f"{self.name}: {documents(accounting.input)} documents in, "
            f"{documents(accounting.output)} out to {place or self.output}; dropped: {dropped}"
        )
        if damaged := accounting.dropped.get(DAMAGED_FILE):
            say(
                f"warning: {documents(damaged)} files are cut short or damaged; {REJECTED} has them"
            )
        return manifest

    def list_dropped(self, accounting: DocumentCounts) -> str:
        """Collect the rejected lines in a file; returns the counts of dropped documents in words.
        Raises ValueError, with the reason, if no document is left."""
        parts = [self.work / "rejected" / f"{unit.name}.jsonl" for unit in self.units]
        remove([self.output / REJECTED])
        if found := [part for part in parts if part.exists()]:
            concatenate(found, self.output / REJECTED)
        lost = [f"{documents(n)} {why}" for why, n in sorted(accounting.dropped.items())]
        dropped = ", ".join(lost) or "none"
        if not documents(accounting.output):
            raise ValueError(
                f"{self.name}: {why_empty(accounting, dropped, self.output / REJECTED)}"
            )
        return dropped

    def _inputs(self) -> list[dict[str, Any]]:
        """Name, size and checksum of every input file.  Raises ValueError if one has changed."""
        files = {Path(unit.file): unit for unit in self.units}
        for file, unit in files.items():
            if (file.stat().st_size, file.stat().st_mtime_ns) != (unit.size, unit.modified):
                raise ValueError(
                    f"--input {file} has changed while it was read; the same command again would "
                    "read what is new in it"
                )
        sums = recorded_checksums(files)
        unknown = [file for file, recorded in sums.items() if recorded is None]
        tasks = [Task(f"{k:05}", (file,), files[file].size) for k, file in enumerate(unknown)]
        sums |= zip(unknown, self.stage("checksums", sha256, tasks), strict=True)
        return [
            {"name": file.name, "bytes": unit.size, "sha256": sums[file]}
            for file, unit in files.items()
        ]


def fingerprint_of(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def execute(
    marker: Path, fingerprint: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Run a task, in a worker, and write its marker.  Returns its result and what it took."""
    start = time.process_time()
    result = function(*arguments)
    outcome = {
        "fingerprint": fingerprint,
        "result": result,
        "cpu_seconds": time.process_time() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    content = json.dumps(outcome)
    # Not flushed: the task's files are, and a power cut that takes the marker costs one task.
    with scratch_writer(marker) as file:
        file.write(content.encode())
    return json.loads(content)  # type: ignore[no-any-return]


def read_marker(marker: Path, fingerprint: str) -> Any | None:
    """The outcome of a task that was done before, None if it was not."""
    outcome = read_object(marker)
    return outcome if outcome and outcome["fingerprint"] == fingerprint else None


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect what a step writes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def why_empty(accounting: DocumentCounts, dropped: str, rejected: Path) -> str:
    """Why no document is left, which is an error: nobody runs a step for that."""
    bad = sum(documents(accounting.dropped.get(why, {})) for why in (BAD_LINE, DAMAGED_FILE))
    if documents(accounting.input) > bad:
        return f"none of {documents(accounting.input)} documents is left; dropped: {dropped}"
    if not rejected.exists():
        return "--input holds no document"
    with rejected.open("rb") as lines:
        first = json.loads(lines.readline())
    place = "{file}, byte {offset}: {reason}".format(**first)
    return f"--input holds no document; the first of {bad} lines that are none: {place}"


# The output folder.


@contextlib.contextmanager
def locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """Lock the folder.  Raises ValueError if another run has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(
            "--output", folder, "another folder than one that a run is filling"
        ) from None
    finally:
        os.close(descriptor)


def check_paths(inputs: Sequence[Path], units: Sequence[Unit], output: Path) -> None:
    """Raises ValueError, naming it, for input given twice, or input and output in one another.

    A folder may hold both if only files directly in it are input.
    """
    fillable("--output", output)
    place = output.resolve()
    files = {file: Path(file).resolve() for file in {unit.file for unit in units}}
    seen: set[tuple[Path, int]] = set()
    for unit in units:
        file = files[unit.file]
        if file.is_relative_to(place):
            raise UsageError("--input", unit.file, f"outside of --output {output}")
        if (file, unit.start) in seen:
            raise UsageError("--input", unit.file, "given once")
        seen.add((file, unit.start))
    deep = found_deep(inputs, files.values())
    for path in inputs:
        folder = path.resolve()
        if place.is_relative_to(folder) and any(file.is_relative_to(folder) for file in deep):
            allowed = f"outside of --input {path}, which is searched at any depth"
            raise UsageError("--output", output, allowed)


def found_deep(inputs: Sequence[Path], files: Iterable[Path]) -> list[Path]:
    """The resolved files that are not directly in a folder of --input, and whole folders."""
    roots = {path.resolve() for path in inputs}
    return [
        file for file in files if (file not in roots and file.parent not in roots) or file.is_dir()
    ]


def remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def files_of(manifest: dict[str, Any]) -> list[str]:
    """Patterns of the files of a step whose version listed none: its shards and what is beside."""
    files = set[str]()
    for shard in manifest.get("shards", []):
        name = glob.escape(shard["name"])
        files.add(name)
        if (side := Path(name).parent) != Path():
            files |= {f"{side}/{MANIFEST}", f"{side}/{WORK}"}
        if name.endswith(".bin"):  # of a data set of tokens: .idx, and .json and .tokenizer of all
            stem = name.removesuffix(".bin")
            files |= {f"{stem}.idx"}
            files |= {re.sub(r"_\d{5}$", "", stem) + end for end in (".idx", ".json", ".tokenizer")}
    return sorted(files)


def lost_shard(output: Path, shards: Sequence[dict[str, Any]]) -> Path | None:
    """A shard that is missing or whose size has changed, None if there is none."""
    for shard in shards:
        path = output / shard["name"]
        if not path.is_file() or path.stat().st_size != shard.get("bytes", path.stat().st_size):
            return path
    return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    with atomic_writer(file) as stream:
        stream.write(json.dumps(content, indent=1).encode() + b"\n")


# The usual stage: every unit of the input becomes a shard, and has its own counts.

UnitFunction = Callable[[Unit, Any, DocumentCounts, ShardWriter], dict[str, int] | None]


def map_units(
    run: StepRun, function: UnitFunction
) -> tuple[DocumentCounts, list[Any], Counter[str]]:
    """A stage in which every unit becomes a shard: (accounting, facts of the shards, counters).

    function(unit, settings, accounting, shard) writes the shard, counts in the accounting and may
    return counters, which are summed.
    """
    tasks = [
        Task(unit.name, (function, unit, run.settings), unit.stop - unit.start)
        for unit in run.units
    ]
    results = run.stage("shards", map_unit, tasks)
    counters = Counter[str]()
    for result in results:
        counters.update(result["counters"])
    return sum_counts(results), [result["shard"] for result in results], counters


def map_unit(function: UnitFunction, unit: Unit, settings: ShardSettings) -> dict[str, Any]:
    """One task of map_units."""
    accounting = DocumentCounts()
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        counters = function(unit, settings, accounting, shard)
    keep_rejected(settings, unit, accounting)
    return {"accounting": accounting.to_json(), "shard": shard.facts, "counters": counters or {}}


def sum_counts(results: Sequence[dict[str, Any]]) -> DocumentCounts:
    """Sum of the counts that tasks return under "accounting"."""
    accounting = DocumentCounts()
    for result in results:
        accounting.add(DocumentCounts.from_json(result["accounting"]))
    return accounting


def keep_rejected(
    settings: StepSettings, unit: Unit, accounting: DocumentCounts, shown: int = REJECTED_SHOWN
) -> None:
    """Write the rejected lines to a file that finish() collects, and print a few."""
    target = settings.output / WORK / "rejected" / f"{unit.name}.jsonl"
    if not accounting.rejected:
        target.unlink(missing_ok=True)  # of an earlier run, on the input of that time
        return
    for bad in itertools.islice(accounting.rejected, shown):
        say("warning: {file}, byte {offset}: {reason}: line set aside".format(**bad))
    with scratch_writer(target) as file:
        for bad in accounting.rejected:
            file.write(json.dumps(bad).encode() + b"\n")
