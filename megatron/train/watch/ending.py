"""How the ranks of a run end together: one of them tells why, the others end in silence."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

from torch._C._distributed_c10d import Store

from megatron.config.failure import write_error_file
from megatron.train.watch.rendezvous import Place

_LINGER = 5.0  # seconds for which a rank that keeps the store waits for the others to end
_PRECEDENCE = 1.0  # seconds by which the rank that tells the verdict ends before the others


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, and which rank tells it."""

    author: int
    headline: str  # one line
    absent: tuple[int, ...] = ()  # ranks that cannot end by themselves any more
    status: int = 1


class Ending:
    """The end of one rank. Each of its ways out ends the process at once: the main thread may be
    stuck in a collective, and what hangs in destructors would only hide the message."""

    def __init__(self, store: Store, place: Place, error_file: str | None) -> None:
        self._store, self._place, self._error_file = store, place, error_file
        self._once = threading.Lock()  # is never released

    def speak(self, verdict: Verdict, text: str) -> NoReturn:
        """End the run for the reason of `text`, unless another rank has spoken before."""
        if self._store.add("claims", 1) > 1:
            deadline = time.monotonic() + _LINGER
            while time.monotonic() < deadline:
                self.follow()
                time.sleep(0.05)
        self._once.acquire()
        try:
            print(text, file=sys.stderr, flush=True)
            write_error_file(self._error_file, verdict.headline, text)
        finally:
            self._store.set("verdict", json.dumps(asdict(verdict)))
            self._exit(verdict)

    def follow(self) -> None:
        """End this rank if another has told a verdict."""
        if not self._store.check(["verdict"]):
            return
        verdict = Verdict(**json.loads(self._store.get("verdict")))
        self._once.acquire()
        if self._place.rank == 0:
            print(f"rank 0 ends: {verdict.headline}", file=sys.stderr)
        if self._error_file is not None:
            time.sleep(_PRECEDENCE)  # so that torchrun counts the author's end as the first
        self._exit(verdict)

    def abandon(self, text: str | None) -> NoReturn:
        """End this rank without the others, who can no longer be reached."""
        self._once.acquire()
        if text is not None:
            print(text, file=sys.stderr, flush=True)
            write_error_file(self._error_file, text.splitlines()[0], text)
        _flush_and_exit(1)

    def part(self, absent: int = 0) -> None:
        """Let go of the store; a rank that keeps it waits until the others have."""
        gone = self._store.add("gone", 1)
        if not (self._place.is_host and self._place.rank == 0):
            return
        deadline = time.monotonic() + _LINGER
        while gone < self._place.size - absent and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self._store.add("gone", 0)

    def _exit(self, verdict: Verdict) -> NoReturn:
        try:
            self.part(len(verdict.absent))
        finally:
            _flush_and_exit(verdict.status)


def _flush_and_exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
