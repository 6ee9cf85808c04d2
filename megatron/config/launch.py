"""What a program shares with its launcher: how many processes run, how Ctrl-C and a failure end."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config.checks import UsageError

# Variables that say how many processes were started: torchrun's own, that of a step of srun (a
# batch script, which is one process, has it not), that of Open MPI.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def world_size(environ: Mapping[str, str]) -> int:
    """Processes of this run: WORLD_SIZE beside torchrun's RANK, 1 without a launcher.

    Raises UsageError where WORLD_SIZE is no number of processes, and where there are several
    processes without RANK, which would each do the whole work alone.
    """
    has_rank = "RANK" in environ
    for variable in ("WORLD_SIZE",) if has_rank else _SIZES:
        size = environ.get(variable, "" if has_rank else "1")
        if not size.isdecimal() or int(size) < 1:
            works = ("torchrun", "--nproc-per-node", "2")
            allowed = "a number of processes, which torchrun sets"
            raise UsageError(variable, repr(size), allowed, works=works)
        if has_rank:
            return int(size)
        if int(size) > 1:
            works = ("torchrun", "--nproc-per-node", size)
            allowed = "unset where RANK is not set: each process would run alone"
            raise UsageError(variable, size, allowed, works=works)
    return 1


@dataclass(frozen=True)
class RankInfo:
    """This process among those of the run, and the store over which they meet."""

    rank: int
    size: int
    address: str
    port: int
    is_host: bool  # rank 0 keeps the store, but for torchrun's agent, which outlives the ranks
    restarts: int = 0  # of all ranks by torchrun, within one store

    @property
    def keeper(self) -> str:
        """Who keeps the store, for messages."""
        who = "rank 0" if self.is_host else "the launcher"
        return f"{who} at {self.address}:{self.port}"


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """The launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ValueError where one is missing or wrong; no value is made up for it.
    """
    size = world_size(environ)
    rank, address, port = (environ.get(x, "") for x in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not rank.isdecimal() or int(rank) >= size:
        raise UsageError("RANK", repr(rank), f"one of the {size} ranks of WORLD_SIZE")
    if not address:
        raise UsageError("MASTER_ADDR", "''", "the host of rank 0; torchrun sets it")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError("MASTER_PORT", repr(port), "a free port", works=("MASTER_PORT=29500",))
    is_host = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankInfo(int(rank), size, address, int(port), is_host, restarts)


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process, of those that a launcher started, is the one that speaks for all."""
    return environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def interruptible(environ: Mapping[str, str]) -> Iterator[None]:
    """Around the whole of a program: Ctrl-C prints "interrupted" and ends it with status 130.

    Of several processes rank 0 (RANK in environ) prints it; once they run under launch.launch,
    that ends them itself, with the same status.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough, and ending takes a moment
        if is_first(environ):
            above = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C in its line
            print(f"{above}interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None  # what shells say of Ctrl-C


def write_error_file(path: str | None, message: str) -> None:
    """Write what torchrun's summary of failed processes shows of this one, in torchrun's form.

    path: TORCHELASTIC_ERROR_FILE, which torchrun sets; None without it. message: one line; the
    traceback stands above the summary already.
    """
    if path is None:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": message, "extraInfo": extra}})
    try:
        Path(path).write_text(content)
    except OSError as error:
        print(f"torchrun will not show the cause: {error}", file=sys.stderr)
