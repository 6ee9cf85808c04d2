"""A command with all processes that it starts: seconds, memory, and a limit on it.

No control group is asked for: those need systemd or somebody's leave. RLIMIT_DATA holds each
process to the limit on its own (an allocation beyond it fails), and a look at /proc every 20 ms
ends all of them when together they hold more memory that cannot be dropped than the limit. Pages
of files are not part of that, as in a control group, where they can be dropped.

CPU seconds are the kernel's, of every process when it has ended. One whose parent has ended first
(a fork server, a worker that was left behind) becomes a child of this process, which waits for it.
"""

import ctypes
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
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl
LAST_WORDS = 3000  # characters of the output of a command that fails


@dataclass(frozen=True)
class Usage:
    """Of all processes together."""

    wall: float
    cpu: float
    peak_bytes: int  # at any look: anonymous and shared memory, which is what is limited


def watched(
    command: Sequence[str],
    *,
    limit: int | None = None,
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> Usage:
    """Run the command to its end, then end what it has left behind. limit: bytes.

    Raises MemoryError where the limit stops it, RuntimeError with its last output where it fails.
    """
    bound = partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit)) if limit else None
    adopt, held, cpu = ctypes.CDLL(None).prctl, 0, 0.0
    with tempfile.TemporaryFile() as output:
        adopt(ADOPT_ORPHANS, 1)
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=bound,
        )  # fmt: skip
        ended, seen = os.pidfd_open(process.pid), {process.pid}
        try:
            while not select.select([ended], [], [], INTERVAL)[0] and not (limit and held > limit):
                seen = look(process.pid, seen)
                held = max(held, sum(map(memory, seen)))
        finally:
            wall, left = time.perf_counter() - start, look(process.pid, seen)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while left := {pid for pid in left if Path(f"/proc/{pid}").exists()}:
                for pid in left:
                    with suppress(ChildProcessError):  # it is not yet, or its parent has waited
                        _, status, usage = os.wait4(pid, 0)
                        cpu += usage.ru_utime + usage.ru_stime
                        if pid == process.pid:
                            process.returncode = os.waitstatus_to_exitcode(status)
            os.close(ended)
            adopt(ADOPT_ORPHANS, 0)
        output.seek(0)
        words = output.read().decode(errors="replace")
    if limit and (held > limit or (process.returncode and "MemoryError" in words)):
        raise MemoryError(f"up to {held / 1e6:.0f} MB were held where {limit / 1e6:.0f} may be")
    if process.returncode:
        last = words[-LAST_WORDS:]
        raise RuntimeError(f"{' '.join(command)}: status {process.returncode}\n{last}")
    return Usage(wall, cpu, held)


def look(leader: int, seen: set[int]) -> set[int]:
    """The processes among those seen, those of the leader's session, and all below them."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                text = Path(entry.path, "stat").read_text().rpartition(")")[2]
                _, parent, _, session, *_ = text.split()
                found[int(entry.name)] = int(parent), int(session)
    own = {pid for pid, (_, session) in found.items() if pid in seen or session == leader}
    while more := {pid for pid, (parent, _) in found.items() if parent in own} - own:
        own |= more
    return own


def memory(pid: int) -> int:
    """Anonymous and shared bytes; none of a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = map(str.split, Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))
    return 0
