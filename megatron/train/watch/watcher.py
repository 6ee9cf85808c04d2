"""The first failure is the message: one rank tells it, and all end.

Beside each rank's main thread runs a watcher, which talks to the others over the store in which
the ranks met, never over their process groups. Every second it says where its rank stands. It
ends the process, with status 1, as soon as some rank has told the *verdict*:

    failed     a rank raised: it prints its traceback, then the others end
    vanished   its process died: its neighbour sees their connection close, and its beat stop
    left       it left the run while others wait for it in a collective
    behind     a rank stood still for the time limit: all say where they stand, one tells who is
               late, or nothing where those who are late are at work; then it is asked again later

Keys of the store: beat/R, left/R of rank R; report/N, judges/N, standing/N/R of the Nth time that
all are asked; suspect, verdict for all.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron.parallel.mesh import Mesh
from megatron.train.watch.blame import (
    Standing,
    awaited,
    explain,
    find_fault,
    find_waits,
    last_standing,
    read_standing,
    whereabouts,
)
from megatron.train.watch.ending import Ending, Verdict
from megatron.train.watch.lifeline import Lifeline
from megatron.train.watch.movement import Movement
from megatron.train.watch.rendezvous import Place, as_status
from megatron.train.watch.standing import added, all_groups, groups_of, stack_of, stand

BEAT = 1.0  # seconds between two looks
CONFIRM = 2.0  # a rank whose connection closed and which is still for so long is dead
ECHO = 2.0  # an error may be the echo of another rank's death, which is told within this time
ANSWER = 5.0  # a rank that does not say where it stands within this time is stopped

_VANISHED = (
    "vanished: its process was killed or crashed (or was aborted, as gloo does where ranks are in "
    "different collectives: its own log has its stack then)"
)
_CURE = (
    "if this is a save, load or evaluation that takes so long: --distributed-timeout-minutes N, "
    "with an N greater than {:g}"
)


@dataclass(frozen=True)
class Seat:
    """The rank that a watch is for: its names and its ways to the others."""

    place: Place
    host: str
    store: Store  # a client of its own: none of its calls here waits for a key
    lifeline: Lifeline

    def who(self, coordinates: Mapping[str, int] | None = None) -> str:
        """`rank 3 of 8 (data 1, tensor 1) on HOST`."""
        at = ", ".join(f"{axis} {rank}" for axis, rank in (coordinates or {}).items())
        name = f"rank {self.place.rank} of {self.place.size}"
        return f"{name} ({at}) on {self.host}" if at else f"{name} on {self.host}"


class Watch:
    """Around all that a rank does between `launch` and its end.

    limit: seconds without a sign of work after which a run has failed. As a context manager it
    returns only when all ranks have left; an exception inside ends the process.
    """

    def __init__(self, seat: Seat, limit: float, ending: Ending) -> None:
        self._seat, self._limit, self._ending = seat, limit, ending
        self._rank, self._size, self._store = seat.place.rank, seat.place.size, seat.store
        self._who = seat.who()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._at_start: list[dist.ProcessGroup] = []
        self._movement = Movement(limit)
        self._heard = time.monotonic()
        self._beats = self._asked = 0
        self._echo: str | None = None  # of another rank's death, maybe: an error, and where
        self._keeper: str | None = None  # the last beat of a rank that keeps the store
        self._left = self._suspected = False
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "watch"), (self._guard, "guard of the watch"))
        ]

    def know(self, mesh: Mesh) -> None:
        """From here on the axes have names."""
        self._who = self._seat.who(mesh.coordinates)
        self._at_start, self._groups = all_groups(), groups_of(mesh)
        self._seat.lifeline.ring()

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None or isinstance(error, SystemExit):
                self._leave(error)
            elif isinstance(error, KeyboardInterrupt):
                self._speak(f"{self._who} was interrupted", status=130)
            else:
                self._fail(error)
        except dist.DistError:
            # The store is gone: the watcher, which meets the same, tells it.
            self._threads[0].join()

    # What the main thread does.

    def _leave(self, stop: SystemExit | None) -> None:
        """Wait until all have left, so that nobody waits for who is gone."""
        status = 0 if stop is None or stop.code is None else stop.code
        if not self._groups:
            headline = f"{self._who} left, with exit status {status}, before the run began"
            self._speak(headline, status=as_status(status))
        standing = self._stand(with_stack=True)
        self._left = True
        self._store.set(
            f"left/{self._rank}", json.dumps({"status": str(status), "at": asdict(standing)})
        )
        if self._store.add("left", 1) == self._size:
            self._store.set("all left", "")
        pause = 0.01
        while not self._store.check(["all left"]):
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)
        self._close()

    def _close(self) -> None:
        self._closed.set()
        self._seat.lifeline.ring()
        for thread in self._threads:
            thread.join()
        self._seat.lifeline.close()
        self._ending.part()

    def _fail(self, error: BaseException) -> NoReturn:
        """End with this rank's traceback, unless another rank's end is the cause of it."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, RuntimeError):
            self._echo = stack_of(error)
            self._hold_back()
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        self._speak(f"{self._who} failed: {summary}", f"{self._who} failed:\n{trace}")

    def _hold_back(self) -> None:
        """A broken connection is a RuntimeError like any other: wait for a word of its cause.

        The watcher, whom the bell calls to look, ends the process when a verdict comes.
        """
        deadline = time.monotonic() + ECHO
        while time.monotonic() < deadline:
            time.sleep(0.2)
            self._seat.lifeline.ring()
            if self._suspected:
                time.sleep(CONFIRM + 2 * BEAT)
                return

    def _speak(self, headline: str, text: str | None = None, **facts: Any) -> NoReturn:
        self._ending.speak(Verdict(self._rank, headline, **facts), text or headline)

    # What the watcher does.

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._beat()
                closed = self._seat.lifeline.wait(BEAT)
                if self._closed.is_set():
                    return
                if "keeper" in closed:
                    self._lose_store(_VANISHED)
                if "neighbour" in closed:
                    self._suspect((self._rank + 1) % self._size)
        except dist.DistError as error:
            is_dead = "keeper" in self._seat.lifeline.wait(BEAT)
            self._lose_store(_VANISHED if is_dead else f"vanished ({error})")

    def _stand(self, *, with_stack: bool = False) -> Standing:
        groups = self._groups | (added(self._at_start) if self._groups else {})
        standing = stand(self._who, groups, with_stack=with_stack)
        return replace(standing, moves=self._movement.is_recent, rounds=self._movement.rounds)

    def _beat(self) -> None:
        standing = self._stand()
        self._movement.look(standing.counts)
        self._beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps([self._beats, asdict(standing)]))
        self._ending.follow()
        self._suspected = self._suspected or self._store.check(["suspect"])
        if self._store.check([f"report/{self._asked}"]):
            self._answer()
        if not self._left:
            self._find_leaver(standing)
            if self._movement.is_overdue:
                self._store.set(f"report/{self._asked}", "")
        if self._seat.place.is_host and self._rank and self._store.check(["beat/0"]):
            self._keeper = self._store.get("beat/0").decode()
        self._heard = time.monotonic()

    def _suspect(self, rank: int) -> None:
        """The connection to `rank` closed: did its process end?"""
        self._ending.follow()
        if self._store.check([f"left/{rank}"]):
            return
        self._suspected = True
        self._store.set("suspect", "")
        before = self._last_beat(rank)
        time.sleep(CONFIRM)
        self._ending.follow()
        last = self._last_beat(rank)
        if last != before:
            print(f"{self._who} lost its connection to rank {rank}, which goes on", flush=True)
            return
        standing = last_standing(last, rank)
        headline = f"{standing.who} {_VANISHED}"
        text = f"{headline}\n  {whereabouts(standing)}\n{self._own_place()}"
        self._speak(headline, text, absent=(rank,))

    def _own_place(self) -> str:
        """Where this rank stands, which may tell why another one is gone."""
        standing = self._stand(with_stack=True)
        lines = [standing.who, *(f"  it waits in {call}" for call in standing.waits)]
        return "\n".join([*lines, self._echo or standing.stack or ""])

    def _last_beat(self, rank: int) -> str | None:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _find_leaver(self, standing: Standing) -> None:
        """End the run where this rank waits for one that has left, and so can never come."""
        if not standing.waits or not self._store.add("left", 0):
            return
        for call in standing.waits:
            for rank in standing.members[call.axis]:
                if self._store.check([f"left/{rank}"]):
                    left = json.loads(self._store.get(f"left/{rank}"))
                    self._judge_leaver(rank, left["status"], read_standing(left["at"]), standing)

    def _judge_leaver(self, rank: int, status: str, left: Standing, standing: Standing) -> None:
        both = {self._rank: standing, rank: left}
        lines = awaited(rank, both, find_waits(both))
        if lines:
            headline = f"{left.who} left the run, with exit status {status}, before the others"
            self._speak(headline, "\n  ".join([headline, *lines]), status=as_status(status))

    def _answer(self) -> None:
        """Say in full where this rank stands; the first whose rank has not left is the judge."""
        number, self._asked = self._asked, self._asked + 1
        standing = self._stand(with_stack=True)
        self._movement.answer()
        self._store.set(f"standing/{number}/{self._rank}", json.dumps(asdict(standing)))
        if not self._left and self._store.add(f"judges/{number}", 1) == 1:
            self._judge(number)

    def _judge(self, number: int) -> None:
        standings = self._collect(number)
        fault = find_fault(standings)
        if fault is None:
            return
        silent = tuple(rank for rank, standing in standings.items() if standing.stack is None)
        reason = f"nothing moved for {self._limit:g} s"
        headline, text = explain(standings, fault, reason, _CURE.format(self._limit / 60))
        self._speak(headline, text, absent=silent)

    def _collect(self, number: int) -> dict[int, Standing]:
        """What the ranks answer; of one that does not answer in time, its last beat."""
        keys = {rank: f"standing/{number}/{rank}" for rank in range(self._size)}
        deadline = time.monotonic() + ANSWER
        while time.monotonic() < deadline and not self._store.check(list(keys.values())):
            time.sleep(0.1)
        return {
            rank: read_standing(json.loads(self._store.get(key)))
            if self._store.check([key])
            else last_standing(self._last_beat(rank), rank)
            for rank, key in keys.items()
        }

    def _guard(self) -> None:
        """A store whose keeper is stopped does not answer, and the watcher waits for it."""
        while not self._closed.wait(BEAT):
            silence = time.monotonic() - self._heard
            if silence > self._limit + ANSWER + CONFIRM + BEAT:
                self._lose_store(
                    f"has not answered for {silence:.0f} s: its process is stopped, or its host "
                    "is gone"
                )

    def _lose_store(self, fate: str) -> NoReturn:
        """Nothing can be agreed any more: the lowest rank that can tells what it knows."""
        place = self._seat.place
        text = f"{place.keeper}, where the ranks meet, {fate}"
        if place.is_host:
            keeper = last_standing(self._keeper, 0)
            text = f"{keeper.who} {fate}\n  {whereabouts(keeper)}\n{self._own_place()}"
        self._ending.abandon(text if self._rank == int(place.is_host) else None)
