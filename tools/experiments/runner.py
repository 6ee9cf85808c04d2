"""Runs an experiment: stages of commands, each as a user types it at the root of the repository.

A stage leaves a stamp in OUTPUT/stages. A finished one is reused while its commands, the contents
of its inputs and the sizes of its outputs stay the same. An interrupted one starts anew, or goes on
from its outputs, as those of `pretrain_stage` do. Once a stage has run, so do all later ones that
are not independent.
"""

import contextlib
import hashlib
import json
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import gcd
from operator import not_
from pathlib import Path
from typing import Any, TypeVar

from megatron.config.launch import terminated
from megatron.config.parse import parse, whole_program
from megatron.config.pretrain import PretrainConfig
from megatron.data.files import sha256, write_atomically
from megatron.errors import UsageError, flag
from tools.layouts.processes import count_gpus
from tools.report.numbers import duration, size

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
DATA = Path(os.environ.get("MEGATRON_TEST_DATA", "data"))  # files that cannot be generated here
STAMPS = "stages"  # folder of the stamps and of the logs of failures
OWNER = "owner"  # file in it that names the program whose folder it is
RESULTS = (".json", ".md", ".html", ".png")  # endings of the files that a report writes
TAIL_BYTES = 64_000
FULL_DISK = 50_000_000  # bytes free, below which a failure is put down to the disk
LAUNCHER = rb"^[EW]\d{4} .*torch/distributed/"
# The rank that the launcher names as the first to fail, where a signal ended it.
SIGNALLED = re.compile(
    r"^Root Cause .*?^  rank +: (\d+).*?^  exitcode +: (-\d+) .*?\((SIG\w+)\)",
    re.MULTILINE | re.DOTALL,
)
# The part of a failing program's output that goes to the log.
HELD_BACK = re.compile(rb"^.*Traceback \(most recent call last\)|" + LAUNCHER, re.MULTILINE)
EXCEPTION = re.compile(r"(\[rank\d+\]: )?(\w+\.)*(?P<said>\w*(Error|Exception)\b.*)")

