"""Stages that run once: each writes a stamp, and is reused as long as the stamp is valid."""

import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.config.parse import parse_call, user_errors
from megatron.data.files import atomic_writer, sha256
from tools.command import Command, Failure, cause, run_commands

STAMPS = "stages"  # folder of the stamps; its presence marks an output folder of a program
OWNER = "owner"  # file in it that names the program


class StageError(Exception):
    """The message names the stage, the cause and the command to repeat it."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    commands: tuple[Command, ...]
    side_by_side: bool = False
    """Whether the commands run in parallel rather than one after the other."""
    inputs: tuple[Path, ...] = ()
    """External files whose contents matter; outputs of earlier stages need not be listed."""
    outputs: tuple[Path, ...] = ()
    """Files and folders that the stage writes; removed before it runs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts to keep in the stamp for the report."""

    def fingerprint(self) -> str:
        """Hash of the commands without their machine-dependent tuning, and of the inputs."""
        facts = [[command.argv for command in self.commands], [sha256(p) for p in self.inputs]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def sizes(self, out: Path) -> dict[str, int]:
        """{path relative to `out`: bytes} of every file among the outputs."""
        files = (file for output in self.outputs for file in sorted(files_of(output)))
        return {str(file.relative_to(out)): file.stat().st_size for file in files}


def files_of(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else iter([path])


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def own_folder(
    out: Path,
    stages: Sequence[Stage],
    *,
    fresh: bool,
    flag: str = "--out",
    owner: str = "the quickstart",
) -> None:
    """Mark `out` as the program's folder; with `fresh` first remove what the program wrote to it.

    Raises ValueError, naming the flag, for a folder with anything else in it.
    """
    mark = out / STAMPS / OWNER
    if out.is_file() or (out.exists() and any(out.iterdir()) and not (out / STAMPS).is_dir()):
        raise ValueError(f"{flag} {out} was not written by {owner}; name a new folder")
    if mark.exists() and (other := mark.read_text(encoding="utf-8")) != owner:
        raise ValueError(f"{flag} {out} was written by {other}, not by {owner}; name a new folder")
    if fresh:
        stamps = [json.loads(file.read_bytes()) for file in (out / STAMPS).glob("*.json")]
        written = {out / name for stamp in stamps for name in stamp["outputs"]}
        for path in written.union(*(stage.outputs for stage in stages)):
            remove(path)
        remove(out / STAMPS)
    (out / STAMPS).mkdir(parents=True, exist_ok=True)
    mark.write_text(owner, encoding="utf-8")


def run_stages(stages: Sequence[Stage], out: Path, root: Path) -> None:
    """Run the stages in order, with commands started in `root`; reuse finished ones.

    After the first stage that has to run, all later ones run, too.  Raises StageError.
    """
    for number, stage in enumerate(stages, start=1):
        title = f"[{number}/{len(stages)}] {stage.name}"
        stamp = read_stamp(out, stage.name)
        if stamp is not None and is_finished(stage, stamp, out):
            print(f"{title}: reused, finished before in {stamp['seconds']:.0f} s", flush=True)
            continue
        for later in stages[number - 1 :]:
            stamp_file(out, later.name).unlink(missing_ok=True)
        for output in stage.outputs:
            remove(output)
        print(title, flush=True)
        seconds = run_stage(stage, root)
        write_stamp(stage, seconds, out)
        print(f"{title}: {seconds:.0f} s", flush=True)


def stamp_file(out: Path, name: str) -> Path:
    return out / STAMPS / f"{name}.json"


def read_stamp(out: Path, name: str) -> dict[str, Any] | None:
    """The stamp of a finished stage; None if it has not finished."""
    file = stamp_file(out, name)
    return json.loads(file.read_bytes()) if file.exists() else None


def is_finished(stage: Stage, stamp: Mapping[str, Any], out: Path) -> bool:
    """Whether nothing has changed: sizes of the outputs, commands and inputs are the same."""
    if not all(output.exists() for output in stage.outputs):
        return False
    same_outputs = stamp["outputs"] == stage.sizes(out)
    return bool(same_outputs and stamp["fingerprint"] == stage.fingerprint())


def write_stamp(stage: Stage, seconds: float, out: Path) -> None:
    stamp = {
        "fingerprint": stage.fingerprint(),
        "outputs": stage.sizes(out),
        "seconds": round(seconds, 2),
        "commands": [str(command) for command in stage.commands],
        "facts": stage.facts,
    }
    with atomic_writer(stamp_file(out, stage.name)) as file:
        file.write(json.dumps(stamp, indent=1).encode())


def run_stage(stage: Stage, root: Path) -> float:
    """Run the stage's commands; returns the seconds they took."""
    start = time.monotonic()
    batches = [stage.commands] if stage.side_by_side else [(each,) for each in stage.commands]
    for batch in batches:
        if failure := run_commands(batch, root):
            raise StageError(explain(stage, failure, root))
    missing = [str(output) for output in stage.outputs if not output.exists()]
    if missing:
        raise StageError(
            f"stage {stage.name} ended well but left no {', '.join(missing)}\n"
            "to repeat it:\n  " + "\n  ".join(map(str, stage.commands))
        )
    return time.monotonic() - start


def explain(stage: Stage, failure: Failure, root: Path) -> str:
    return (
        f"stage {stage.name} failed (exit status {failure.status})\n"
        f"cause:\n{cause(failure.tail)}\n"
        f"to repeat it:\n  cd {shlex.quote(str(root))} && {failure.command}"
    )


def finished_stamps(out: Path, names: Sequence[str], flag: str, cure: str) -> dict[str, Any]:
    """The stamps of these stages; raises ValueError, naming the flag, if one has not finished.

    cure: for the message, what to run then.
    """
    stamps = {name: read_stamp(out, name) for name in names}
    for name, stamp in stamps.items():
        if stamp is None:
            raise ValueError(f"{flag} {out}: stage {name} has not finished; {cure}")
    return stamps


def tell_plan(stages: Sequence[Stage], minutes: Mapping[str, float] = MappingProxyType({})) -> None:
    """Print the stages and their commands, as typed at the root of the repository.

    minutes: planned minutes by name of the stage.
    """
    for number, stage in enumerate(stages, start=1):
        together = ", all at the same time" if stage.side_by_side else ""
        planned = f", {minutes[stage.name]:g} min" if stage.name in minutes else ""
        print(f"[{number}/{len(stages)}] {stage.name}{planned}{together}")
        for command in stage.commands:
            print(f"  {command}")
    if minutes:
        print(f"{sum(minutes.values()):g} min are planned on two cores")


def run_program(function: Callable[..., None], name: str) -> None:
    """Call the function with the command line's flags; an error ends the program with one message.

    name: the program, as its user types it.
    """
    with user_errors({}):
        try:
            parse_call(function, sys.argv[1:], {}, prog=name)()
        except StageError as failure:
            print(f"error: {failure}", file=sys.stderr)
            sys.exit(1)
