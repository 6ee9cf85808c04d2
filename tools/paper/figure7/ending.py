"""How a training ended: a divergence is a result of the figure, any other failure is not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.train.metrics import read_metrics

DIVERGED = "NonFiniteError"  # in megatron/train/diagnose.py, which needs torch


def diverged_at(lines: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose loss or gradient was not finite, from the lines of a record, or None."""
    last = lines[-1] if lines else {}
    # The line of an error has the number of the last completed step.
    return last["step"] + 1 if last.get("ended") == DIVERGED else None


def is_result(file: Path, status: int) -> bool:
    """Whether a training with this record and exit status completed or diverged."""
    if status == 0 or not file.exists():
        return status == 0
    lines = read_metrics(file)
    return diverged_at(lines) is not None and lines[-1]["exit_code"] == status
