"""Stages that are run once: each leaves a stamp, and is reused while the stamp holds."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from tools.corpus.shards import placed

STAMPS = "stages"  # the folder of the stamps; its presence says that a folder is the quickstart's
TAIL_BYTES = 64_000
CAUSE_LINES = 12
LAUNCHER_NOISE = re.compile(r"^[EW]\d{4} .*torch/distributed/")


class StageError(Exception):
    """The message names the stage, the cause and the command to repeat it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    """More arguments, that suit the machine and change no byte of what is written."""
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As typed into a shell at the root of the repository."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.argv + self.tuning)])


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    commands: tuple[Command, ...]
    inputs: tuple[Path, ...] = ()
    """Files from outside whose content counts; what earlier stages left needs no mention."""
    outputs: tuple[Path, ...] = ()
    """Files and folders that it leaves; removed before it runs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the stamp for the report."""

    def fingerprint(self) -> str:
        """Changes with the commands, but for what suits the machine, and the inputs' content."""
        facts = [[command.argv for command in self.commands], [digest(p) for p in self.inputs]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def sizes(self, out: Path) -> dict[str, int]:
        """Bytes of every file among the outputs, named from `out` on."""
        files = (file for output in self.outputs for file in sorted(files_of(output)))
        return {str(file.relative_to(out)): file.stat().st_size for file in files}


def files_of(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else iter([path])


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def own_folder(out: Path, stages: Sequence[Stage], *, fresh: bool) -> None:
    """Make `out` the quickstart's, or empty it of what the quickstart wrote.

    ValueError for a folder with something else in it.
    """
    if out.exists() and not (out / STAMPS).is_dir() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"--out {out} was not written by the quickstart; name a new folder")
    if fresh:
        stamps = [json.loads(file.read_bytes()) for file in (out / STAMPS).glob("*.json")]
        written = {out / name for stamp in stamps for name in stamp["outputs"]}
        for path in written.union(*(stage.outputs for stage in stages)):
            remove(path)
        remove(out / STAMPS)
    (out / STAMPS).mkdir(parents=True, exist_ok=True)


def run_stages(stages: Sequence[Stage], out: Path, root: Path) -> None:
    """Run the stages in order, commands from `root`; reuse those finished before.

    From the first stage that has to run all others run too.  Raises StageError.
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
    """What is known of a finished stage; None if it has not finished."""
    file = stamp_file(out, name)
    return json.loads(file.read_bytes()) if file.exists() else None


def is_finished(stage: Stage, stamp: Mapping[str, Any], out: Path) -> bool:
    """Whether nothing has changed: the outputs are whole, commands and inputs are the same."""
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
    with placed(stamp_file(out, stage.name)) as file:
        file.write(json.dumps(stamp, indent=1).encode())


def run_stage(stage: Stage, root: Path) -> float:
    """Run the stage's commands one after the other; the seconds they took."""
    start = time.monotonic()
    for command in stage.commands:
        status, tail = run_command(command, root)
        if status:
            raise StageError(
                f"stage {stage.name} failed (exit status {status})\n"
                f"cause:\n{cause(tail)}\n"
                f"to repeat it:\n  cd {shlex.quote(str(root))} && {command}"
            )
    missing = [str(output) for output in stage.outputs if not output.exists()]
    if missing:
        raise StageError(
            f"stage {stage.name} ended well but left no {', '.join(missing)}\n"
            "to repeat it:\n  " + "\n  ".join(map(str, stage.commands))
        )
    return time.monotonic() - start


def run_command(command: Command, root: Path) -> tuple[int, str]:
    """Run it with its output shown as it comes; exit status and the end of its stderr."""
    environ = {**os.environ, **terminal(), **command.environ}
    tail = b""
    with subprocess.Popen(
        command.argv + command.tuning, cwd=root, env=environ, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stderr is not None
        try:
            while chunk := process.stderr.read(4096):
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
                tail = (tail + chunk)[-TAIL_BYTES:]
        except BaseException:
            process.terminate()
            raise
    return process.returncode, tail.decode(errors="replace")


def terminal() -> dict[str, str]:
    """What a progress bar behind a pipe cannot see: the width, and whether anybody looks on."""
    if sys.stderr.isatty():
        return {"COLUMNS": str(shutil.get_terminal_size().columns)}
    return {"TQDM_MININTERVAL": "10", "TQDM_NCOLS": "80"}


def cause(tail: str) -> str:
    """The lines of a failed command's stderr that say why.

    From "error:" on where a program says it; else the last lines before a launcher's summary.
    Of a progress bar only its last state.
    """
    lines = [line.rstrip().rpartition("\r")[2] for line in tail.split("\n")]
    lines = list(takewhile(lambda line: not LAUNCHER_NOISE.match(line), filter(None, lines)))
    said = list(dropwhile(lambda line: not line.startswith("error:"), lines))
    told = said[:CAUSE_LINES] or lines[-CAUSE_LINES:]
    return "\n".join(f"  {line}" for line in told)
