"""Whether a rank gets on: by its collectives, and by where its threads are in Python."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

# Ranks that stop together are seen to stop within this many seconds: each looks once a second.
_SLACK = 3.0

Position = tuple[tuple[int, int], ...]


def training_threads() -> dict[int | None, str]:
    """Names by ident of the main thread and, where there is one, of the thread that saves."""
    saving = {
        each.ident: "its thread that saves" for each in threading.enumerate() if each.name == "save"
    }
    return {threading.main_thread().ident: "its main thread"} | saving


def positions() -> Position:
    """(code, instruction) of every call on the stacks of the threads that train and save."""
    frames = sys._current_frames()
    found = []
    for ident in training_threads():
        frame = frames.get(ident or 0)
        while frame is not None:
            found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return tuple(found)


class Movement:
    """When this rank last moved; limit: seconds after which it asks the others where they stand.

    A rank moves when it begins a collective, or when a look finds it elsewhere in Python than the
    look before: it computes, evaluates, writes or hashes. A rank that waits in a collective does
    not move, nor one in a single call into C, however long that works, nor one that sleeps. A loop
    that sleeps and polls is caught as well: a look needs Python's lock, which the loop gives away
    nowhere but in its sleep. One that does more between two sleeps is seen to move now and then,
    and is caught, like one that computes for ever, by the number of `rounds` alone.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._counts: Mapping[str, int] = {}
        self._positions: Position = ()
        self._moved = self._asked = time.monotonic()
        self.rounds = 0  # times that it was asked since its last collective

    def look(self, counts: Mapping[str, int]) -> None:
        """counts: collectives made, by axis."""
        position = positions()
        if counts != self._counts:
            self.rounds = 0
        if counts != self._counts or position != self._positions:
            self._moved = time.monotonic()
        self._counts, self._positions = counts, position

    def answer(self) -> None:
        """It was asked; it asks again only when another limit has passed."""
        self.rounds += 1
        self._asked = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - max(self._moved, self._asked) > self._limit

    @property
    def is_recent(self) -> bool:
        slack = min(_SLACK, self._limit / 2)
        return time.monotonic() - self._moved < self._limit - slack
