"""How long a step communicates along each axis, from the profiler's trace.

On a GPU every collective's kernel names its process group. gloo's events do not, but each of its
groups has threads of its own: in front of every step each axis is used under its name, which tells
the threads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from benchmarks.overlap import COMMUNICATION, Interval, communication
from benchmarks.profiles import profiled
from benchmarks.turns import Stopwatch
from megatron.parallel.mesh import Axis, Mesh

Event = Mapping[str, Any]
STEP, AXIS = "a training step", "the axis "
CALLS = 8  # at a time: more than gloo has threads for a group
NUMBERS = 2**16  # so many that no thread is done before the next one begins


def profile_steps(mesh: Mesh, watch: Stopwatch, steps: int) -> dict[str, Any]:
    """Seconds of a step in this rank's trace, and by axis those in which it communicates and
    those in which nothing is computed beside that."""
    axes = [axis for axis in (mesh.tensor, mesh.data) if axis.size > 1]
    names = {axis.group.group_name: axis.name for axis in axes}

    def step() -> None:
        for axis in axes:
            use(axis, mesh.device)
            watch.wait()
        with record_function(STEP):
            watch.time(1)

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled(step, steps, trace, mesh.device.type)
        return by_axis(json.loads(trace.read_text())["traceEvents"], names)


def use(axis: Axis, device: torch.device) -> None:
    """All threads of the axis's group, and nothing else, under its name."""
    with record_function(f"{AXIS}{axis.name}"):
        tensors = [torch.zeros(NUMBERS, device=device) for _ in range(CALLS)]
        for work in [dist.all_reduce(each, group=axis.group, async_op=True) for each in tensors]:
            work.wait()


def by_axis(events: Sequence[Event], groups: Mapping[str, str]) -> dict[str, Any]:
    """events: "traceEvents" of a trace. groups: {name of the process group: of its axis}."""
    timed = [each for each in events if each.get("ph") == "X"]
    steps = spans(timed, STEP)
    threads = {
        each["tid"]: axis
        for axis in groups.values()
        for span in spans(timed, f"{AXIS}{axis}")
        for each in inside(timed, [span])
        if each["name"].startswith(COMMUNICATION)
    }

    def axis_of(event: Event) -> str | None:
        group = event.get("args", {}).get("Process Group Name")
        return threads.get(event["tid"]) if group is None else groups.get(group)

    seconds = sum(stop - start for start, stop in steps) / 1e6
    found: dict[str, Any] = {"step_seconds": seconds / len(steps)}
    during = inside(timed, steps)
    computing = [each for each in during if not each["name"].startswith(COMMUNICATION)]
    calls = [each for each in during if each["name"].startswith(COMMUNICATION)]
    for axis in groups.values():
        own = [each for each in calls if axis_of(each) == axis]
        runs, exposed = communication([*computing, *own])
        found[axis] = {"seconds": runs / len(steps), "exposed_seconds": exposed / len(steps)}
    return found


def spans(events: Sequence[Event], name: str) -> list[Interval]:
    """In microseconds, of what ran on the host under this name."""
    return [
        (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each["name"] == name and each.get("cat") == "user_annotation"
    ]


def inside(events: Sequence[Event], within: Sequence[Interval]) -> list[Event]:
    return [each for each in events if any(start <= each["ts"] < stop for start, stop in within)]
