"""SIGTERM and SIGUSR1, which a scheduler sends before it takes the machine away, and Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType

# 75 is the status of a run that the same command continues: sysexits.h calls it EX_TEMPFAIL, and a
# script that requeues tests for it. 130 is what shells say of Ctrl-C, which asks for no requeue.
SIGNALS = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


class Stopped(Exception):  # noqa: N818
    """All ranks leave a long phase together, unfinished, since a signal came to one of them."""


class StopSignals:
    """While entered, one of SIGNALS ends the process with its status: nothing is to be saved yet.

    After `arm()` it does nothing but set `received`, at which the loop looks. A second Ctrl-C ends
    the process at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._is_armed = False

    def __enter__(self) -> StopSignals:
        numbers = [signal.Signals[name] for name in SIGNALS]
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From here on the run finishes its step and saves."""
        self._is_armed = True

    def ask(self, reason: str) -> None:
        """Let the run end after this step for `reason`, as after a signal."""
        is_first = self.received is None
        if is_first or (reason in SIGNALS and self.received not in SIGNALS):  # a signal is urgent
            self.received = reason

    def is_urgent(self) -> bool:
        """Whether a signal came: who sent it may not wait for more than a step and a save."""
        return self.received in SIGNALS

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._is_armed or self.received == name == "SIGINT":
            raise SystemExit(SIGNALS[name])
        self.ask(name)


def exit_code(end: str) -> int:
    """Of a run that `end` ended, as loop.train returns it."""
    return SIGNALS.get(end, 0)
