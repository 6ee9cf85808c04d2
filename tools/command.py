"""Commands as a user types them at the root of the repository: written down, and run."""

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
    """More arguments, that suit the machine and change no byte of what is written."""
    environ: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    """Put before each line of its output, where several run at a time."""
    accepts: Callable[[int], bool] = not_
    """Whether an exit status is a good end; asked when it has ended."""

    def __str__(self) -> str:
        """As typed into a shell at the root of the repository."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.argv + self.tuning)])


@dataclass(frozen=True)
class Failure:
    """A command that ended badly, and the end of its stderr."""

    command: Command
    status: int
    tail: str


def shown(path: Path) -> str:
    """The path as a command at the root of the repository would name it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def python(*arguments: str | Path, **environ: str) -> Command:
    words = [shown(word) if isinstance(word, Path) else word for word in arguments]
    return Command(argv=(shown(Path(sys.executable)), *words), environ=environ)


def on_all(command: Command, cores: int) -> Command:
    return replace(command, tuning=("--workers", str(cores)))


def run_commands(commands: Sequence[Command], root: Path) -> Failure | None:
    """Run them side by side, their output shown as it comes; the first that fails ends all."""
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
    """A started command: what it prints passes through here; it is ended with its `with`."""

    def __init__(self, command: Command, root: Path) -> None:
        self.command = command
        self.tail = b""
        self.unfinished: dict[IO[bytes], bytes] = {}  # lines of a labelled command
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
        """Show the next piece of a stream, which waits for one; False at its end."""
        chunk = os.read(stream.fileno(), 4096)
        is_error = stream is self.process.stderr
        if is_error:
            self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        show = sys.stderr if is_error else sys.stdout
        show.buffer.write(self._labelled(stream, chunk) if self.command.label else chunk)
        show.flush()
        return bool(chunk)

    def _labelled(self, stream: IO[bytes], chunk: bytes) -> bytes:
        """The lines that are whole by now, at the end of the stream all."""
        text = self.unfinished.pop(stream, b"") + (chunk or b"\n")
        *lines, self.unfinished[stream] = text.split(b"\n")
        label = self.command.label.encode() + b" | "
        return b"".join(label + line + b"\n" for line in lines if line)

    def failure(self) -> Failure | None:
        """How it ended, which is waited for; None where the command accepts that."""
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
