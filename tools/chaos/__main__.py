"""Inject faults into a training, keep it going as a cluster's scheduler does, and say what they
cost, and whether the final weights are those of the undisturbed run.

    python tools/chaos.py --faults scripts/chaos/hours.toml --output runs/chaos -- \\
        torchrun --nproc-per-node 4 pretrain_gpt2.py --preset small.toml --save-interval 100
    python tools/chaos.py --faults faults.toml --output runs/other -- \\
        python other_trainer.py --checkpoints {save}

The command follows "--". It first runs undisturbed. One of this project gets --save, --load and a
callback that writes its events; {save} in another's command stands for its folder of checkpoints
(docs/operations.md says which events it has to write). --output gets report.json, report.html and
what each start printed.

Exit status: 0 the final weights are those of the undisturbed run; 1 they differ, or the run ended
without a fault or hung; 2 a wrong argument; 3 there are no weights to compare, or the run named no
cause for a fault.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.config.checks import non_negative, positive
from megatron.config.launch import terminated
from megatron.config.parse import parse, whole_program
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from tools.chaos.account import account
from tools.chaos.faults import why_not_filled
from tools.chaos.page import page, summary
from tools.chaos.schedule import Schedule, read_schedule
from tools.chaos.supervise import Command, Launch, RunFailed, Supervisor

PROBE = "tools.chaos.probe:Probe"
WORD = "{save}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    faults: Path
    """TOML file of the faults: scripts/chaos/hours.toml is an example."""

    output: Path
    """Folder of the report and of the run; it is new, or holds the undisturbed run alone."""

    save: Path | None = None
    """Folder of the disturbed run's checkpoints, OUTPUT/run if not given: a full disk needs a small
    file system for it, such as a tmpfs."""

    undisturbed: Path | None = None
    """Folder of the undisturbed run, OUTPUT/undisturbed if not given. A finished run of the same
    command is not repeated."""

    weights: str | None = None
    """module:function that maps the folder of another trainer's checkpoints to {name: array}."""

    tolerance: float | None = None
    """Largest norm of a difference, relative to the undisturbed weights; 0 if not given, and 1e-4
    where the faults file changes the layout."""

    restart_seconds: float = 0.0
    """Seconds until a start after a fault, as in a cluster's queue."""

    patience: float = 600.0
    """Seconds without any event after which the run counts as hanging."""

    def __post_init__(self) -> None:
        positive(self, "patience")
        non_negative(self, "restart_seconds", "tolerance")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; returns the exit status."""
    with whole_program(environ), terminated():
        arguments = [*arguments]
        at = arguments.index("--") if "--" in arguments else len(arguments)
        settings = parse(Settings, arguments[:at], environ, description=__doc__)
        if not (command := arguments[at + 1 :]):
            raise UsageError("--", None, "followed by the command that trains")
        report = run(settings, command)
        print(summary(report))
        return int(report["status"])


def run(settings: Settings, command: Sequence[str], launch: Launch = Command) -> dict[str, Any]:
    """The report, which is also written to the output. Raises UsageError."""
    schedule = read_schedule(settings.faults)
    output = settings.output.resolve()  # the mark of its processes, in whatever folder they are
    save = (settings.save or output / "run").resolve()
    calm = (settings.undisturbed or output / "undisturbed").resolve()
    commands = check(schedule, command)
    for folder in (save, *(output / name for name in ("chaos", "report.json"))):
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            flag = "--save" if folder == save and settings.save else "--output"
            raise UsageError(flag, folder, "new: a run is there")
    weights = None
    if settings.weights is not None:
        try:
            weights = resolve_name(settings.weights)
        except (ValueError, ImportError, AttributeError) as error:
            allowed = f"module:function, which is there ({error})"
            raise UsageError("--weights", settings.weights, allowed) from error
    save.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    fills = any(each.kind == "full_disk" for each in schedule.fault)
    if fills and (why := why_not_filled(save, output)):
        raise UsageError("--save", f"{save}: {why}", "on a small file system for full_disk")

    seconds = undisturbed(calm, command, launch, settings.patience)
    (output / "chaos").mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(
        [completed(words, save) for words in commands],
        launch,
        output / "chaos",
        save,
        schedule.faults(),
        every_steps=schedule.every_steps is not None,
        restart_seconds=settings.restart_seconds,
        patience=settings.patience,
    )
    failure, history = "", supervisor.history
    try:
        supervisor.run()
    except RunFailed as error:
        failure = str(error)
    history.write(output / "chaos" / "history.json")
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = 1e-4 if schedule.layout else 0.0
    compared = None
    if not failure:
        try:
            compared = compare(save, calm, weights, tolerance)
        except Exception as error:  # of another's --weights; the report is worth hours
            failure = f"the weights cannot be read: {type(error).__name__}: {error}"
    accounted = account(history)
    report = {
        "command": shlex.join(command),
        "seed": schedule.seed,
        "undisturbed_seconds": seconds,
        "failure": failure,
        "weights": compared,
        "status": status_of(failure, compared, accounted["unnamed"]),
        **accounted,
    }
    write_atomically(output / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_atomically(output / "report.html", page(report).html())
    return report


def status_of(failure: str, compared: Mapping[str, Any] | None, unnamed: Sequence[int]) -> int:
    """The exit status: wrong weights are worse than a cause that is not named."""
    if failure or (compared is not None and not compared["equal"]):
        return 1
    return 3 if compared is None or unnamed else 0


def check(schedule: Schedule, command: Sequence[str]) -> list[list[str]]:
    """The command of each start, in turn. Raises UsageError."""
    if not any(WORD in word for word in command):
        for flag in ("--save", "--load"):
            if any(word.partition("=")[0] == flag for word in command):
                raise UsageError(flag, None, "left out of the command: tools.chaos sets it")
    if shutil.which(command[0]) is None:
        raise UsageError("--", command[0], "followed by a program that is there")
    commands = []
    for layout in schedule.layout or [{}]:
        words = list(command)
        for flag, value in layout.items():
            names = (flag, flag.replace("_", "-"), "--" + flag[2:].replace("-", "_"))
            place = next((n for n, word in enumerate(words) if word in names), None)
            if place is None or place + 1 == len(words):
                raise UsageError(
                    "--faults", f"[[layout]] {flag}", "a flag of the command, followed by its value"
                )
            words[place + 1] = value
        commands.append(words)
    return commands


def completed(command: Sequence[str], save: Path) -> list[str]:
    """The command with its folder of checkpoints and, where it is of this project, the probe."""
    if any(WORD in word for word in command):
        return [word.replace(WORD, str(save)) for word in command]
    words: list[str] = []
    for word in command:
        flag, equals, value = word.partition("=")
        words += [flag, PROBE, *[value] * bool(equals)] if flag == "--callbacks" else [word]
    probe = [] if PROBE in words else ["--callbacks", PROBE]
    return [*words, "--save", str(save), "--load", str(save), *probe]


def undisturbed(folder: Path, command: Sequence[str], launch: Launch, patience: float) -> float:
    """Runs the command without faults, or takes a finished run of the same; returns its seconds.
    Raises UsageError for a folder of something else."""
    file = folder / "chaos.json"
    facts = json.loads(file.read_text()) if file.exists() else {}
    if facts.get("command") == [*command]:
        return float(facts["seconds"])
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("--undisturbed", folder, "new, or a finished run of the same command")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"without faults: {folder}", flush=True)
    save, begin = folder / "run", time.monotonic()
    words = completed(command, save)
    try:
        Supervisor([words], launch, folder / "chaos", save, patience=patience).run()
    except RunFailed as error:
        what = str(error).splitlines()[0]
        allowed = f"a command that ends with 0: {what}; what it printed is in {folder / 'chaos'}"
        raise UsageError("--", shlex.join(command), allowed) from error
    seconds = time.monotonic() - begin
    write_atomically(file, json.dumps({"command": [*command], "seconds": seconds}).encode())
    return seconds


def compare(save: Path, calm: Path, weights: Any, tolerance: float) -> dict[str, Any] | None:
    """The comparison of both runs' weights; None where there are none of this project's."""
    from tools.chaos.weights import compare, newest

    ours, theirs = ((weights or newest)(folder) for folder in (save, calm / "run"))
    return None if not theirs else compare(ours or {}, theirs, tolerance)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
