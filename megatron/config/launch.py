"""A program and its launcher: the number of processes, and the end by a signal or a failure.

SIGTERM and SIGUSR1 are what a scheduler sends before it takes the machine away.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from megatron.errors import UsageError

# Variables with the number of processes started: that of torchrun; that of a step of srun, which a
# batch script, being one process, does not have; that of Open MPI.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

# 75 is the status of a run that the same command continues: sysexits.h calls it EX_TEMPFAIL, and
# scripts that requeue test for it. 130 is the shells' status after Ctrl-C, which is not requeued.
SIGNALS = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


def world_size(environ: Mapping[str, str]) -> int:
    """Number of processes of this run: WORLD_SIZE beside torchrun's RANK, 1 without a launcher.

    Raises UsageError if WORLD_SIZE is not a number of processes or RANK none of them, and for
    several processes without RANK, each of which would do the whole work alone.
    """
    works = ("torchrun", "--nproc-per-node", "2")
    if "RANK" in environ:
        size = environ.get("WORLD_SIZE", "")
        if not size.isdecimal() or int(size) < 1:
            allowed = "a number of processes, which torchrun sets"
            raise UsageError("WORLD_SIZE", repr(size), allowed, works=works)
        rank = environ["RANK"]
        if not rank.isdecimal() or int(rank) >= int(size):
            raise UsageError("RANK", repr(rank), f"one of the {size} ranks of WORLD_SIZE")
        return int(size)
    for variable in _SIZES:
        if (size := environ.get(variable, "1")) != "1":
            works = (*works[:2], size if size.isdecimal() and size != "0" else "2")
            allowed = "1 or unset where RANK is not set: each process would run alone"
            raise UsageError(variable, repr(size), allowed, works=works)
    return 1


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process in the run, and the store over which the ranks meet."""

    rank: int
    size: int
    address: str
    port: int
    is_host: bool  # rank 0 hosts the store, unless torchrun's agent does, which outlives the ranks
    restarts: int = 0  # of all ranks by torchrun, within one store

    @property
    def keeper(self) -> str:
        """The host of the store, for messages."""
        who = "rank 0" if self.is_host else "the launcher"
        return f"{who} at {self.address}:{self.port}"


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """The launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ValueError if one is missing or wrong; none has a default.
    """
    size, rank = world_size(environ), environ.get("RANK", "0")
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address:
        raise UsageError("MASTER_ADDR", "''", "the host of rank 0; torchrun sets it")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError("MASTER_PORT", repr(port), "a free port", works=("MASTER_PORT=29500",))
    is_host = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    name = "TORCHELASTIC_RESTART_COUNT"
    if not (restarts := environ.get(name, "0")).isdecimal():
        raise UsageError(name, repr(restarts), "a number of restarts, which torchrun sets")
    return RankInfo(int(rank), size, address, int(port), is_host, int(restarts))


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process prints for all that a launcher started: rank 0, or the only process."""
    return environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def interruptible(environ: Mapping[str, str]) -> Iterator[None]:
    """Wraps a whole program: Ctrl-C prints "interrupted" and ends it with status 130.

    With several processes, rank 0 (RANK in environ) prints it; once they run under launch.launch,
    that function ends them, with the same status.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough, and ending takes a moment
        if is_first(environ):
            above = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C in its line
            print(f"{above}interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None  # the status of Ctrl-C in shells


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does, with all that it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stopped(Exception):  # noqa: N818
    """Raised on all ranks to leave a long phase unfinished, since one received a signal."""


class StopSignals:
    """Inside the `with`, one of SIGNALS ends the process, which names it, with its status: nothing
    is to save yet.

    After `arm()` it only sets `received`, which the loop checks. A second Ctrl-C ends the process
    at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._is_armed = False

    def __enter__(self) -> Self:
        numbers = [signal.Signals[name] for name in SIGNALS]
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """After this, a signal lets the run finish its step and save."""
        self._is_armed = True

    def ask(self, reason: str) -> None:
        """Let the run end after this step for `reason`, as after a signal."""
        is_first = self.received is None
        if is_first or (reason in SIGNALS and self.received not in SIGNALS):  # signals go first
            self.received = reason

    def is_urgent(self) -> bool:
        """Whether a signal came. Its sender may not wait for more than a step and a save."""
        return self.received in SIGNALS

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._is_armed or self.received == name == "SIGINT":
            os.write(2, f"ended by {name}\n".encode())  # sys.stderr may be redirected
            raise SystemExit(SIGNALS[name])
        self.ask(name)


def write_error_file(path: str | None, message: str) -> None:
    """Write the cause that torchrun's summary of failed processes shows for this one, in its form.

    path: TORCHELASTIC_ERROR_FILE, which torchrun sets; None without it. message: one line; the
    traceback is already printed above the summary.
    """
    if path is None:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": message, "extraInfo": extra}})
    try:
        Path(path).write_text(content)
    except OSError as error:
        print(f"torchrun will not show the cause: {error}", file=sys.stderr)
