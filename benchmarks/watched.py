"""A command with all processes that it starts: seconds, memory, and a limit on it.

No control group is asked for: those need systemd or somebody's leave. RLIMIT_DATA holds each
process to the limit on its own (an allocation beyond it fails), and a look at /proc every 20 ms
ends all of them when together they hold more memory that cannot be dropped than the limit. Pages
of files are not part of that, as in a control group, where they can be dropped.
"""

import os
import resource
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 0.02  # seconds
TICKS = os.sysconf("SC_CLK_TCK")
LAST_WORDS = 3000  # bytes of the output of a command that fails


@dataclass(frozen=True)
class Usage:
    """Of all processes together."""

    wall: float
    cpu: float  # of those that were waited for as the kernel counts, of others at the last look
    peak_bytes: int  # at any look: anonymous and shared memory, which is what is limited


def watched(
    command: Sequence[str],
    *,
    limit: int | None = None,
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> Usage:
    """Run the command to its end, then end what it has left behind. limit: bytes.

    Raises MemoryError over the limit, RuntimeError with its last output where it fails.
    """
    bound = partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit)) if limit else None
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=bound,
        )  # fmt: skip
        ended, seen, held = os.pidfd_open(process.pid), {process.pid: 0.0}, 0
        try:
            while not select.select([ended], [], [], INTERVAL)[0] and not (limit and held > limit):
                seen = look(process.pid, seen)
                held = max(held, sum(map(memory, seen)))
        finally:
            wall, left = time.perf_counter() - start, look(process.pid, seen)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            os.close(ended)
        if limit and held > limit:
            raise MemoryError(f"{held / 1e6:.0f} MB are held where {limit / 1e6:.0f} may be")
        if process.returncode:
            output.seek(-min(output.tell(), LAST_WORDS), os.SEEK_END)
            words = output.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)}: status {process.returncode}\n{words}")
    behind = sum(seconds for pid, seconds in left.items() if pid != process.pid)
    return Usage(wall, usage.ru_utime + usage.ru_stime + behind, held)


def look(leader: int, seen: Mapping[int, float]) -> dict[int, float]:
    """{process: its CPU seconds} of those seen, of the leader's session, and all below them."""
    found: dict[int, tuple[int, int, float]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                text = Path(entry.path, "stat").read_text().rpartition(")")[2]
                _, parent, _, session, *rest = text.split()
                seconds = (int(rest[7]) + int(rest[8])) / TICKS  # user, system
                found[int(entry.name)] = int(parent), int(session), seconds
    own = {pid for pid, each in found.items() if pid in seen or each[1] == leader}
    while more := {pid for pid, each in found.items() if each[0] in own} - own:
        own |= more
    return {pid: found[pid][2] for pid in own}


def memory(pid: int) -> int:
    """Anonymous and shared bytes; none of a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = map(str.split, Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))
    return 0
