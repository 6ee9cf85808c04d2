"""Where the time of a turn goes, and how long communication is exposed.

On a GPU seconds are those of kernels. On a CPU communication is what gloo's threads are busy with
or wait for the other ranks in, all else the operators of the other threads.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Rank, Turn

Event = Mapping[str, Any]

COMMUNICATION = ("nccl", "gloo:")
OPERATORS = ("aten::", "mkldnn::")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_CPU = {"cpu_op", "user_annotation"}


def traced(turn: Turn, rank: Rank, file: Path) -> tuple[Any, Sequence[Event], float]:
    """(profiler, events, seconds) of one turn; the file is for chrome://tracing or Perfetto."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if rank.device_type == "cuda" else []
    with profile(activities=activities) as found:
        start = time.perf_counter()
        turn()
        rank.wait()
        whole = time.perf_counter() - start
    found.export_chrome_trace(str(file))
    return found, json.loads(file.read_text())["traceEvents"], whole


def write_profile(turn: Turn, rank: Rank, folder: Path, name: str) -> dict[str, Any]:
    """A trace of every rank, and of the first one torch's table of where its time goes."""
    folder.mkdir(parents=True, exist_ok=True)
    found, events, _ = traced(turn, rank, folder / f"{name}.{rank.rank}.json")
    if not rank.rank:
        order = f"self_{rank.device_type}_time_total"
        runs, exposed = (1e3 * each for each in communication(events))
        words = f"communication runs for {runs:.2f} ms, {exposed:.2f} of them exposed\n"
        table = found.key_averages().table(sort_by=order, row_limit=40)
        (folder / f"{name}.txt").write_text(table + words)
    return {}


def shares_by_axis(turn: Turn, rank: Rank, mesh: Any) -> dict[str, float]:
    """For each axis of several ranks "axis": the share of a turn in which it communicates or waits
    for its ranks, and "axis, exposed": in which nothing is computed beside that. gloo's events do
    not name their group: on a CPU there is none where several axes communicate."""
    axes, is_named = [axis for axis in mesh.axes if axis.size > 1], rank.device_type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        _, events, whole = traced(turn, rank, Path(folder, "trace.json"))
    found = {}
    for axis in axes if is_named or len(axes) == 1 else ():
        group = axis.group.group_name if is_named else ""
        runs, exposed = communication(events, group)
        found |= {axis.name: runs / whole, f"{axis.name}, exposed": exposed / whole}
    return found


def communication(events: Iterable[Event], group: str = "") -> tuple[float, float]:
    """(seconds in which communication runs, those of them in which it is exposed).

    events: "traceEvents" of a trace that torch's profiler has exported. Barriers do not count.
    group: name of the process group that counts alone.
    """
    timed = [each for each in events if each.get("ph") == "X" and "barrier" not in each["name"]]
    kernels = [each for each in timed if each.get("cat") in ON_GPU]
    timed = kernels or [each for each in timed if each.get("cat") in ON_CPU]
    own = [each for each in timed if each["name"].startswith(COMMUNICATION)]
    others = [each for each in timed if not each["name"].startswith(COMMUNICATION)]
    if not kernels:  # what holds other operators computes nothing itself
        others = [each for each in others if each["name"].startswith(OPERATORS)]
    if group:
        own = [each for each in own if each.get("args", {}).get("Process Group Name") == group]
    return seconds(own), seconds([*own, *others]) - seconds(others)


def seconds(events: Iterable[Event]) -> float:
    """In which any of them runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6
