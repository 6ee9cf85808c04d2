"""Finds the ranks that hold up a stalled run, from the reports of all ranks.

A rank in the nth collective of an axis waits for the ranks of its group that have started fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """A rank waits in the `number`-th collective of an axis; ranks: the members of its group."""

    axis: str
    number: int
    what: str
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"{self.axis}: {self.what}, number {self.number}"


@dataclass(frozen=True)
class Report:
    """The status of a rank.

    who: the rank, its coordinates and host. started: number of collectives started, by axis. idle:
    seconds without progress. number: counts this rank's reports. left: the exit status of a rank
    that waits for the others' end.
    """

    who: str
    step: int
    phase: str
    started: Mapping[str, int]
    waits: Sequence[Wait]
    idle: float
    number: int = 0
    left: int | None = None

    def describe(self) -> str:
        waits = "".join(f", in {wait}" for wait in self.waits)
        return f"step {self.step}, {self.phase}{waits}"


def find_behind(
    reports: Mapping[int, Report], silent: Collection[int], working: Collection[int]
) -> tuple[list[int], str]:
    """(ranks that hold up a stalled run, what they are); no ranks if these are working.

    silent: ranks that no longer report. working: ranks that make progress. A rank is behind if
    others wait for it and it waits for no other, or if it is silent. A rank that skipped a
    collective of a step closes a circle of waits as soon as it waits in a collective of all ranks:
    then waits of the control groups are ignored.
    """
    circle: set[int] = set()
    for ignored in ((), ("control", "save")):
        edges = {
            (rank, other)
            for rank, report in reports.items()
            for wait in report.waits
            if wait.axis not in ignored and rank not in silent
            for other in wait.ranks
            if reports[other].started.get(wait.axis, 0) < wait.number
        }
        waiting, awaited = {rank for rank, _ in edges}, {other for _, other in edges}
        if behind := (awaited - waiting) | {*silent}:
            return sorted(behind - {*working}), "behind"
        circle = circle or waiting & awaited
    if circle:
        found, what = sorted(circle), "waiting for each other"
    else:  # No rank is known to wait, as on GPUs, whose collectives do not block Python.
        done = {rank: (each.step, sum(each.started.values())) for rank, each in reports.items()}
        found, what = [rank for rank in reports if done[rank] == min(done.values())], "behind"
        if len(found) == len(reports):
            found = [rank for rank in reports if not reports[rank].waits] or found
            what = "not waiting for another rank"
    return ([], "") if {*working} & {*found} else (found, what)


def table(reports: Mapping[int, Report], behind: Collection[int], silent: Collection[int]) -> str:
    """The status of each rank, one per line; ranks that are behind are marked."""
    rows = [("", "rank", "step", "phase", "waits in (axis: collective)", "idle, s")]
    for rank, each in reports.items():
        mark, step, idle = "->" if rank in behind else "", str(each.step), f"{each.idle:.0f}"
        phase = f"{each.phase} (does not answer)" if rank in silent else each.phase
        waits = "; ".join(map(str, each.waits)) or "-"
        rows.append((mark, each.who, step, phase, waits, idle))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def name_ranks(reports: Mapping[int, Report], ranks: Sequence[int]) -> str:
    names = ", ".join(reports[rank].who for rank in ranks[:4])
    return names + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
