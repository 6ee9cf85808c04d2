"""SIGTERM and SIGUSR1, which a scheduler sends before it takes the machine away, and Ctrl-C."""

from __future__ import annotations

import os
import signal
from types import FrameType

# 75 is the status of a run that the same command continues: sysexits.h calls it EX_TEMPFAIL, and
# scripts that requeue test for it. 130 is the shells' status after Ctrl-C, which is not requeued.
SIGNALS = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


class Stopped(Exception):  # noqa: N818
    """Raised on all ranks to leave a long phase unfinished, since one received a signal."""


class StopSignals:
    """Inside the `with`, one of SIGNALS ends the process, which names it, with its status: nothing
    is to save yet.

    After `arm()` it only sets `received`, which the loop checks. A second Ctrl-C ends the process
    at once.
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
        """After this, a signal lets the run finish its step and save."""
        self._is_armed = True

    def ask(self, reason: str) -> None:
        """Let the run end after this step for `reason`, as after a signal."""
        is_first = self.received is None
        if is_first or (reason in SIGNALS and self.received not in SIGNALS):  # signals go first
            self.received = reason

    def is_urgent(self) -> bool:
        """Whether a signal came. Its sender may not wait for more than a step and a save."""
        return self.received in SIGNALS

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._is_armed or self.received == name == "SIGINT":
            os.write(2, f"ended by {name}\n".encode())  # sys.stderr may be redirected
            raise SystemExit(SIGNALS[name])
        self.ask(name)
