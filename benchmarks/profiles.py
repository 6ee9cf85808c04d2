"""Where the time of a turn goes, by kind, and how long communication is exposed.

On a GPU, seconds are those of kernels, copies and fills; the kernel's name decides its kind, see
megatron/train/profiling.py. On a CPU, they are those of operators, without the operators that they
call; communication is the time in which gloo's threads work or wait for other ranks.

Layer norms count as elementwise: compiled, they are fused with adjacent operators. "norm" is the
gradient norm.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import Column, Figures, Rank, Turn
from megatron.train.profiling import KINDS, ON_GPU, OTHER, SENDING, Event, kind_of, seconds

OPERATORS = ("aten::", "mkldnn::")
ON_CPU = {"cpu_op", "user_annotation"}
ON_HOST = {"cuda_runtime", "cuda_driver"}
TURN = "benchmarks: turn"

IDLE = "idle"


def traced(turn: Turn, rank: Rank, file: Path) -> tuple[Any, Sequence[Event], float]:
    """(profiler, events, seconds) of one turn; the file opens in chrome://tracing or Perfetto."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if rank.device_type == "cuda" else []
    if rank.device_type == "cuda":  # the first trace of a process starts slowly
        with profile(activities=activities):
            turn()
    with profile(activities=activities) as found, record_function(TURN):
        start = time.perf_counter()
        turn()
        rank.wait()
        whole = time.perf_counter() - start
    found.export_chrome_trace(str(file))
    return found, json.loads(file.read_text())["traceEvents"], whole


def write_profile(turn: Turn, rank: Rank, folder: Path, name: str, wall: float) -> Figures:
    """Write a trace of every rank and, for the first one, torch's table of operators. wall, and the
    returned figures: see by_kind."""
    folder.mkdir(parents=True, exist_ok=True)
    found, events, _ = traced(turn, rank, folder / f"{name}.{rank.rank}.json")
    if not rank.rank:
        order = f"self_{rank.device_type}_time_total"
        runs, exposed = (1e3 * each for each in communication(events))
        words = f"communication runs for {runs:.2f} ms, {exposed:.2f} of them exposed\n"
        table = found.key_averages().table(sort_by=order, row_limit=40)
        (folder / f"{name}.txt").write_text(table + words)
    return by_kind(events, wall)


def shares_by_axis(turn: Turn, rank: Rank, mesh: Any) -> dict[str, float]:
    """For each axis with several ranks, "axis": the share of a turn in which it communicates or
    waits for its ranks; "axis, exposed": the same without time in which anything computes. gloo's
    events do not name their group: on a CPU the result is empty if several axes communicate."""
    axes, is_named = [axis for axis in mesh.axes if axis.size > 1], rank.device_type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        _, events, whole = traced(turn, rank, Path(folder, "trace.json"))
    found = {}
    for axis in axes if is_named or len(axes) == 1 else ():
        group = axis.group.group_name if is_named else ""
        runs, exposed = communication(events, group)
        found |= {axis.name: runs / whole, f"{axis.name}, exposed": exposed / whole}
    return found


