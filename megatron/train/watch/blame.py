"""Which rank holds up a run that stands still, told from where each rank stands.

A rank that waits in collective n of an axis waits for those of the axis that have made fewer than
n. Followed from rank to rank, this leads to those for whom others wait and who wait for nobody:
they are behind. Where there are none, ranks wait for each other in a circle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.train.watch.rendezvous import listed

_SHOWN = 4  # ranks of which a message tells all
_ROUNDS = 6  # times that a rank may be asked, and move without a collective


@dataclass(frozen=True)
class Call:
    """The `number`-th collective of this rank on an axis; what: its name, shapes and dtypes."""

    axis: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"collective {self.number} on the {self.axis} axis, {self.what}"


@dataclass(frozen=True)
class Standing:
    """Where one rank stands; the axes are those on which it has peers."""

    who: str  # "rank 3 of 8 (data 1, tensor 1) on HOST"
    counts: Mapping[str, int]  # collectives made, by axis
    members: Mapping[str, Sequence[int]]  # ranks of its group, by axis
    calls: Sequence[Call] = ()  # the latest on each axis
    waits: Sequence[Call] = ()  # those that have not come back
    stack: str | None = None  # of its Python threads; None where it did not answer
    moves: bool = False  # in Python, within the time limit
    rounds: int = 0  # times that it was asked before, since its last collective

    @property
    def holds_up(self) -> bool:
        """Whether it is to blame where others wait for it: it may be at work instead."""
        return self.stack is None or not self.moves or self.rounds >= _ROUNDS


@dataclass(frozen=True)
class Wait:
    """`rank` waits in `call` for `missing`, who have made fewer collectives on the axis."""

    rank: int
    call: Call
    missing: tuple[int, ...]


def last_standing(beat: str | None, rank: int) -> Standing:
    """Of a rank that can be asked no more: that of its last beat."""
    return read_standing(json.loads(beat)[1]) if beat else Standing(f"rank {rank}", {}, {})


def read_standing(fields: dict[str, Any]) -> Standing:
    calls = {name: [Call(**call) for call in fields[name]] for name in ("calls", "waits")}
    return Standing(**fields | calls)


def find_waits(standings: Mapping[int, Standing]) -> list[Wait]:
    """The waits of these ranks that wait for one of these ranks."""
    waits = []
    for rank, standing in standings.items():
        for call in standing.waits:
            missing = tuple(
                other
                for other in standing.members[call.axis]
                if other in standings and standings[other].counts.get(call.axis, 0) < call.number
            )
            if missing:
                waits.append(Wait(rank, call, missing))
    return waits


def behind(waits: Sequence[Wait]) -> list[int]:
    """Ranks for whom others wait and who wait for nobody."""
    waiting = {wait.rank for wait in waits}
    return sorted({rank for wait in waits for rank in wait.missing} - waiting)


def _inside_a_step(waits: Sequence[Wait]) -> list[Wait]:
    """Those on the axes over which a step works.

    A rank that leaves out a collective of a step closes a circle, as soon as it reaches one of
    all ranks, which the others have not reached: that wait is no sign of who is behind.
    """
    return [wait for wait in waits if wait.call.axis.split()[0] not in ("peers", "world", "save")]


@dataclass(frozen=True)
class Fault:
    """Ranks that hold up the run, and how: "behind", "circle", or "alone" where nobody waits."""

    kind: str
    ranks: list[int]


def find_fault(standings: Mapping[int, Standing]) -> Fault | None:
    """Who holds up a run in which some rank has stood still for the time limit.

    None where all those that the others wait for are at work: they compute, write or hash.
    """
    waits = find_waits(standings)
    held = {rank for rank, standing in standings.items() if standing.holds_up}
    silent = [rank for rank, standing in standings.items() if standing.stack is None]
    if late := {*silent, *behind(waits)}:
        return Fault("behind", sorted(late & held)) if late & held else None
    if waits:
        circle = {wait.rank for wait in waits} & {rank for wait in waits for rank in wait.missing}
        skipped = behind(_inside_a_step(waits))
        fault = Fault("behind", skipped) if skipped else Fault("circle", sorted(circle))
        return fault if circle <= held else None
    idle = [rank for rank, standing in standings.items() if not standing.waits] or [*standings]
    return Fault("alone", idle) if held.issuperset(idle) else None


def explain(
    standings: Mapping[int, Standing], fault: Fault, reason: str, cure: str
) -> tuple[str, str]:
    """(one line, the whole message) on a run that `fault` holds up.

    cure: for ranks that may be at work after all, in one call that takes longer than the limit.
    """
    waits = find_waits(standings)
    names = _names(fault.ranks, standings)
    told = {
        "behind": f"{names} {'is' if len(fault.ranks) == 1 else 'are'} behind",
        "circle": f"{names} wait for each other",
        "alone": f"no rank waits for another; stacks of {names}",
    }
    headline = f"{reason}: {told[fault.kind]}"
    parts = [headline, *(_tell(rank, standings, waits) for rank in fault.ranks[:_SHOWN])]
    at_work = any(standings[rank].stack and not standings[rank].waits for rank in fault.ranks)
    return headline, "\n".join([*parts, cure] if at_work else parts)


def _names(ranks: Sequence[int], standings: Mapping[int, Standing]) -> str:
    names = [standings[rank].who for rank in ranks[:_SHOWN]]
    more = len(ranks) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _tell(rank: int, standings: Mapping[int, Standing], waits: Sequence[Wait]) -> str:
    """All that is known of one rank that is behind."""
    standing = standings[rank]
    lines = [standing.who] if len(standings) > 1 else []
    lines += [f"  {line}" for line in awaited(rank, standings, waits)]
    lines += [f"  it waits in {call}" for call in standing.waits]
    if standing.moves and standing.stack:
        lines.append(f"  it moves in Python, but was asked {standing.rounds} times in vain")
    if standing.stack is None:
        lines.append("  it does not answer: its process is stopped, or its host is gone")
        lines.append(f"  {whereabouts(standing)}")
    else:
        lines.append(standing.stack)
    return "\n".join(lines)


def awaited(rank: int, standings: Mapping[int, Standing], waits: Sequence[Wait]) -> list[str]:
    """Who waits for `rank`, a line for each collective."""
    lines: dict[Call, list[int]] = {}
    for wait in waits:
        if rank in wait.missing:
            lines.setdefault(wait.call, []).append(wait.rank)
    made = standings[rank].counts
    return [
        f"{listed(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {call}"
        + (f"; it has made {made.get(call.axis, 0)}" if standings[rank].stack else "")
        for call, ranks in lines.items()
    ]


def whereabouts(standing: Standing) -> str:
    """Where a rank that can no longer be asked was last."""
    if standing.waits:
        return f"at its last beat it was in {standing.waits[-1]}"
    if standing.calls:
        return f"at its last beat it was in Python, after {standing.calls[-1]}"
    return "at its last beat it was in Python, before its first collective"
