"""A program with all processes that it starts: seconds, memory, and a limit on it.

RLIMIT_DATA holds each process to the limit; a look at /proc every 20 ms ends all of them when they
together hold more anonymous and shared memory (pages of files can be dropped). A process whose
parent ends first becomes a child of this one: CPU seconds are the kernel's of every process.
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
    """Run Python with these words to its end, then end what it has left behind. limit: bytes.

    Returns wall and cpu seconds and peak_bytes of all processes together. Raises MemoryError where
    the limit stops it, RuntimeError with its last output where it fails.
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
            child.kill()  # unless it has ended
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
    """The numbers of its children, of theirs, and so on."""
    found = set[str]()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            found |= set(file.read_text().split())
    return found.union(*map(below, found))


def memory(process: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
        return status_bytes("RssAnon", process) + status_bytes("RssShmem", process)
    return 0
