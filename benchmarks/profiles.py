"""Where the time of a turn goes, and how long communication is exposed.

On a GPU seconds are those of kernels. On a CPU communication is what gloo's threads are busy with
or wait for the other ranks in, all else the operators of the other threads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import Rank, Turn

Event = Mapping[str, Any]
Interval = tuple[float, float]  # in microseconds

COMMUNICATION = ("nccl", "gloo:")
OPERATORS = ("aten::", "mkldnn::")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_CPU = {"cpu_op", "user_annotation"}
STEP, AXIS = "one turn", "the axis "


def traced(turn: Callable[[], object], device_type: str, trace: Path) -> Any:
    """The profiler of one turn; its trace, for chrome://tracing or Perfetto, is in the file."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device_type == "cuda" else []
    with profile(activities=activities) as found:
        turn()
    found.export_chrome_trace(str(trace))
    return found


def write_profile(turn: Turn, rank: Rank, folder: Path, name: str) -> dict[str, Any]:
    """A trace of every rank, and of the first one torch's table of where its time goes."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name}.{rank.rank}.json"
    found = traced(lambda: (turn(), rank.wait()), rank.device_type, trace)
    if not rank.rank:
        order = f"self_{rank.device_type}_time_total"
        runs, exposed = communication(json.loads(trace.read_text())["traceEvents"])
        said = f"communication runs for {1e3 * runs:.2f} ms, {1e3 * exposed:.2f} of them exposed\n"
        table = found.key_averages().table(sort_by=order, row_limit=40)
        (folder / f"{name}.txt").write_text(table + said)
    return {}


def communication(events: Iterable[Event]) -> tuple[float, float]:
    """(seconds in which communication runs, those of them in which it is exposed).

    events: "traceEvents" of a trace that torch's profiler has exported. Barriers do not count.
    """
    timed = [each for each in events if each.get("ph") == "X" and "barrier" not in each["name"]]
    places = ON_GPU if any(each.get("cat") in ON_GPU for each in timed) else ON_CPU
    timed = [each for each in timed if each.get("cat") in places]
    own = [each for each in timed if each["name"].startswith(COMMUNICATION)]
    others = [each for each in timed if not each["name"].startswith(COMMUNICATION)]
    if places is ON_CPU:  # what holds other operators computes nothing itself
        others = [each for each in others if each["name"].startswith(OPERATORS)]
    return length(union(own)), length(union([*own, *others])) - length(union(others))


def union(events: Iterable[Event]) -> list[Interval]:
    """The time that any of them takes, in order and none twice."""
    found: list[Interval] = []
    for start, stop in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Interval]) -> float:
    """Seconds."""
    return sum(stop - start for start, stop in spans) / 1e6


def shares_by_axis(turn: Turn, rank: Rank, mesh: Any) -> dict[str, tuple[float, float]]:
    """By axis of several ranks: the share of a turn in which the axis communicates or waits for
    its ranks, and in which nothing is computed beside that.

    On a GPU every collective's kernel names its process group. gloo's events do not, but each of
    its groups has threads of its own: before the turn each axis is used under its name.
    """
    axes = [axis for axis in mesh.axes if axis.size > 1]

    def whole() -> None:
        for axis in axes:
            with record_function(f"{AXIS}{axis.name}"):
                # More calls at a time than gloo has threads, and none over before the next begins.
                tensors = [torch.zeros(2**16, device=mesh.device) for _ in range(8)]
                for work in [dist.all_reduce(x, group=axis.group, async_op=True) for x in tensors]:
                    work.wait()
            rank.wait()
        with record_function(STEP):
            turn()
            rank.wait()

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        traced(whole, rank.device_type, trace)
        events = json.loads(trace.read_text())["traceEvents"]
    return by_axis(events, {axis.group.group_name: axis.name for axis in axes})


def by_axis(events: Sequence[Event], groups: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """As of shares_by_axis. groups: {name of the process group: of its axis}."""
    timed = [each for each in events if each.get("ph") == "X"]
    threads = {
        each["tid"]: axis
        for axis in groups.values()
        for each in inside(timed, spans(timed, f"{AXIS}{axis}"))
        if each["name"].startswith(COMMUNICATION)
    }
    turns = spans(timed, STEP)
    during = inside(timed, turns)
    calls = [each for each in during if each["name"].startswith(COMMUNICATION)]
    others = [each for each in during if not each["name"].startswith(COMMUNICATION)]

    def axis_of(event: Event) -> str | None:
        group = event.get("args", {}).get("Process Group Name")
        return threads.get(event["tid"]) if group is None else groups.get(group)

    found = {}
    for axis in groups.values():
        seen = communication([*others, *(each for each in calls if axis_of(each) == axis)])
        found[axis] = (seen[0] / length(turns), seen[1] / length(turns))
    return found


def spans(events: Sequence[Event], name: str) -> list[Interval]:
    """Of what ran on the host under this name."""
    return union(e for e in events if e["name"] == name and e.get("cat") == "user_annotation")


def inside(events: Sequence[Event], within: Sequence[Interval]) -> list[Event]:
    return [each for each in events if any(start <= each["ts"] < stop for start, stop in within)]
