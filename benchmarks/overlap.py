"""How long communication runs in a profiler's trace, and how long nothing else runs beside it.

On a GPU both are of kernels. On the CPU communication is what gloo's threads are busy with or wait
for the other ranks in, all else the operators of the other threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Interval = tuple[float, float]

COMMUNICATION = ("nccl", "gloo:")
OPERATORS = ("aten::", "mkldnn::")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_CPU = {"cpu_op", "user_annotation"}


def communication(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(seconds in which communication runs, those of them in which it is exposed).

    events: "traceEvents" of a trace that torch's profiler has exported.
    """
    # A barrier is the stopwatch's, and in no step.
    timed = [each for each in events if each.get("ph") == "X" and "barrier" not in each["name"]]
    places = ON_GPU if any(each.get("cat") in ON_GPU for each in timed) else ON_CPU
    timed = [each for each in timed if each.get("cat") in places]
    communicating = [each for each in timed if each["name"].startswith(COMMUNICATION)]
    own = union(intervals(communicating))
    computing = union(intervals(each for each in timed if is_computing(each, places)))
    # What is in either, less what computes.
    exposed = length(union([*own, *computing])) - length(computing)
    return length(own) / 1e6, exposed / 1e6


def is_computing(event: Mapping[str, Any], places: set[str]) -> bool:
    if places is ON_GPU:
        return not event["name"].startswith(COMMUNICATION)
    return event["name"].startswith(OPERATORS)


def intervals(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """In microseconds."""
    return [(float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in events]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same times, in order and none twice."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in spans)
