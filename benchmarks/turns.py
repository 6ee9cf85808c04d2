"""Contenders of a benchmark, each on processes of its own, that take turns.

The processes of one contender are started together and then wait for commands, a JSON line each on
the standard input; one that waits takes no processor. So all are measured in one run, round after
round, and the memory of each is that of its own processes. Nothing here or in `cases.py` imports
this project: a peer with a top-level package of the same name uses both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

Answer = dict[str, Any]
Command = Callable[..., Answer]


OUT_OF_MEMORY = "OutOfMemoryError|out of memory|ALLOC_FAILED"


class OutOfMemoryError(RuntimeError):
    """A contender does not fit on its GPU, beside the others."""


class Contender:
    """The processes of one contender, rank by rank."""

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], environ: Mapping[str, str], folder: Path
    ) -> None:
        """commands: of each rank. folder: where they are run."""
        self.name = name
        self.errors = [TemporaryFile("w+") for _ in commands]  # noqa: SIM115 - as long as it lives
        self.processes = [
            subprocess.Popen(
                list(command),
                cwd=folder,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for command, errors in zip(commands, self.errors, strict=True)
        ]

    def ask(self, command: str, **arguments: Any) -> list[Answer]:
        """The answer of every rank; raises as `answers` does."""
        self.send(command, **arguments)
        return self.answers()

    def send(self, command: str, **arguments: Any) -> None:
        """Ask every rank, and do not wait for the answers."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of one that has ended, which `answers` tells
                process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
                process.stdin.flush()

    def answers(self) -> list[Answer]:
        """What every rank says to what was sent.

        Raises RuntimeError with the last words of a rank that has ended, or OutOfMemoryError.
        """
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        for rank, line in enumerate(lines):
            if not line:
                self.errors[rank].seek(0)
                last = self.errors[rank].read()[-4000:]
                kind = OutOfMemoryError if re.search(OUT_OF_MEMORY, last) else RuntimeError
                raise kind(f"rank {rank} of {self.name} has failed:\n{last}")
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def serve(commands: Mapping[str, Command]) -> None:
    """Answer this process's commands until there are no more.

    Whatever else prints goes to the standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = commands[arguments.pop("command")](**arguments)
        print(json.dumps(answer), file=answers, flush=True)


class Stopwatch:
    """Wall and processor time of a number of steps."""

    def __init__(self, step: Callable[[int], float], wait: Callable[[], object]) -> None:
        """step: of a batch's number, to its loss. wait: until all that was started is done."""
        self.step, self.wait = step, wait
        self.next = 0

    def losses(self, steps: int) -> Answer:
        """Of the next steps."""
        losses = [self.step(self.next + number) for number in range(steps)]
        self.next += steps
        return {"losses": losses}

    def time(self, steps: int) -> Answer:
        """Seconds of one of the next steps."""
        self.wait()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step(self.next)
            self.next += 1
        self.wait()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall": spent[0] / steps, "cpu": spent[1] / steps}


class ResidentMemory:
    """Growth of this process's resident memory at its peak, since this was made, in bytes."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        self.before = _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class GpuMemory:
    """Most memory that tensors of this process took on its GPU, in bytes."""

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()
