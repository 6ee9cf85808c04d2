"""What all steps have in common: an output folder that is filled once, whole, and can be resumed.

A step is a series of stages, a stage a list of tasks that share nothing but files.  Each task
leaves a marker in OUTPUT/.work when it has placed what it writes; a task whose marker shows the
same function, arguments and input is not done again.  The manifest comes last and says that all is
there; then .work goes.  manifest.json holds what is the same in every run, run.json what is not.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tools.corpus.manifest import check_output, checksum_of, known_checksums, summarise, versions
from tools.corpus.program import Unfinished, progress, say
from tools.corpus.records import Funnel
from tools.corpus.scheduler import Call, open_scheduler
from tools.corpus.settings import StepSettings
from tools.corpus.shards import (
    MANIFEST,
    WORK,
    Unit,
    concatenate,
    placed,
)
from tools.corpus.tasks import Task, digest, execute, marker_of, read_marker, telling

PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "tokenizers", "gigatoken", "orjson")
BEGUN = "begun.json"  # in .work: which step it is, with which settings
REJECTED_SHOWN = 3
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}


class StepRun:
    """A step at work in its output folder: `with StepRun(name, settings) as run`.

    run.done is true where a manifest shows that there is nothing left to do.
    """

    def __init__(
        self,
        name: str,
        settings: StepSettings,
        units: Sequence[Unit] | None = None,
        *,
        by_unit: bool = True,
    ) -> None:
        """units: what the step works on, where it is not --input cut by --unit.

        by_unit: whether an unfinished run can go on where some of the input has changed since, for
        all that a task needs is there until the end.

        Raises ValueError, naming the flag, for input that is not there and for an output folder
        that another run is filling or that other settings have filled.
        """
        self.name = name
        self.settings = settings
        self.units = list(units) if units is not None else settings.units()
        self.parameters = settings.parameters()
        self.output = settings.output
        self.work = settings.output / WORK
        self._by_unit = by_unit
        self.fingerprint = digest(name, self.parameters, self.units)
        self._history = digest(name, self.parameters)
        self._stages: list[dict[str, Any]] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:  # left again if something here fails
            self.output.mkdir(parents=True, exist_ok=True)
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

    def _begin(self, stack: contextlib.ExitStack) -> None:
        self.work.mkdir(exist_ok=True)
        with placed(self.work / BEGUN) as file:
            begun = {"step": self.name, "settings": self.parameters, "input": digest(self.units)}
            file.write(json.dumps(begun).encode())
        if self.settings.shard is None:
            self._clear_parts()
        settings = self.settings
        self._scheduler = stack.enter_context(
            open_scheduler(settings.scheduler, settings.workers, settings.memory_bytes)
        )

    def _clear_parts(self) -> None:
        """Remove what was left by workers that died; nobody else is at work here."""
        for part in self.output.rglob("*.part"):
            part.unlink()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._exit.close()
        if isinstance(error, OSError):
            raise OSError(
                f"step {self.name}: {error}; what is done is kept, and the same command goes on "
                "from there"
            ) from error

    def _clear_others(self) -> None:
        """Refuse, or with --overwrite remove, what does not come from this step and input."""
        difference = self._difference()
        if difference is None:
            return
        begun = (self.work / BEGUN).exists() and not (self.output / MANIFEST).exists()
        mine = begun and self.name == json.loads((self.work / BEGUN).read_bytes())["step"]
        if mine and self.settings.shard is None:  # it may have failed for just these settings
            say(f"{self.name}: {self.output} {difference}, and not finished: starting afresh")
        elif not self.settings.overwrite:
            raise ValueError(
                f"--output {self.output} {difference}; another folder would work, or --overwrite "
                "to replace it"
            )
        # The manifest first: without it nobody takes the rest for whole.
        for path in sorted(self.output.iterdir(), key=lambda path: path.name != MANIFEST):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _difference(self) -> str | None:
        """What the folder holds instead of this step's work, None if it may go on there."""
        run, manifest, begun = self.output / "run.json", self.output / MANIFEST, self.work / BEGUN
        if manifest.exists() and run.exists():
            if json.loads(run.read_bytes()).get("fingerprint") == self.fingerprint:
                return None
            return self._other_settings(manifest) or "was made from other input"
        if begun.exists():  # tasks whose input has changed since are done again
            other_input = json.loads(begun.read_bytes())["input"] != digest(self.units)
            if other_input and not self._by_unit:
                return "was begun with other input"
            return self._other_settings(begun)
        if all(path == self.work for path in self.output.iterdir()):
            return None
        return "holds files that no step wrote"

    def _other_settings(self, file: Path) -> str | None:
        found = json.loads(file.read_bytes())
        if found["step"] != self.name:
            return f"holds the output of the step {found['step']}"
        for name, value in self.parameters.items():
            if found["settings"].get(name) != value:
                return f"was made with {name} {found['settings'].get(name)} instead of {value}"
        return None

    def stage(self, name: str, function: Callable[..., Any], tasks: Sequence[Task]) -> list[Any]:
        """What `function` returns for each task's arguments, as JSON: done now, or before.

        function: of a module, for its name travels.  Raises Unfinished where --shard leaves tasks
        to others.
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
        with progress(f"{self.name}: {name}", total, done) as bar:
            for number, outcome in self._scheduler.run(calls) if calls else ():
                outcomes[mine[number]] = outcome
                bar.update(tasks[mine[number]].weight)
        # Others may have finished while this share was at work.
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
        **more: Any,
    ) -> dict[str, Any]:
        """Check the books, write the manifest and clear the work away; returns the manifest.

        shards: the facts of what was written.  more: keys of the step's own.  With --shard it is
        left to a run without.
        """
        if self.settings.shard is not None:
            raise Unfinished(f"{self.name}: all is done but the manifest: run without --shard")
        funnel.check(self.name)
        check_output(self.name, funnel)
        self._check_shards(shards)
        self._clear_parts()
        self._collect_rejected()
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
        for name, content in (("run.json", run), (MANIFEST, manifest)):
            with placed(self.output / name) as file:
                file.write(json.dumps(content, indent=1).encode() + b"\n")
        shutil.rmtree(self.work)
        summarise(self.name, funnel, self.output)
        return manifest

    def _collect_rejected(self) -> None:
        """Into one file, if there are any; of the units there are now."""
        target = self.output / "rejected.jsonl"
        files = [self.work / "rejected" / f"{unit.name}.jsonl" for unit in self.units]
        if found := [file for file in files if file.exists()]:
            concatenate(found, target)
        else:
            target.unlink(missing_ok=True)

    def _check_shards(self, shards: Sequence[dict[str, Any]]) -> None:
        """That all are there; those that an interrupted run on other input has left are removed."""
        for shard in shards:
            path = self.output / shard["name"]
            if not path.is_file() or path.stat().st_size != shard.get("bytes", path.stat().st_size):
                raise RuntimeError(
                    f"{self.name}: {path} is not as a worker wrote it; emptying --output and "
                    "starting afresh would work (with --scheduler tcp://..., absolute paths)"
                )
        stems = {Path(shard["name"]).name.partition(".")[0] for shard in shards}
        for path in self.output.glob("part-*"):
            if path.name.partition(".")[0] not in stems:
                path.unlink()

    def _inputs(self) -> list[dict[str, Any]]:
        """Name, size and checksum of every input file.  ValueError if one has changed."""
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


@contextlib.contextmanager
def locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """Keep others out of the folder; ValueError where another run is in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(
            f"--output {folder}: another run is filling it; another folder would work"
        ) from None
    finally:
        os.close(descriptor)