def by_kind(events: Iterable[Event], wall: float) -> Figures:
    """Figures from a trace of `traced`. wall: seconds of a turn that was not traced.

    device_ms: milliseconds by kind; streams add up. idle: wall time in which nothing runs (on a
    CPU, of the trace). A GPU also has launches: number of kernels, copies and fills; reads: copies
    to the host; host_ms: time from the start of the turn to the last launch, without copies and
    synchronisation, in which the host waits, but with the profiler's own work; copies_ms: time in
    which it copies from or to the host; hidden_copies_ms: the part of it in which kernels run, too.
    """
    timed = [each for each in events if each.get("ph") == "X"]
    kernels = [each for each in timed if each.get("cat") in ON_GPU]
    own: Iterable[tuple[str, float]] = ((each["name"], float(each["dur"])) for each in kernels)
    start, whole = next(
        (float(each["ts"]), float(each["dur"]))
        for each in timed
        if each["name"] == TURN and each["cat"] == "user_annotation"
    )
    running, figures = kernels, Figures()
    if not kernels:
        running = [e for e in timed if e.get("cat") in ON_CPU and is_operator(e["name"])]
        own, wall = of_operators(timed), whole / 1e6
    milliseconds: dict[str, float] = defaultdict(float)
    for name, microseconds in own:
        milliseconds[kind_of(name)] += microseconds / 1e3
    milliseconds[IDLE] = 1e3 * (wall - seconds(running))
    if kernels:
        calls = [each for each in timed if each.get("cat") in ON_HOST]
        launch = [float(e["ts"]) for e in calls if re.search("Launch|Memcpy|Memset", e["name"])]
        waits = [e for e in calls if re.search("Memcpy|Synchronize", e["name"])]
        waited = 1e3 * seconds(each for each in waits if float(each["ts"]) < max(launch))
        reads = sum(each["name"].startswith("Memcpy DtoH") for each in kernels)
        host = (max(launch) - start) / 1e3 - waited
        figures = {"launches": len(kernels), "reads": reads, "host_ms": host}
        copies = [each for each in kernels if re.match("Memcpy (DtoH|HtoD)", each["name"])]
        alone = exposed(copies, [each for each in kernels if each["cat"] == "kernel"])
        figures["copies_ms"] = 1e3 * seconds(copies)
        figures["hidden_copies_ms"] = figures["copies_ms"] - 1e3 * alone
    return figures | {"device_ms": dict(milliseconds)}


def is_operator(name: str) -> bool:
    return ("::" in name and not name.startswith("autograd::")) or name.startswith(SENDING)


def of_operators(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """(name, microseconds without the operators that it calls) of each operator on a CPU."""
    own = [each for each in events if each.get("cat") in ON_CPU]
    own.sort(key=lambda each: (each["tid"], float(each["ts"]), -float(each["dur"])))
    for _, of_thread in groupby(own, key=lambda each: each["tid"]):
        found: list[list[Any]] = []  # [name, end, microseconds]
        open_calls: list[list[Any]] = []
        for each in of_thread:
            start, length = float(each["ts"]), float(each["dur"])
            while open_calls and open_calls[-1][1] <= start:
                open_calls.pop()
            if open_calls:
                open_calls[-1][2] -= length
            open_calls.append([each["name"], start + length, length])
            found.append(open_calls[-1])
        yield from ((name, length) for name, _, length in found if is_operator(name))


def communication(events: Iterable[Event], group: str = "") -> tuple[float, float]:
    """(seconds in which communication runs, seconds of these in which it is exposed).

    events: "traceEvents" of a trace exported by torch's profiler. Barriers do not count.
    group: name of the only process group to count; "" counts all.
    """
    timed = [each for each in events if each.get("ph") == "X" and "barrier" not in each["name"]]
    kernels = [each for each in timed if each.get("cat") in ON_GPU]
    timed = kernels or [each for each in timed if each.get("cat") in ON_CPU]
    own = [each for each in timed if each["name"].startswith(SENDING)]
    others = [each for each in timed if not each["name"].startswith(SENDING)]
    if not kernels:  # events that only contain other operators compute nothing themselves
        others = [each for each in others if each["name"].startswith(OPERATORS)]
    if group:
        own = [each for each in own if each.get("args", {}).get("Process Group Name") == group]
    return seconds(own), exposed(own, others)


def exposed(own: Sequence[Event], others: Sequence[Event]) -> float:
    """Seconds in which at least one of `own` runs, and none of the others."""
    return seconds([*own, *others]) - seconds(others)


def kind_column(kind: str) -> Column:
    return Column(f"{kind}, ms", lambda own, _: own["device_ms"][kind], "{:.2f}")


COLUMNS = (  # for a question whose turns are profiled
    *(kind_column(kind) for kind in (*sorted({kind for kind, _ in KINDS}), OTHER, IDLE)),
    Column("launches", "launches", "{:,.0f}"),
    Column("host, ms", "host_ms", "{:.2f}"),
    Column("reads", "reads", "{:g}"),
    Column("copies from or to the host, ms", "copies_ms", "{:.1f}"),
    Column("beside kernels, ms", "hidden_copies_ms", "{:.1f}"),
)
