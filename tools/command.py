"""Formats and runs commands as a user types them at the root of the repository."""

import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from operator import not_
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
TAIL_BYTES = 64_000
CAUSE_LINES = 12
LAUNCHER_NOISE = re.compile(r"^[EW]\d{4} .*torch/distributed/")


@dataclass(frozen=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    """Further arguments that depend on the machine; they do not change a byte of the output."""
    environ: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    """Prefix of each line of its output if several commands run at the same time."""
    accepts: Callable[[int], bool] = not_
    """Whether an exit status means success; called when the command has ended."""

    def __str__(self) -> str:
        """As typed into a shell at the root of the repository."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.argv + self.tuning)])


@dataclass(frozen=True)
class Failure:
    """A command that failed, and the end of its stderr."""

    command: Command
    status: int
    tail: str


def shown(path: Path) -> str:
    """The path as written in a command at the root of the repository."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def python(*arguments: str | Path, **environ: str) -> Command:
    words = [shown(word) if isinstance(word, Path) else word for word in arguments]
    return Command(argv=(shown(Path(sys.executable)), *words), environ=environ)


def on_all(command: Command, cores: int) -> Command:
    return replace(command, tuning=("--workers", str(cores)))


def run_commands(commands: Sequence[Command], root: Path) -> Failure | None:
    """Run them in parallel and show their output as it comes; the first failure ends all."""
    with ExitStack() as stack:
        running = [stack.enter_context(Running(command, root)) for command in commands]
        selector = stack.enter_context(selectors.DefaultSelector())
        for each in running:
            for stream in each.streams:
                selector.register(stream, selectors.EVENT_READ, each)
        while selector.get_map():
            for key, _ in selector.select():
                assert not isinstance(key.fileobj, int)
                if not key.data.pass_on(key.fileobj):
                    selector.unregister(key.fileobj)
                    if failure := key.data.failure():
                        return failure
    return None


class Running:
    """A started command. Its output is passed on here; leaving the `with` block terminates it."""

    def __init__(self, command: Command, root: Path) -> None:
        self.command = command
        self.tail = b""
        self.unfinished: dict[IO[bytes], bytes] = {}  # incomplete lines of a labelled command
        environ = {**os.environ, **terminal(), **command.environ}
        self.process = subprocess.Popen(
            command.argv + command.tuning,
            cwd=root,
            env=environ,
            stdout=subprocess.PIPE if command.label else None,
            stderr=subprocess.PIPE,
            bufsize=0,
        )

    @property
    def streams(self) -> list[IO[bytes]]:
        return [each for each in (self.process.stdout, self.process.stderr) if each is not None]

    def pass_on(self, stream: IO[bytes]) -> bool:
        """Wait for the next bytes of a stream and show them; returns False at its end."""
        chunk = os.read(stream.fileno(), 4096)
        is_error = stream is self.process.stderr
        if is_error:
            self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        show = sys.stderr if is_error else sys.stdout
        show.buffer.write(self._labelled(stream, chunk) if self.command.label else chunk)
        show.flush()
        return bool(chunk)

    def _labelled(self, stream: IO[bytes], chunk: bytes) -> bytes:
        """The lines that are complete so far; at the end of the stream all lines."""
        text = self.unfinished.pop(stream, b"") + (chunk or b"\n")
        *lines, self.unfinished[stream] = text.split(b"\n")
        label = self.command.label.encode() + b" | "
        return b"".join(label + line + b"\n" for line in lines if line)

    def failure(self) -> Failure | None:
        """Wait for its end; returns the failure, or None if the command accepts the status."""
        status = self.process.wait()
        if self.command.accepts(status):
            return None
        return Failure(self.command, status, self.tail.decode(errors="replace"))

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.__exit__(None, None, None)


def terminal() -> dict[str, str]:
    """Environment for progress bars in a pipe: the width; rare updates if stderr is no terminal."""
    if sys.stderr.isatty():
        return {"COLUMNS": str(shutil.get_terminal_size().columns)}
    return {"TQDM_MININTERVAL": "10", "TQDM_NCOLS": "80"}


def cause(tail: str) -> str:
    """The lines of a failed command's stderr that give the cause.

    Starts at "error:" if the output has it; otherwise the last lines before a launcher's summary.
    Progress bars are reduced to their last state.
    """
    lines = [line.rstrip().rpartition("\r")[2] for line in tail.split("\n")]
    lines = list(takewhile(lambda line: not LAUNCHER_NOISE.match(line), filter(None, lines)))
    said = list(dropwhile(lambda line: not line.startswith("error:"), lines))
    told = said[:CAUSE_LINES] or lines[-CAUSE_LINES:]
    return "\n".join(f"  {line}" for line in told)