Word = str | int | float | Path
Stamps = dict[str, dict[str, Any]]  # by name of the stage: seconds, commands, sizes of outputs
S = TypeVar("S")  # settings of an experiment


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every experiment; its class adds its own."""

    output: Path
    """Folder for all output."""
    fresh: bool = False
    """Start over instead of reusing finished stages."""
    plan_only: bool = False
    """Print what would be run, and run nothing."""


class StageError(Exception):
    """A command failed; the message names the stage, the cause and what helps."""


@dataclass(frozen=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    """Arguments that suit the machine and do not change a byte of the output."""
    environ: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    """Prefix of each line of output, for commands that run at the same time."""
    is_quiet: bool = False
    """Whether its stdout is not shown."""
    accepts: Callable[[int], bool] = not_
    """Whether an exit status means success; called when the command has ended."""

    def __str__(self) -> str:
        """As typed into a shell at the root of the repository."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.argv + self.tuning)])


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    commands: Sequence[Command] = ()
    is_parallel: bool = False
    """Whether the commands run at the same time rather than one after the other."""
    inputs: Sequence[Path] = ()
    """Files whose contents matter; outputs of earlier stages need not be listed."""
    outputs: Sequence[Path] = ()
    """Files and folders that the stage writes; removed before it runs."""
    goes_on: bool = False
    """Whether its commands go on from its outputs; then they are kept if it was interrupted."""
    is_independent: bool = False
    """Whether it reads no output of earlier stages; then it is reused even if they run again."""
    check: Callable[[], None] = lambda: None
    """Called before the commands; raises an error if they cannot succeed."""

    def fingerprint(self) -> str:
        facts = [[command.argv for command in self.commands], [sha256(p) for p in self.inputs]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def output_sizes(self, folder: Path) -> dict[str, int]:
        """{path relative to the folder: bytes} of every file among the outputs."""
        paths: list[Path] = []
        for output in self.outputs:
            paths += [output, *sorted(output.rglob("*"))]
        files = [path for path in paths if path.is_file()]
        return {str(file.relative_to(folder)): file.stat().st_size for file in files}


@dataclass(frozen=True)
class Machine:
    gpus: int
    cores: int


@dataclass(frozen=True)
class Processes:
    """The processes of one training."""

    count: int
    micro_batch_size: int
    threads: int
    """CPU threads of each process; set for GPUs, too, as a GPU may not work."""


def shown(path: Path) -> str:
    """The path as written in a command at the root of the repository."""
    return relative(path, ROOT)


def to_open(path: Path) -> str:
    """The path as its reader opens it, wherever the experiment was started."""
    return relative(path, Path.cwd())


def relative(path: Path, folder: Path) -> str:
    """Relative to the folder if it is below it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def python(
    *words: Word,
    workers: int | None = None,
    threads: int | None = None,
    **command: Any,
) -> Command:
    """A command of this Python. workers: its --workers; threads: its OMP_NUM_THREADS; command:
    other fields of `Command`."""
    all_words = [PYTHON, *words]
    return Command(
        argv=tuple(shown(word) if isinstance(word, Path) else str(word) for word in all_words),
        tuning=() if workers is None else ("--workers", str(workers)),
        environ={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
        **command,
    )


def call(module: str, function: str, *words: Word, **command: Any) -> Command:
    """A command that calls a function of a module with the words. command: see `python`."""
    text = f"import sys; from {module} import {function}; {function}(*sys.argv[1:])"
    return python("-c", text, *words, **command)


def torchrun(processes: Processes, *words: Word) -> Command:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return python(*launcher, processes.count, *words, threads=processes.threads)


def parse_training(config: type[PretrainConfig], flags: Iterable[Word]) -> PretrainConfig:
    """Settings of a training program. Raises UsageError for flags that it refuses."""
    return parse(config, [str(word) for word in flags], {})


def fit_processes(config: PretrainConfig, machine: Machine) -> Processes:
    """As many processes as there are GPUs that can share the batch; at least those of one model.

    Raises UsageError if the settings do not fit together.
    """
    tensor = config.parallel.tensor_model_parallel_size
    config.check(tensor)
    batch = config.global_batch_size(tensor)
    data = max((d for d in range(1, machine.gpus // tensor + 1) if batch % d == 0), default=1)
    micro_batch = gcd(config.training.micro_batch_size, batch // data)
    count = tensor * data
    return Processes(count, micro_batch, max(1, machine.cores // count))


def check_inputs(**files: Path | None) -> None:
    """Raises UsageError for the first setting whose file is missing. files: by setting."""
    for name, path in files.items():
        if path is not None and not path.is_file():
            raise UsageError(flag(name), path, "a file that exists")


def main(settings: type[S], run: Callable[[S], None], program: str, doc: str | None) -> None:
    """An experiment as a program: its settings are the flags, and an error is one message.

    program: as its user types it. doc: for --help.
    """
    with whole_program({}), terminated():  # with the commands that it has started
        try:
            run(parse(settings, sys.argv[1:], {}, prog=program, description=doc or ""))
        except StageError as error:  # user_errors would add settings of presets to its command
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)


def run_experiment(
    settings: S,
    program: str,
    list_stages: Callable[[S, Machine], list[Stage]],
    report: Callable[[S, Stamps], str],
    name: str,
    minutes: Mapping[str, float] | None = None,
) -> None:
    """Run the stages and report; with plan_only, only print the commands.

    report: writes the results, whose files have the name, and returns the text to end with.
    minutes: see `show_commands`.
    """
    machine = Machine(count_gpus(), len(os.sched_getaffinity(0)))
    stages = list_stages(settings, machine)
    if settings.plan_only:
        show_commands(stages, minutes)
        return
    start = time.monotonic()
    results = [settings.output / f"{name}{ending}" for ending in RESULTS]
    stamps = run_stages(stages, settings.output, program, results, fresh=settings.fresh)
    text = report(settings, stamps)
    print(f"\n{text}\ndone in {duration(time.monotonic() - start)}")


def show_commands(stages: Sequence[Stage], minutes: Mapping[str, float] | None = None) -> None:
    """Print the stages and their commands. minutes: planned for each stage, by its name."""
    for number, stage in enumerate(stages, start=1):
        planned = f", {minutes[stage.name]:g} min" if minutes else ""
        together = ", all at the same time" if stage.is_parallel else ""
        print(f"[{number}/{len(stages)}] {stage.name}{planned}{together}")
        for command in stage.commands:
            print(f"  {command}")
    if minutes:
        print(f"{sum(minutes.values()):g} min are planned on two cores")


def run_stages(
    stages: Sequence[Stage],
    output: Path,
    program: str,
    results: Sequence[Path] = (),
    *,
    fresh: bool = False,
) -> Stamps:
    """Run the stages in order, or reuse them.

    results: files that are written from what the stages leave. fresh: first remove what an earlier
    run of the program left in the folder, these files included.
    Raises UsageError for a folder with other files, StageError if a command fails.
    """
    mark = output / STAMPS / OWNER  # it stays, whatever else is removed or interrupted
    is_own = mark.is_file() and mark.read_text(encoding="utf-8") == program
    if not is_own and output.exists() and (output.is_file() or any(output.iterdir())):
        raise UsageError("--output", output, f"a new folder, or one that {program} wrote")
    write_atomically(mark, program.encode())
    if fresh:
        clear(output, [*results, *(path for stage in stages for path in stage.outputs)])
    stamp_files = [output / STAMPS / f"{stage.name}.json" for stage in stages]
    stamps = {}
    for number, (stage, file) in enumerate(zip(stages, stamp_files, strict=True), start=1):
        title = f"[{number}/{len(stages)}] {stage.name}"
        stamp = json.loads(file.read_bytes()) if file.exists() else {}
        is_same = bool(stamp) and stamp["fingerprint"] == stage.fingerprint()
        if is_same and stamp["outputs"] == stage.output_sizes(output):
            print(f"{title}: reused, finished before in {duration(stamp['seconds'])}", flush=True)
            stamps[stage.name] = stamp
            continue
        seconds = 0.0
        if stage.goes_on and is_same and stamp["outputs"] is None:
            # A start that was killed wrote none: its last output tells when it was alive.
            times = [(output / name).stat().st_mtime for name in stage.output_sizes(output)]
            seconds = stamp["seconds"] + max(0, max(times, default=0) - file.stat().st_mtime)
            print(f"{title}: goes on after {duration(seconds)}", flush=True)
        else:
            file.unlink(missing_ok=True)
            for later, its_file in zip(stages[number:], stamp_files[number:], strict=True):
                if not later.is_independent:
                    its_file.unlink(missing_ok=True)
            for path in stage.outputs:
                remove(path)
            print(title, flush=True)
        stage.check()
        commands = [str(command) for command in stage.commands]
        stamp = {"fingerprint": stage.fingerprint(), "commands": commands}
        start = time.monotonic() - seconds
        try:
            write_stamp(file, stamp, None, start)
            for batch in [stage.commands] if stage.is_parallel else [[c] for c in stage.commands]:
                run_commands(stage.name, batch, output)
        except BaseException:
            with contextlib.suppress(OSError):  # such as a full disk, which the error reports
                write_stamp(file, stamp, None, start)
            raise
        for path in stage.outputs:
            if not path.exists():
                raise StageError(f"stage {stage.name} ended well but left no {path}")
        write_stamp(file, stamp, stage.output_sizes(output), start)
        print(f"{title}: {duration(stamp['seconds'])}", flush=True)
        stamps[stage.name] = stamp
    return stamps


def write_stamp(
    file: Path, stamp: dict[str, Any], outputs: dict[str, int] | None, start: float
) -> None:
    """outputs: their sizes; None until the stage has ended. start: in seconds of time.monotonic."""
    stamp |= {"outputs": outputs, "seconds": round(time.monotonic() - start, 2)}
    write_atomically(file, json.dumps(stamp, indent=1).encode())


def clear(output: Path, paths: Iterable[Path]) -> None:
    """Remove the paths, all files that stamps name, and the stamps and logs."""
    for file in (output / STAMPS).glob("*.json"):
        outputs = json.loads(file.read_bytes())["outputs"]
        if outputs is None:
            remove(file)  # first, as the stage would go on from what is left
        for name in outputs or ():
            remove(output / name)
    for path in paths:
        remove(path)
    for path in (output / STAMPS).iterdir():
        if path.name != OWNER:
            remove(path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_commands(name: str, commands: Sequence[Command], output: Path) -> None:
    """Run them at the same time and show their output as it comes; the first failure ends all.

    name: of the stage. A failure's traceback goes to OUTPUT/stages/NAME.log.
    """
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for command in commands:
            running = stack.enter_context(Running(command))
            selector.register(running.stream, selectors.EVENT_READ, running)
        while selector.get_map():
            for key, _ in selector.select():
                running = key.data
                if running.show_next():
                    continue
                selector.unregister(key.fileobj)
                is_accepted = running.command.accepts(status := running.process.wait())
                if is_accepted and not running.is_held_back:
                    continue
                log = output / STAMPS / f"{name}.log"
                with contextlib.suppress(OSError):  # such as a full disk, which is reported below
                    write_atomically(log, running.tail)
                if not is_accepted:
                    advice, free = f"more in {to_open(log)}", shutil.disk_usage(output).free
                    if free <= FULL_DISK:
                        advice = f"only {size(free)} are free in {output}: free some, and run the "
                        advice += "same command again"
                    raise StageError(
                        f"stage {name} failed: {cause(running.tail, status)}; {advice}\n"
                        f"to repeat it: cd {shlex.quote(str(ROOT))} && {running.command}"
                    )


class Running:
    """A started command; leaving the `with` block terminates it.

    Its stderr is shown here, and the end of it kept; that of a labelled one is merged with stdout.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.tail = b""
        self.unfinished = b""  # line of a labelled command
        self.is_held_back = False
        stdout = subprocess.PIPE if command.label else None
        # For progress bars in a pipe: the width; rare updates if stderr is no terminal.
        bars = {"TQDM_MININTERVAL": "10", "TQDM_NCOLS": "80"}
        if sys.stderr.isatty():
            bars = {"COLUMNS": str(shutil.get_terminal_size().columns)}
        self.process = subprocess.Popen(
            command.argv + command.tuning,
            cwd=ROOT,
            env={**os.environ, **bars, **command.environ},
            stdout=subprocess.DEVNULL if command.is_quiet else stdout,
            stderr=subprocess.STDOUT if command.label else subprocess.PIPE,
            bufsize=0,
        )
        stream = self.process.stdout or self.process.stderr
        assert stream is not None
        self.stream = stream

    def show_next(self) -> bool:
        """Wait for the next bytes and show them; returns False at the end."""
        chunk = os.read(self.stream.fileno(), 4096)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        shown_part = b"" if self.is_held_back else chunk
        if found := HELD_BACK.search(shown_part):
            self.is_held_back = True
            shown_part = shown_part[: found.start()]
        if label := self.command.label.encode():
            text = self.unfinished + (shown_part if chunk else b"\n")
            *lines, self.unfinished = text.split(b"\n")
            shown_part = b"".join(label + b" | " + line + b"\n" for line in lines if line)
        show = sys.stdout if self.command.label else sys.stderr
        show.buffer.write(shown_part)
        show.flush()
        return bool(chunk)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.__exit__(None, None, None)


def cause(tail: bytes, status: int) -> str:
    """The line of a failed command's output that names the cause: its first error: or exception.

    Where a rank was killed, the others' exceptions are a consequence: the launcher names it.
    """
    signalled = ""
    if found := SIGNALLED.search(tail.decode(errors="replace")):
        rank, code, signal = found.groups()
        signalled = f"rank {rank} ended with exitcode {code} ({signal})"
        if signal == "SIGKILL":
            return f"{signalled}, as where memory runs out"
    launcher = re.search(LAUNCHER, tail, re.MULTILINE)
    text = tail[: launcher.start() if launcher else None].decode(errors="replace")
    # Only the last state of a progress bar counts.
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
        if found := EXCEPTION.fullmatch(line):
            return found["said"]
    if signalled:
        return signalled
    last = next(filter(None, reversed(lines)), "it printed nothing")
    return f"exit status {status}, {last}"
