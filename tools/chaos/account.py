"""Where the time of a disturbed run went: from events to spans, which add up to the wall seconds.

The spans are those of rank 0. They follow each other without a gap, from the first start to the end
of the last rank:

    first start   until the first step may begin
    steps         whose updates are in the final weights, each where it was computed last
    evaluation    of these weights
    save          during which the run waits for a checkpoint
    repeated      steps and evaluations that were lost, and the part that a fault cut off
    stopped       while a fault stopped a rank that went on afterwards; a slow rank's are steps
    detection     from the fault to the end of the last rank, without steps and saves that are kept
    restart       from there until the event "start": the queue and imports; this project's ranks
                  write it when the callbacks are made, with data and process groups there
    load          until the event "loaded": the model is built and the checkpoint read
    end           after the last step and save
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from statistics import mean
from typing import Any, NamedTuple

from tools.chaos.supervise import Event, History, Ranks, Row, phase_of

KINDS = (
    "first start", "steps", "evaluation", "save", "repeated", "stopped", "detection", "restart",
    "load", "end",
)  # fmt: skip
USEFUL = ("steps", "evaluation")
TIMES = ("begin", "until", "over")  # of a row, on the clock of the machine


class Span(NamedTuple):
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class _Life:
    """The ranks from a start to their end, with what rank 0 did. loaded: the step that they started
    from, None if they did not get there. final: the last step of theirs that is in the weights."""

    ranks: Ranks
    events: Sequence[Event]
    loaded: int | None
    final: float


def lives(history: History) -> list[_Life]:
    found, final = list[_Life](), float("inf")
    times = [event["time"] for event in history.events]
    for ranks in reversed(history.generations):
        local = history.events[bisect_left(times, ranks.begin) : bisect_left(times, ranks.end)]
        loaded = next((each["step"] for each in local if each["event"] == "loaded"), None)
        found.append(_Life(ranks, local, loaded, final))
        final = final if loaded is None else min(final, loaded)
    return found[::-1]


def spans(history: History, every: Sequence[_Life]) -> list[Span]:
    is_hold = [row.kind == "stop" and not row.ended for row in history.rows]
    held = [(row.begin, row.until) for row in compress(history.rows, is_hold)]
    whole = [span for number, life in enumerate(every) for span in _of_life(life, number == 0)]
    parts = [part for span in whole for part in _cut(span, held)]
    kinds = groupby((part for part in parts if part.end > part.begin), key=lambda part: part.kind)
    joined = [(kind, [*group]) for kind, group in kinds]
    return [Span(kind, group[0].begin, group[-1].end) for kind, group in joined]


def _cut(span: Span, held: Sequence[tuple[float, float]]) -> Iterator[Span]:
    """The span in parts: time in which a rank was held up is of another kind."""
    at = span.begin
    if span.kind in ("steps", "evaluation", "save"):
        for begin, until in held:
            begin, until = max(begin, at), min(until, span.end)
            if begin < until:
                yield Span(span.kind, at, begin)
                yield Span("stopped", begin, until)
                at = until
    yield Span(span.kind, at, span.end)


def _of_life(life: _Life, is_first: bool) -> Iterator[Span]:
    at, ranks = life.ranks.begin, life.ranks
    is_built, is_open = False, ""  # the evaluation or save that has begun
    for event in life.events:
        kind, name, time = "", event["event"], event["time"]
        if name == "fault":
            continue  # an answer of the probe, in the middle of another phase
        is_cut = bool(is_open) and (name != is_open or event.get("at") != "end")
        kept = event.get("step", 0) <= life.final
        if name == "start" and not is_built:
            kind, is_built = "restart", True
        elif name == "loaded":
            kind = "load"
        elif name == "step" or (name in ("evaluation", "save") and event["at"] == "begin"):
            kind = "steps" if kept else "repeated"
        elif name == "evaluation":
            kind = "evaluation" if kept else "repeated"
        elif name in ("save", "end"):
            kind = "save" if name == "save" else "end"
        if is_cut and kind:  # it was cut short, and what it did is in no weights
            kind = "repeated"
        if kind:
            is_open = name if event.get("at") == "begin" else ""
            is_start = is_first and kind in ("restart", "load")
            yield Span("first start" if is_start else kind, at, time)
            at = time
    if ranks.fault is None:
        yield Span("end", at, ranks.end)
        return
    fault = max(at, ranks.fault)
    start = "first start" if is_first else "restart"
    yield Span("repeated" if life.loaded is not None else start, at, fault)
    yield Span("detection", fault, ranks.end)


def account(history: History) -> dict[str, Any]:
    """The figures of the report: seconds by kind, which add up to "wall_seconds", and a row for
    each fault and each kind of fault."""
    every, begin = lives(history), history.generations[0].begin
    found = spans(history, every)
    wall = history.generations[-1].end - begin
    seconds = {kind: sum(s.end - s.begin for s in found if s.kind == kind) for kind in KINDS}
    rows = [_row(row, every) for row in history.rows]
    useful = sum(seconds[kind] for kind in USEFUL)
    cold = _to_step(every[0])
    return {
        "wall_seconds": wall,
        "useful_seconds": useful,
        "useful_share": useful / wall,
        "seconds": seconds,
        "steps_repeated": sum(row["steps_repeated"] or 0 for row in rows),
        "cold_start_seconds": cold,
        "start_seconds": [e["seconds"] for e in history.events if e["event"] == "started"],
        "faults": rows,
        "by_kind": by_kind(rows, cold),
        "unnamed": [
            row["number"]
            for row in rows
            if row["ended"] and row["is_named"] and row["cause"] is None
        ],
        "not_injected": history.not_injected,
        "spans": [[s.kind, s.begin - begin, s.end - begin] for s in found],
    }


def _to_step(life: _Life) -> float | None:
    """Seconds from the start to the end of the first step."""
    steps = (each["time"] for each in life.events if each["event"] == "step")
    first = next(steps, None)
    return None if first is None else first - life.ranks.begin


def _row(row: Row, every: Sequence[_Life]) -> dict[str, Any]:
    place = next(n for n, life in enumerate(every) if row.begin <= life.ranks.end)
    life, later = every[place], every[place + 1 :]
    before = [each for each in life.events if each["time"] <= row.begin]
    restarted = next((each for each in later if each.loaded is not None), None)
    done = [each["step"] for each in life.events if each["event"] == "step"]
    again = restart = first = None
    if row.ended and restarted is not None and restarted.loaded is not None:
        again = max(0, max(done, default=life.loaded or 0) - restarted.loaded)
        times = (each["time"] for each in restarted.events if each["event"] == "loaded")
        restart, first = next(times) - row.over, _to_step(restarted)
        first = None if first is None else first + restarted.ranks.begin - row.over
    return {
        **{key: value for key, value in vars(row).items() if key not in TIMES},
        "seconds": row.begin - every[0].ranks.begin,
        "phase": phase_of(before[-1] if before else None),
        "step": max((each["step"] for each in before if "step" in each), default=None),
        "detection_seconds": row.over - row.begin if row.ended else None,
        "restart_seconds": restart,
        "first_step_seconds": first,
        "steps_repeated": again,
    }


FIGURES = ("detection_seconds", "restart_seconds", "steps_repeated", "first_step_seconds")


def by_kind(rows: Sequence[Mapping[str, Any]], cold: float | None) -> list[dict[str, Any]]:
    """For each kind of fault the mean and the largest of each figure."""
    kinds = []
    for label in dict.fromkeys(row["label"] for row in rows):
        of_kind = [row for row in rows if row["label"] == label]
        facts: dict[str, Any] = {"label": label, "count": len(of_kind)}
        facts["ended"] = sum(row["ended"] for row in of_kind)
        for figure in FIGURES:
            values = [row[figure] for row in of_kind if row[figure] is not None]
            facts[figure] = {"mean": mean(values), "largest": max(values)} if values else None
        first = facts["first_step_seconds"]
        facts["restart_over_cold_start"] = first["mean"] / cold if first and cold else None
        kinds.append(facts)
    return kinds
