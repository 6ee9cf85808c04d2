"""Settings that all steps share, those of steps that write shards or count tokens, and a step as a
program.
"""

import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from megatron.config.checks import at_least
from megatron.config.parse import parse, user_errors
from megatron.data.files import sha256
from megatron.data.json_lines import find_shards
from megatron.errors import UsageError
from tools.corpus.files import Compression, Unit, cut, known_checksums


class Unfinished(Exception):  # noqa: N818, it is no error
    """This --shard has done its share; others have not yet done theirs."""


def program(module: str, argv: Sequence[str] | None = None) -> None:
    """Run a step as a program: the `Settings` and the `run` of its module.

    The module is imported by its name, so that workers find its functions.
    """
    with running():
        step = importlib.import_module(module)
        step.run(parse_settings(module, sys.argv[1:] if argv is None else argv))


def parse_settings(module: str, argv: Sequence[str]) -> Any:
    """Settings from flags; the module's docstring is in --help.  Raises what parse raises."""
    step = importlib.import_module(module)
    prog = f"python tools/corpus.py {module.rpartition('.')[2]}"
    return parse(step.Settings, argv, {}, prog=prog, description=step.__doc__ or "")


@contextlib.contextmanager
def running() -> Iterator[None]:
    """An error ends the program with one message and status 2; ctrl-C and TERM with one line and
    the status that shells expect; Unfinished with its message and status 0."""
    owner = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != owner:  # a worker of a pool, which inherits the handler and is terminated
            os._exit(128 + number)
        signal.signal(number, signal.SIG_IGN)  # ignored from now on: ending takes a moment
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        # RuntimeError: such as workers that die again and again.
        with user_errors({}, kinds=(ValueError, OSError, RuntimeError)):
            try:
                yield
            except Unfinished as unfinished:
                say(str(unfinished))
    except KeyboardInterrupt as stop:
        print("stopped; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)


def progress(label: str, total: int, done: int) -> Any:
    """A progress bar, with an estimate of what is left; to be used in a `with`."""
    return tqdm(total=total, initial=done, desc=label, unit="B", unit_scale=True, disable=None)


def say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def warn_of_unknown(flag: str, sources: Collection[str], found: Collection[str]) -> None:
    """Warn of sources named by a flag that have no document.  found: the sources that have some."""
    missing = [source for source in sources if source not in found]
    if missing:
        say(
            f"warning: {flag} {' '.join(missing)}: no document is of this source; there are "
            f"{', '.join(sorted(found))}"
        )


SIZE = re.compile(r"(\d{1,15}\.?\d*|\.\d+)([KMGT]B?|B|)", re.IGNORECASE)
FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
LEAST_UNIT, LEAST_MEMORY = 100, 1000  # bytes
# Settings of all steps that do not affect what is written.
NO_PARAMETERS = {"input", "output", "workers", "scheduler", "shard", "memory", "overwrite"}


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    input: tuple[Path, ...]
    """Files of JSON lines, and *.txt files of one document each (plain, .gz, .zst, .bz2 or .xz), or
    folders of them, such as other steps write."""

    output: Path
    """Folder to fill."""

    workers: int = len(os.sched_getaffinity(0))
    """Processes; with --scheduler slurm, jobs.  Their number does not change the output."""

    scheduler: str = "local"
    """local, slurm, or the address of a Dask scheduler such as tcp://host:8786."""

    shard: str | None = None
    """K/N: run only every N-th task from the K-th on (K from 0), in an array of jobs; repeat until
    no task is left, then run the command without --shard."""

    memory: str = "500MB"
    """About how much memory a task may use at a time, where its state grows with the corpus."""

    overwrite: bool = False
    """Replace the results of other settings or other input in the output folder."""

    no_parameters: ClassVar[frozenset[str]] = frozenset()
    """The step's own settings that do not affect what is written."""

    def __post_init__(self) -> None:
        at_least(self, workers=1)
        if self.shard is not None and self.overwrite:
            allowed = "left out with --shard: it would remove what other shares write"
            raise UsageError("--overwrite", None, allowed)
        if self.scheduler not in ("local", "slurm") and "://" not in self.scheduler:
            allowed = "local, slurm or the address of a Dask scheduler such as tcp://host:8786"
            raise UsageError("--scheduler", self.scheduler, allowed)
        if self.scheduler != "local":  # workers elsewhere run in other folders
            for field in fields(self):
                object.__setattr__(self, field.name, _absolute(getattr(self, field.name)))
        self.share, self.memory_bytes  # noqa: B018, the properties check what they read

    @property
    def unit_bytes(self) -> int:
        """Size of the input of one task; a compressed file is one task."""
        raise NotImplementedError

    @property
    def may_replace(self) -> bool:
        """Whether other results in the output folder are removed."""
        return self.overwrite

    @property
    def memory_bytes(self) -> int:
        return parse_size("--memory", self.memory, LEAST_MEMORY)

    @property
    def share(self) -> tuple[int, int]:
        """(K, N) of --shard."""
        try:
            k, n = map(int, (self.shard or "0/1").split("/"))
        except ValueError:
            k, n = 0, 0
        if not 0 <= k < n:
            raise UsageError("--shard", self.shard, "K/N with 0 <= K < N, such as 0/8")
        return k, n

    def units(self) -> list[Unit]:
        """--input cut by unit_bytes.  Raises ValueError if all of it is empty."""
        shards = find_shards(self.input)
        units = cut(shards, self.unit_bytes)
        empty = [path for path in shards if not path.stat().st_size]
        if not units:
            raise UsageError("--input", empty[0], "a file with a JSON object a line")
        for path in empty:
            if path.name not in known_checksums(path.parent):  # steps may write empty ones
                say(f"warning: --input {path} is empty")
        return units

    def parameters(self) -> dict[str, Any]:
        """The settings that affect what is written; files are given by name and checksum."""
        names = {field.name for field in fields(self)} - NO_PARAMETERS - self.no_parameters
        return {name: as_parameter(getattr(self, name)) for name in sorted(names)}


@dataclass(frozen=True, kw_only=True)
class ShardSettings(StepSettings):
    """Settings of steps that write shards of JSON lines."""

    compress: Compression = "none"
    """Compression of the shards that are written."""

    unit: str = "32MB"
    """Size of the input of one task, which becomes one shard; a compressed file is one task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unit_bytes  # noqa: B018, the property checks what it reads

    @property
    def unit_bytes(self) -> int:
        return parse_size("--unit", self.unit, LEAST_UNIT)


@dataclass(frozen=True, kw_only=True)
class LengthSettings(ShardSettings):
    """Settings of steps that drop documents that are too short."""

    min_tokens: int = 128
    """Shortest document, or piece of one, to keep: in tokens; without a vocabulary, in pieces of
    GPT-2's pre-tokenizer.  1 keeps them all."""

    vocab_file: Path | None = None
    """vocab.json of the tokenizer in use."""

    merge_file: Path | None = None
    """merges.txt of the tokenizer in use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, min_tokens=1)

    @property
    def unit_of_length(self) -> str:
        return "pieces" if self.vocab_file is None and self.merge_file is None else "tokens"


def _absolute(value: Any) -> Any:
    """Paths, also in tuples, made absolute; other values are unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return value.absolute() if isinstance(value, Path) else value


def as_parameter(value: Any) -> Any:
    if isinstance(value, Path):
        if not value.is_file():
            raise ValueError(f"{value}: no such file")
        return {"name": value.name, "sha256": sha256(value)}
    if isinstance(value, tuple):
        return [as_parameter(each) for each in value]
    return value


def parse_size(flag: str, text: str, least: int = 1) -> int:
    """Bytes: 32MB is 32,000,000.  Raises ValueError, naming the flag, below `least` bytes."""
    match = SIZE.fullmatch(text.replace(" ", ""))
    number, unit = match.groups() if match else ("0", "")
    size = int(float(number) * FACTORS[unit.upper().rstrip("B")]) if unit else 0
    if size < least:
        works = (flag, f"{text}MB") if float(number) and not unit else ()
        allowed = f"a size with its unit such as 32MB or 1.5GB, at least {least}B"
        raise UsageError(flag, text, allowed, works=works)
    return size
