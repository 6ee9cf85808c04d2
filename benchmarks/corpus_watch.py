"""A command under a memory limit, and the time and memory that all its processes took.

No control group is asked for: those need systemd or somebody's leave.  Instead RLIMIT_DATA holds
each process to the limit on its own (an allocation beyond it fails), and a watcher that looks at
/proc every 20 ms kills all of them when together they hold more memory that cannot be dropped than
the limit.  Pages of files are not part of that, as in a control group, where they can be dropped.
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 0.02  # seconds
TICKS = os.sysconf("SC_CLK_TCK")
MEMORY = ("VmRSS", "RssAnon", "RssShmem")
SESSION, USER_TIME, SYSTEM_TIME = 3, 11, 12  # fields of /proc/*/stat after the name


@dataclass(frozen=True)
class Usage:
    """Memory in bytes, highest at any one look."""

    wall_seconds: float
    cpu_seconds: float
    """Of all processes; each may have run for one more interval."""
    resident: int
    """Of all processes together; a page that two share counts twice."""
    anonymous: int
    """Of it what cannot be dropped, no pages of files: what is limited."""
    largest_process: int
    """Resident, of one process."""
    largest_disk: int
    """Of the folder that was watched."""
    over_limit: bool
    status: int


def run_watched(
    command: Sequence[str], log: Path, limit: int | None = None, folder: Path | None = None
) -> Usage:
    """Run it to its end from the root of the project; what it prints goes to `log`.

    limit: bytes.  folder: whose size is watched, once a second.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hold_to(limit) if limit else None,
        )
    try:
        return _watch(process, limit, folder)
    finally:
        _end(process)


def _hold_to(limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _watch(process: subprocess.Popen[bytes], limit: int | None, folder: Path | None) -> Usage:
    start = time.perf_counter()
    cpu: dict[int, float] = {}
    resident = anonymous = largest = disk = 0
    over, next_look = False, start
    while process.poll() is None:
        held = {pid: _memory(pid) for pid in _session(process.pid, cpu)}
        resident = max(resident, sum(each[0] for each in held.values()))
        anonymous = max(anonymous, sum(each[1] for each in held.values()))
        largest = max([largest, *(each[0] for each in held.values())])
        if limit and sum(each[1] for each in held.values()) > limit:
            over = True
            break
        if folder is not None and time.perf_counter() > next_look:
            disk = max(disk, size_of(folder))
            next_look = time.perf_counter() + 1
        time.sleep(INTERVAL)
    wall = time.perf_counter() - start
    _end(process)
    return Usage(
        wall, sum(cpu.values()), resident, anonymous, largest, disk, over, process.returncode
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command and whatever it has left behind."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _session(leader: int, cpu: dict[int, float]) -> list[int]:
    """The processes that the leader and its children have started; notes their CPU seconds."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            content = Path(entry.path, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # ended since
            continue
        values = content.rpartition(")")[2].split()
        if int(values[SESSION]) == leader:
            pid = int(entry.name)
            cpu[pid] = (int(values[USER_TIME]) + int(values[SYSTEM_TIME])) / TICKS
            found.append(pid)
    return found


def _memory(pid: int) -> tuple[int, int]:
    """(resident, anonymous) bytes; nothing for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = dict(line.split(":", 1) for line in lines)
    kind = {name: int(sizes.get(name, "0").split()[0]) * 1024 for name in MEMORY}
    return kind["VmRSS"], kind["RssAnon"] + kind["RssShmem"]


def size_of(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).stat().st_size
            except FileNotFoundError:  # renamed since
                continue
    return total


def own_peak() -> int:
    """Bytes that this process has held at most; of it alone, as getrusage's are not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@dataclass(frozen=True)
class Taken:
    """What a function returned and took in a process of its own."""

    result: Any
    wall_seconds: float
    cpu_seconds: float
    before: int
    """Bytes the process had held before the function began."""
    peak: int


def measure(function: Callable[..., Any], *arguments: Any) -> Taken:
    before, wall, cpu = own_peak(), time.perf_counter(), time.process_time()
    result = function(*arguments)
    spent = time.perf_counter() - wall, time.process_time() - cpu
    return Taken(result, *spent, before, own_peak())


def measure_apart(function: Callable[..., Any], *arguments: Any) -> Taken:
    """In a process that is started for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, function, *arguments).result()
