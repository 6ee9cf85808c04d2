"""Common part of all steps: an output folder that is filled once, whole, and can be resumed.

A step is a series of stages; a stage is a list of tasks that share only files.  Each task leaves a
marker in OUTPUT/.work when its output is in place; a task whose marker shows the same function,
arguments and input is not run again.  The manifest is written last and shows that all files are
there; then .work is removed.  manifest.json has facts that are the same in every run, run.json the
others.
"""

import contextlib
import dataclasses
import fcntl
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from megatron.data.files import atomic_writer, sha256
from megatron.data.json_lines import DAMAGED, MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus.files import (
    BAD_LINE,
    DAMAGED_FILE,
    Funnel,
    ShardWriter,
    Unit,
    concatenate,
    documents,
    known_checksums,
    write_shard,
)
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import StepSettings, Unfinished, progress, say

RUN = "run.json"
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.part$")  # names of unfinished files, see `atomic_writer`
SHARD = r"part-\d+(-\d+)?\.(jsonl|txt)(\.gz|\.zst)?"
DATA_SET = r".*_(document|sentence).*\.(bin|idx|json)(\.tmp\d+)?"
WRITTEN = re.compile(rf"(manifest|run)\.json|(rejected|duplicates)\.jsonl|{SHARD}|{DATA_SET}")
SIDES = ("train", "valid")
TOKENIZER = re.compile(r".*_(document|sentence)\.tokenizer(\.partial)?")  # a folder of these files:
TOKENIZER_FILES = re.compile(r"(vocab|merges)\.(json|txt)")


