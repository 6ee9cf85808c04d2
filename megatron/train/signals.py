"""SIGTERM and SIGUSR1, which a scheduler sends before it takes the machine away."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = ("SIGTERM", "SIGUSR1")

# Of a run that a signal stopped and that the same command continues: sysexits.h calls it
# EX_TEMPFAIL. A script that requeues tests for it.
REQUEUE = 75


class StopSignals:
    """While entered, one of SIGNALS does nothing but set `received`; the loop looks at it."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        numbers = [signal.Signals[name] for name in SIGNALS]
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


def exit_code(end: str) -> int:
    """Of a run that `end` ended, as loop.train returns it."""
    return REQUEUE if end in SIGNALS else 0
