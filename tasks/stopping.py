"""What becomes of the seeds where a signal stops a fine-tuning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron.parallel.mesh import Mesh
from megatron.train.signals import SIGNALS, StopSignals


@dataclass(kw_only=True)
class Progress:
    """How far a fine-tuning has come."""

    save: Path | None
    finished: list[int] = field(default_factory=list)  # seeds
    seed: int | None = None  # that is trained
    epoch: int = 0  # of it, counted from 1; 0 before the first one

    def begin(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def end(self, seed: int) -> None:
        self.seed = None
        self.finished.append(seed)

    def __str__(self) -> str:
        """What a signal now would leave, and what to do."""
        place = f"in epoch {self.epoch}" if self.epoch else "before its first epoch"
        stopped = "stopped" if self.seed is None else f"seed {self.seed} stopped {place}"
        if self.save is None:
            return f"{stopped}: without --save nothing is kept"
        goes_on = "goes on" if self.seed is None else "begins it anew"
        finished = ", ".join(map(str, self.finished)) or "none"
        return f"{stopped}: the same command {goes_on}; finished: {finished}"


@contextmanager
def stoppable(progress: Progress, mesh: Mesh) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and Ctrl-C end the process at once with the status of SIGNALS, and the first
    rank tells the progress: of an epoch that is not done nothing could be used."""
    with StopSignals():
        try:
            yield
        except SystemExit as stop:
            if mesh.is_first and stop.code in SIGNALS.values():
                print(progress, file=sys.stderr, flush=True)
            raise