def locked(folder: Path, *, shared: bool) -> contextlib.AbstractContextManager[None]:
    """Lock the folder.  Raises ValueError if another run has locked it."""
    return _locked(folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(
            "--output", folder, "another folder than one that a run is filling"
        ) from None
    finally:
        os.close(descriptor)


def check_apart(inputs: Sequence[Path], units: Sequence[Unit], output: Path) -> None:
    """Raises ValueError, naming it, for input given twice, or input and output in one another.

    A folder may hold both if only files directly in it are input.
    """
    if output.exists() and not output.is_dir():
        raise UsageError("--output", output, "a folder, there already or not")
    place = output.resolve()
    seen: set[tuple[Path, int]] = set()
    resolved = {file: Path(file).resolve() for file in {unit.file for unit in units}}
    for unit in units:
        file = resolved[unit.file]
        if file.is_relative_to(place):
            raise UsageError("--input", unit.file, f"outside of --output {output}")
        if (file, unit.start) in seen:
            raise UsageError("--input", unit.file, "given once")
        seen.add((file, unit.start))
    deep = found_deep(inputs, resolved.values())
    around = next((path for path in inputs if _holds(path, [place]) and _holds(path, deep)), None)
    if around is not None:
        raise UsageError(
            "--output", output, f"outside of --input {around}, which is searched at any depth"
        )


def _holds(folder: Path, files: Iterable[Path]) -> bool:
    place = folder.resolve()
    return any(file.is_relative_to(place) for file in files)


def found_deep(inputs: Sequence[Path], files: Iterable[Path]) -> list[Path]:
    """The resolved files that are not directly in a folder of --input, and whole folders."""
    roots = {path.resolve() for path in inputs}
    return [
        file for file in files if (file not in roots and file.parent not in roots) or file.is_dir()
    ]


def foreign(output: Path, written: re.Pattern[str] = WRITTEN) -> Path | None:
    """A file or folder that no step writes, None if there is none.

    written: pattern of the names that files may have.
    """
    for path in sorted(output.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name == WORK:
                continue
            is_tokenizer = TOKENIZER.fullmatch(path.name)
            if path.name not in SIDES and not is_tokenizer:
                return path
            if below := foreign(path, TOKENIZER_FILES if is_tokenizer else WRITTEN):
                return below
        elif not written.fullmatch(PARTIAL.sub("", path.name)):
            return path
    return None


def clear(output: Path) -> None:
    """Remove everything in the folder; all of it must be written by steps."""
    # The manifest first: without it the rest does not count as complete.
    for path in sorted(output.iterdir(), key=lambda path: path.name != MANIFEST):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def clear_partial(output: Path) -> None:
    """Remove unfinished files of dead workers; nobody else may be writing here."""
    for path in output.rglob("*.part"):
        if PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


def lost_shard(output: Path, shards: Sequence[dict[str, Any]]) -> Path | None:
    """A shard that is missing or whose size has changed, None if there is none."""
    for shard in shards:
        path = output / shard["name"]
        if not path.is_file() or path.stat().st_size != shard.get("bytes", path.stat().st_size):
            return path
    return None


def read_json(file: Path) -> Any:
    """Content of the file, None if there is no file.  Raises ValueError, naming it, if damaged."""
    try:
        return json.loads(file.read_bytes()) if file.exists() else None
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); another --output would work") from None


class Task(NamedTuple):
    key: str
    """Its name among the tasks of its stage, usable as a file name."""
    arguments: tuple[Any, ...]
    """Values that differ in their repr; files are described by a Unit."""
    weight: int = 1
    """Share of the stage's work, in bytes if possible, for the progress bar."""


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
    with atomic_writer(marker) as file:
        file.write(content.encode())
    return json.loads(content)  # type: ignore[no-any-return]


def marker_of(folder: Path, task: Task) -> Path:
    return folder / f"{task.key}.done.json"


def read_marker(marker: Path, fingerprint: str) -> Any | None:
    """The outcome of a task that was done before, None if it was not."""
    try:
        outcome = json.loads(marker.read_bytes())
    except FileNotFoundError:
        return None
    return outcome if outcome["fingerprint"] == fingerprint else None


def digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def telling(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments that tell a task from others; settings are in the history already."""
    return [
        each.__qualname__ if callable(each) else each
        for each in arguments
        if not isinstance(each, StepSettings)
    ]


DAMAGES_SHOWN = 5
PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "tokenizers", "gigatoken", "orjson")


def same_content(files: Mapping[Path, int], inputs: Sequence[dict[str, Any]]) -> bool:
    """Whether files of these sizes are the inputs of a manifest, in order; may read them."""
    named = [(file.name, size) for file, size in files.items()]
    if named != [(each["name"], each["bytes"]) for each in inputs]:
        return False
    known = {folder: known_checksums(folder) for folder in {file.parent for file in files}}
    return all(
        (known[file.parent].get(file.name) or sha256(file)) == each["sha256"]
        for file, each in zip(files, inputs, strict=True)
    )


def checksum_of(file: str, modified: int) -> str:
    del modified  # tells the task from one on an older file
    return sha256(Path(file))


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect what a step writes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def check_output(name: str, funnel: Funnel, output: Path) -> None:
    """Raises ValueError if no document is left: nobody runs a step for that."""
    if documents(funnel.output):
        return
    bad = sum(documents(funnel.dropped.get(why, {})) for why in (BAD_LINE, DAMAGED_FILE))
    if documents(funnel.input) == bad:
        first = next(rejected_lines(output), None)
        place = "; the first of {n} lines that are none: {file}, byte {offset}: {reason}"
        raise ValueError(
            f"{name}: --input holds no document{place.format(n=bad, **first) if first else ''}"
        )
    raise ValueError(
        f"{name}: none of {documents(funnel.input)} documents is left; dropped: {_lost(funnel)}"
    )


def _lost(funnel: Funnel) -> str:
    lost = [f"{documents(n)} {why}" for why, n in sorted(funnel.dropped.items())]
    return ", ".join(lost) or "none"


def rejected_lines(output: Path) -> Iterator[dict[str, Any]]:
    """{file, offset, reason} of all input that was rejected."""
    with contextlib.suppress(FileNotFoundError), (output / "rejected.jsonl").open("rb") as lines:
        yield from map(json.loads, lines)


def summarise(name: str, funnel: Funnel, output: Path, place: str) -> None:
    """Print counts and damages.  place: name of the output."""
    say(
        f"{name}: {documents(funnel.input)} documents in, {documents(funnel.output)} out to "
        f"{place}; dropped: {_lost(funnel)}"
    )
    if DAMAGED_FILE in funnel.dropped:
        damages = (bad for bad in rejected_lines(output) if DAMAGED in bad["reason"])
        for bad in itertools.islice(damages, DAMAGES_SHOWN):
            say("warning: {file}, byte {offset}: {reason}".format(**bad))


BEGUN = "begun.json"  # in .work: which step it is, with which settings


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
    ) -> None:
        """units: the step's input, if it is not --input cut by --unit.

        by_unit: whether an unfinished run can continue after some of the input has changed, because
        all that a task needs is there until the end.

        Raises ValueError, naming the flag, for input that is missing or in the output folder, and
        for an output folder that another run is filling or that other settings have filled.
        """
        self.name = name
        self.settings = settings
        self.units = list(units) if units is not None else settings.units()
        check_apart(settings.input, self.units, settings.output)
        self.parameters = settings.parameters()
        self.output = settings.output
        self.work = settings.output / WORK
        self._by_unit = by_unit
        self._identity = digest([_resolved(unit) for unit in self.units])
        self.fingerprint = digest(name, self.parameters, self._identity)
        self._history = digest(name, self.parameters)
        self._stages: list[dict[str, Any]] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:  # undone if something here fails
            if not self.output.exists():
                self.output.mkdir(parents=True)
                stack.callback(self._leave_nothing)
            stack.enter_context(locked(self.output, shared=self.settings.shard is not None))
            self._clear_others()
            self.done = (self.output / MANIFEST).exists()
            if self.done:
                shutil.rmtree(self.work, ignore_errors=True)
                say(f"{self.name}: {self.output / MANIFEST} is there, nothing is left to do")
            else:
                self._begin(stack)
            self._exit = stack.pop_all()
        return self

    def _leave_nothing(self) -> None:
        """Remove the folder, if it is empty."""
        with contextlib.suppress(OSError):
            self.output.rmdir()

    def _begin(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        self._scheduler = stack.enter_context(
            open_scheduler(settings.scheduler, settings.workers, settings.memory_bytes)
        )
        self.work.mkdir(exist_ok=True)
        with atomic_writer(self.work / BEGUN) as file:
            begun = {"step": self.name, "settings": self.parameters, "input": self._identity}
            file.write(json.dumps(begun).encode())
        if self.settings.shard is None:
            clear_partial(self.output)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._exit.close()
        if isinstance(error, OSError):
            raise OSError(
                f"step {self.name}: {error}; what is done is kept, and the same command goes on "
                "from there"
            ) from error

    def _clear_others(self) -> None:
        """Refuse, or with --overwrite remove, output that is not from this step and input."""
        difference = self._difference()
        if difference is None:
            return
        if (other := foreign(self.output)) is not None:
            raise UsageError(
                "--output",
                self.output,
                f"another folder: this {difference}, and {other.name} in it is no step's",
            )
        begun = (self.work / BEGUN).exists() and not (self.output / MANIFEST).exists()
        mine = begun and self.name == json.loads((self.work / BEGUN).read_bytes())["step"]
        if mine and self.settings.shard is None:  # it may have failed because of them
            say(f"{self.name}: {self.output} {difference}, and not finished: starting afresh")
        elif not self.settings.overwrite:
            raise UsageError(
                "--output",
                self.output,
                f"another folder, or replaced: this {difference}",
                works=("--output", str(self.output), "--overwrite"),
            )
        clear(self.output)

    def _difference(self) -> str | None:
        """How the folder differs from this step's work, None if the step may continue there."""
        run, manifest = read_json(self.output / RUN), read_json(self.output / MANIFEST)
        if manifest is not None and run is not None:
            return self._other_result(run, manifest)
        begun = read_json(self.work / BEGUN)
        if begun is not None:  # tasks whose input has changed since are run again
            if begun["input"] != self._identity and not self._by_unit:
                return "was begun with other input"
            return self._other_settings(begun)
        if all(path == self.work for path in self.output.iterdir()):
            return None
        return "holds files that no step wrote"

    def _other_result(self, run: dict[str, Any], manifest: dict[str, Any]) -> str | None:
        """How a finished step's output differs from this one's, None if it does not."""
        if run.get("fingerprint") != self.fingerprint:
            if difference := self._other_settings(manifest):
                return difference
            if not self._same_input(manifest["inputs"]):
                return "was made from other input"
        lost = lost_shard(self.output, manifest["shards"])
        return f"has lost {lost.relative_to(self.output)}, or a part of it" if lost else None

    def _same_input(self, inputs: Sequence[dict[str, Any]]) -> bool:
        """Whether the files are those of a manifest, even if moved or of another time."""
        files = {Path(unit.file): unit.size for unit in self.units}
        if found_deep(self.settings.input, [file.resolve() for file in files]):
            return False  # paths may be part of the output; single files have no checksums
        return same_content(files, inputs)

    def _other_settings(self, found: dict[str, Any]) -> str | None:
        if found["step"] != self.name:
            return f"holds the output of the step {found['step']}"
        for name, value in self.parameters.items():
            if found["settings"].get(name) != value:
                return f"was made with {name} {found['settings'].get(name)} instead of {value}"
        return None

    def stage(self, name: str, function: Callable[..., Any], tasks: Sequence[Task]) -> list[Any]:
        """Results of `function` for each task's arguments, as JSON: computed now, or before.

        function: of a module, because it is sent by name.  Raises Unfinished if --shard leaves
        tasks to others.
        """
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        prints = [
            digest(self._history, name, function.__qualname__, telling(task.arguments))
            for task in tasks
        ]
        self._history = digest(self._history, prints)
        outcomes = [
            read_marker(marker_of(folder, task), fingerprint)
            for task, fingerprint in zip(tasks, prints, strict=True)
        ]
        k, n = self.settings.share
        mine = [i for i, outcome in enumerate(outcomes) if outcome is None and i % n == k]
        calls = [
            Call(
                execute,
                (marker_of(folder, tasks[i]), prints[i], function, tasks[i].arguments),
            )
            for i in mine
        ]
        start = time.monotonic()
        total = sum(task.weight for task in tasks)
        done = total - sum(tasks[i].weight for i in mine)
        with (
            progress(f"{self.name}: {name}", total, done) as bar,
            contextlib.closing(self._scheduler.run(calls)) as results,  # workers end with it
        ):
            for number, outcome in results:
                outcomes[mine[number]] = outcome
                bar.update(tasks[mine[number]].weight)
        # Others may have finished tasks while this share was at work.
        outcomes = [
            outcome or read_marker(marker_of(folder, task), fingerprint)
            for outcome, task, fingerprint in zip(outcomes, tasks, prints, strict=True)
        ]
        left = sum(outcome is None for outcome in outcomes)
        if left:
            raise Unfinished(
                f"{self.name}: --shard {self.settings.shard} has done its share of the stage "
                f"{name}, of which others have {left} tasks left"
            )
        self._note(name, outcomes, time.monotonic() - start)
        return [outcome["result"] for outcome in outcomes if outcome is not None]

    def _note(self, name: str, outcomes: Sequence[Any], seconds: float) -> None:
        self._stages.append(
            {
                "stage": name,
                "tasks": len(outcomes),
                "seconds": round(seconds, 2),
                "cpu_seconds": round(sum(outcome["cpu_seconds"] for outcome in outcomes), 2),
                "peak_bytes": max((outcome["peak_bytes"] for outcome in outcomes), default=0),
            }
        )

    def finish(
        self,
        funnel: Funnel,
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
        funnel.check(self.name)
        self._check_shards(shards)
        clear_partial(self.output)
        self._collect_rejected()
        check_output(self.name, funnel, self.output)
        manifest = {
            "step": self.name,
            "settings": self.parameters,
            "versions": versions(),
            "inputs": self._inputs(),
            **funnel.to_json(),
            **more,
            "shards": shards,
        }
        run = {
            "fingerprint": self.fingerprint,
            "machine": {"system": platform.platform(), "cores": os.cpu_count()},
            "settings": {"workers": self.settings.workers, "scheduler": self.settings.scheduler},
            "stages": self._stages,
        }
        for name, content in ((RUN, run), (MANIFEST, manifest)):
            with atomic_writer(self.output / name) as file:
                file.write(json.dumps(content, indent=1).encode() + b"\n")
        shutil.rmtree(self.work)
        summarise(self.name, funnel, self.output, place or str(self.output))
        return manifest

    def _collect_rejected(self) -> None:
        """Join the rejected lines of the current units in one file, if there are any."""
        target = self.output / "rejected.jsonl"
        files = [self.work / "rejected" / f"{unit.name}.jsonl" for unit in self.units]
        if found := [file for file in files if file.exists()]:
            concatenate(found, target)
        else:
            target.unlink(missing_ok=True)

    def _check_shards(self, shards: Sequence[dict[str, Any]]) -> None:
        """Raises RuntimeError if one is missing; removes those of a run on other input."""
        if (path := lost_shard(self.output, shards)) is not None:
            raise RuntimeError(
                f"{self.name}: {path} is not as a worker wrote it; emptying --output and "
                "starting afresh would work (with --scheduler tcp://..., a folder that all see)"
            )
        stems = {Path(shard["name"]).name.partition(".")[0] for shard in shards}
        for path in self.output.glob("part-*"):
            if path.name.partition(".")[0] not in stems:
                path.unlink()

    def _inputs(self) -> list[dict[str, Any]]:
        """Name, size and checksum of every input file.  Raises ValueError if one has changed."""
        files = {Path(unit.file): unit for unit in self.units}
        for file, unit in files.items():
            if (file.stat().st_size, file.stat().st_mtime_ns) != (unit.size, unit.modified):
                raise ValueError(
                    f"--input {file} has changed while it was read; the same command again would "
                    "read what is new in it"
                )
        known = {folder: known_checksums(folder) for folder in {file.parent for file in files}}
        sums = {file: known[file.parent].get(file.name) for file in files}
        unknown = [file for file, known_sum in sums.items() if known_sum is None]
        tasks = [
            Task(f"{k:05}", (str(file), files[file].modified), files[file].size)
            for k, file in enumerate(unknown)
        ]
        sums |= zip(unknown, self.stage("checksums", checksum_of, tasks), strict=True)
        return [
            {"name": file.name, "bytes": unit.size, "sha256": sums[file]}
            for file, unit in files.items()
        ]


def _resolved(unit: Unit) -> Unit:
    """The unit with its path resolved, so that every path to its file gives the same unit."""
    return dataclasses.replace(unit, file=str(Path(unit.file).resolve()))


REJECTED_SHOWN = 3

UnitFunction = Callable[[Unit, Any, Funnel, ShardWriter], dict[str, int] | None]


def map_units(run: StepRun, function: UnitFunction) -> tuple[Funnel, list[Any], Counter[str]]:
    """A stage in which every unit becomes a shard: (funnel, facts of the shards, counters).

    function(unit, settings, funnel, shard) writes the shard, counts in the funnel and may
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
    return sum_funnels(results), [result["shard"] for result in results], counters


def map_unit(function: UnitFunction, unit: Unit, settings: StepSettings) -> dict[str, Any]:
    """One task of map_units."""
    funnel = Funnel()
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        counters = function(unit, settings, funnel, shard)
    keep_rejected(settings, unit, funnel)
    return {"funnel": funnel.to_json(), "shard": shard.facts, "counters": counters or {}}


def sum_funnels(results: Sequence[dict[str, Any]]) -> Funnel:
    """Sum of the funnels that tasks return under "funnel"."""
    funnel = Funnel()
    for result in results:
        funnel.add(Funnel.from_json(result["funnel"]))
    return funnel


def keep_rejected(
    settings: StepSettings, unit: Unit, funnel: Funnel, shown: int = REJECTED_SHOWN
) -> None:
    """Write the rejected lines to a file that finish() collects, and print a few."""
    target = settings.output / WORK / "rejected" / f"{unit.name}.jsonl"
    if not funnel.rejected:
        target.unlink(missing_ok=True)  # of an earlier run, on the input of that time
        return
    for bad in itertools.islice(funnel.rejected, shown):
        say("warning: {file}, byte {offset}: {reason}: line set aside".format(**bad))
    with atomic_writer(target) as file:
        for bad in funnel.rejected:
            file.write(json.dumps(bad).encode() + b"\n")
