"""The record of a run, its metrics.jsonl, as the programs that show runs read it.

Importing this needs no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.train.metrics import read_metrics

Facts = dict[str, Any]
Lines = Sequence[Facts]
"""The lines of a run's record that hold, as `read_record` gives them."""


def record_of(run: Path) -> Path:
    """The record of a run: the file itself, or that of a folder (--save)."""
    return run / "metrics.jsonl" if run.is_dir() else run


def is_epoch(line: Facts) -> bool:
    """Whether fine-tuning wrote the line after an epoch."""
    return "epoch" in line and "train_loss" in line


def epoch_figures(line: Facts) -> list[str]:
    """The keys of an epoch's figures; None is a figure that is not finite."""
    return [
        key
        for key, value in line.items()
        if key not in ("step", "seed", "epoch") and isinstance(value, int | float | None)
    ]


def read_record(file: Path) -> Lines:
    """The valid lines of a record. Another program's line may have no step: it is left out."""
    return [line for line in read_metrics(file) if type(line.get("step")) is int]
