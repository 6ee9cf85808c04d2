"""Contenders whose figures are known; their processes import this module alone, without torch."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import Rank, Turn


def steady(rank: Rank, number: float = 1.0, log: str = "") -> Turn:
    """Returns its number; with a log each turn adds a line "pid number"."""

    def turn() -> dict[str, Any]:
        rank.notes[:] = [f"number {number:g}"]
        if log:
            with Path(log).open("a") as lines:
                print(os.getpid(), f"{number:g}", file=lines)
        return {"number": number, "wall": number, "checked": [number]}

    return turn


def on_a_gpu(rank: Rank, number: float, log: str) -> Turn:
    """steady, on a GPU that is not there."""
    nothing = SimpleNamespace(synchronize=lambda: None, max_memory_allocated=lambda: 0)
    sys.modules["torch"] = SimpleNamespace(cuda=nothing)  # type: ignore[assignment]
    return steady(rank, number, log)


def hungry(rank: Rank, megabytes: int, prepared: int = 0) -> Turn:
    """Fills so many megabytes in a turn, and `prepared` before the first."""
    bytearray(b"x" * (prepared * 2**20))

    def turn() -> dict[str, Any]:
        return {"last": bytearray(b"x" * (megabytes * 2**20))[-1]}

    return turn


def working(rank: Rank, seconds: float) -> Turn:
    """Works so many CPU seconds, and lets a child do the same."""
    work = f"import time\nwhile time.process_time() < {seconds}: pass"

    def turn() -> None:
        start = time.process_time()
        while time.process_time() < start + seconds:
            pass
        subprocess.run([sys.executable, "-c", work], check=True)

    return turn


def failing(rank: Rank, error: Exception, at: str) -> Turn:
    """Raises it: at the start, at that of the second round, or in the last rank's second turn."""
    turns = []

    def turn() -> dict[str, Any]:
        turns.append(0)
        if at == "turn" and len(turns) == 2 and rank.rank == rank.size - 1:
            raise error
        rank.wait()
        return {"number": 1.0}

    if at == "start" or (at == "second round" and rank.round == 1):
        raise error
    if rank.size > 1:
        rank.connect()
    return turn
