"""Runs a program, and measures seconds and memory of all its processes, with a memory limit.

RLIMIT_DATA limits each process. /proc is read every 20 ms, and all processes are ended when their
anonymous and shared memory together exceeds the limit (pages of files can be dropped). A process
whose parent ends first becomes a child of this one, so the kernel's CPU seconds cover all of them.
"""

import ctypes
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from benchmarks.harness import Figures
from benchmarks.processes import ROOT, status_bytes


def watched(*words: object, limit: int | None = None) -> Figures:
    """Run Python with these words to its end, then end its remaining processes. limit: bytes.

    Returns wall and cpu seconds and peak_bytes of all processes together. Raises MemoryError if the
    limit stops it, and RuntimeError with its last output if it fails.
    """
    command = [sys.executable, *map(str, words)]
    bound = partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit)) if limit else None
    adopt = partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
    adopt(1)
    peak, others = 0, below("self")
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        wall, before = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        child = Popen(command, cwd=ROOT, stdin=DEVNULL, stdout=out, stderr=STDOUT, preexec_fn=bound)
        try:
            while child.poll() is None and not (limit and peak > limit):
                peak = max(peak, sum(map(memory, below("self") - others)))
                with suppress(TimeoutExpired):
                    child.wait(0.02)
        finally:
            wall = time.perf_counter() - wall
            child.kill()  # no effect if it has ended
            child.wait()
            while left := below("self") - others:
                for pid in left:
                    with suppress(ProcessLookupError, ChildProcessError):  # until it is adopted
                        os.kill(int(pid), signal.SIGKILL)
                        os.waitpid(int(pid), 0)
            adopt(0)
        out.seek(0)
        output = out.read()
    if limit and (peak > limit or (child.returncode and "MemoryError" in output)):
        raise MemoryError(f"{peak / 1e6:.0f} MB held, {limit / 1e6:.0f} may be")
    if child.returncode:
        raise RuntimeError(f"{command}: status {child.returncode}\n{output[-3000:]}")
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    return {"wall": wall, "cpu": cpu, "peak_bytes": peak}


def below(process: str) -> set[str]:
    """Process ids of all descendants."""
    found = set[str]()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            found |= set(file.read_text().split())
    return found.union(*map(below, found))


def memory(process: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
        return status_bytes("RssAnon", process) + status_bytes("RssShmem", process)
    return 0
