"""Where the time of a turn goes: by kinds of operators, and how long communication is exposed.

On a GPU seconds are those of kernels. On a CPU communication is what gloo's threads are busy with
or wait for the other ranks in, all else the operators of the other threads.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import Rank, Turn
from benchmarks.report import markdown

Event = Mapping[str, Any]
Interval = tuple[float, float]  # in microseconds

# The first that is found in the name of an operator, or on a GPU of a kernel, says its kind.
KINDS = {
    "communication": r"all_?reduce|all_?gather|reduce_scatter|broadcast|nccl|gloo|c10d",
    "attention": r"scaled_dot_product|flash|fmha|cudnn.*sdpa",
    "optimizer": r"adam",
    "layer norm": r"layer_?norm",
    "matmuls": r"mm\b|addmm|bmm|linear|gemm|matmul|cutlass|nvjet|xmma",
    "GeLU": r"gelu",
    "loss": r"softmax|cross_entropy|nll|_exp|\bexp|log\b",
    "embedding": r"embedding|index",
    "copies": r"copy|clone|\bcat|contiguous|_to\b|fill|zero|memcpy|memset",
    "additions and products": r"\badd|\bmul|\bsum|elementwise|reduce|\bsub|\bdiv",
    "other kernels of torch.compile": r"triton|cpp_fused",
}
COMMUNICATION = ("nccl", "gloo:")
OPERATORS = ("aten::", "mkldnn::")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_CPU = {"cpu_op", "user_annotation"}
STEP, AXIS = "one turn", "the axis "


def kind_of(operator: str) -> str:
    name = operator.lower().removeprefix("aten::")
    return next((kind for kind, found in KINDS.items() if re.search(found, name)), "all else")


def traced(turn: Callable[[], object], device_type: str, trace: Path) -> Any:
    """The profiler of one turn; its trace, for chrome://tracing or Perfetto, is in the file."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device_type == "cuda" else []
    with profile(activities=activities) as found:
        turn()
    found.export_chrome_trace(str(trace))
    return found


def write_profile(turn: Turn, rank: Rank, folder: Path, name: str) -> dict[str, Any]:
    """A trace of every rank, and of the first one tables of where its time goes."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name}.{rank.rank}.json"

    def whole() -> None:
        turn()
        rank.wait()

    found = traced(whole, rank.device_type, trace)
    if rank.rank:
        return {}
    kinds, operators = Counter[str](), []
    for event in found.key_averages():
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        if is_kernel != (rank.device_type == "cuda") or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if is_kernel else event.self_cpu_time_total
        kinds[kind_of(event.key)] += spent / 1e3
        operators.append((event.key, spent / 1e3, event.count))
    operators.sort(key=lambda each: -each[1])
    runs, exposed = communication(json.loads(trace.read_text())["traceEvents"])
    shares = [(kind, f"{ms:.2f}", f"{ms / kinds.total():.1%}") for kind, ms in kinds.most_common()]
    rows = [(operator, f"{ms:.2f}", calls) for operator, ms, calls in operators[:25]]
    parts = [
        f"# {name}",
        markdown(("", "ms", "share"), shares),
        f"Communication runs for {1e3 * runs:.2f} ms, {1e3 * exposed:.2f} of them exposed: nothing "
        "is computed beside it.",
        markdown(("operator", "ms", "calls"), rows),
    ]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    return {}


def communication(events: Iterable[Event]) -> tuple[float, float]:
    """(seconds in which communication runs, those of them in which it is exposed).

    events: "traceEvents" of a trace that torch's profiler has exported. Barriers do not count.
    """
    timed = [each for each in events if each.get("ph") == "X" and "barrier" not in each["name"]]
    places = ON_GPU if any(each.get("cat") in ON_GPU for each in timed) else ON_CPU
    timed = [each for each in timed if each.get("cat") in places]
    own = union(each for each in timed if each["name"].startswith(COMMUNICATION))
    computing = union(each for each in timed if is_computing(each, places))
    both = union([*as_events(own), *as_events(computing)])
    return length(own), length(both) - length(computing)


def is_computing(event: Event, places: set[str]) -> bool:
    if places is ON_GPU:
        return not event["name"].startswith(COMMUNICATION)
    return bool(event["name"].startswith(OPERATORS))


def as_events(spans: Iterable[Interval]) -> list[Event]:
    return [{"ts": start, "dur": stop - start} for start, stop in spans]


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
