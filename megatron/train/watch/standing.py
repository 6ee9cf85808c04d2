"""Where this rank stands, read from torch's own recorder of collectives."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron.parallel.mesh import Mesh
from megatron.train.watch.blame import Call, Standing
from megatron.train.watch.movement import training_threads

Groups = Mapping[str, dist.ProcessGroup]

RECORDED = 64  # collectives that torch's recorder remembers; reading them takes 0.3 ms
_FRAMES = 30
# What is below a collective, and between modules, tells nothing.
_TORCH = ("torch/distributed/", "torch/nn/modules/")


def groups_of(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The groups in which the ranks of a run wait for each other, by axis.

    An axis that spans the run may share its group with others: the axes' names come first.
    """
    groups = {axis.name: axis.group for axis in (mesh.tensor, mesh.data) if axis.size > 1}
    others = {"peers": mesh.control.group, "world": dist.group.WORLD}
    known = {group.group_name for group in groups.values()}
    for name, group in others.items():
        if group is not None and group.group_name not in known:
            groups[name] = group
            known.add(group.group_name)
    return groups


def all_groups() -> list[dist.ProcessGroup]:
    """Those to which this rank belongs, oldest first."""
    return list(_world.pg_names)


def added(start: Sequence[dist.ProcessGroup]) -> dict[str, dist.ProcessGroup]:
    """The groups that were made after those of `start`: savers make them, to talk beside training.

    Every rank makes them in the same order, and so they have the same names.
    """
    later = [group for group in all_groups() if group not in start]
    return {f"save {number}" if number else "save": each for number, each in enumerate(later)}


def made(groups: Groups) -> dict[str, int]:
    """Collectives that this rank has begun, by axis."""
    return {
        axis: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for axis, group in groups.items()
    }


def stand(who: str, groups: Groups, *, with_stack: bool = False) -> Standing:
    counts = made(groups)
    calls, waits = _calls(groups, counts)
    return Standing(
        who=who,
        counts=counts,
        members={axis: dist.get_process_group_ranks(each) for axis, each in groups.items()},
        calls=calls,
        waits=waits,
        stack=stacks() if with_stack else None,
    )


def _calls(groups: Groups, counts: Mapping[str, int]) -> tuple[list[Call], list[Call]]:
    """(the latest call on each axis, oldest first; calls that have not come back).

    Where nothing was recorded, the last call on each axis may be one that waits: if it does, some
    peer has made fewer.
    """
    axes = {group.group_name: axis for axis, group in groups.items()}
    latest: dict[str, Call] = {}
    waits = []
    entries = _entries()
    if not entries:
        waits = [Call(axis, count, "not recorded") for axis, count in counts.items() if count]
    for entry in entries:
        axis = axes.get(entry["process_group"][0])
        if axis is None or entry["is_p2p"]:
            continue
        call = Call(axis, entry["collective_seq_id"], _describe(entry))
        latest.pop(axis, None)
        latest[axis] = call
        if not entry["retired"]:
            waits.append(call)
    return list(latest.values()), waits


def _entries() -> list[dict[str, Any]]:
    """What the recorders of gloo and NCCL remember, oldest first."""
    dumps = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # as this build of torch has them
    entries = []
    for name in dumps:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _describe(entry: Mapping[str, Any]) -> str:
    """`all_reduce of [4, 2] Float`."""
    name = str(entry["profiling_name"]).split(":")[-1]
    shapes = [
        f"{shape} {dtype}"
        for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    ]
    return f"{name} of {', '.join(shapes)}" if shapes else name


def stacks() -> str:
    """The Python stacks of the main thread, of one that saves, and of torch's own threads that
    run Python (the backward of a GPU does)."""
    frames = sys._current_frames()
    names = training_threads()
    known = {thread.ident for thread in threading.enumerate()}
    names |= {ident: "a thread of torch" for ident in frames if ident not in known}
    parts = []
    for ident, name in names.items():
        calls = traceback.extract_stack(frames.get(ident or 0)) if ident in frames else []
        parts.append(f"  {name}:\n{_format(calls)}")
    return "\n".join(parts)


def stack_of(error: BaseException) -> str:
    """Where the main thread was when its collective broke, and what torch said of it."""
    calls = _format(traceback.extract_tb(error.__traceback__))
    return f"  its main thread:\n{calls}\n  {type(error).__name__}: {error}"


def _format(calls: Sequence[traceback.FrameSummary]) -> str:
    told = [
        call for call in calls if not any(path in Path(call.filename).as_posix() for path in _TORCH)
    ]
    return "".join(traceback.format_list(told[-_FRAMES:])).rstrip()
