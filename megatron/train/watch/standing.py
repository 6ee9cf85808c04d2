"""Where this rank stands, read from torch's own recorder of collectives."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh
from megatron.train.watch.blame import Call, Standing

Groups = Mapping[str, dist.ProcessGroup]

RECORDED = 64  # collectives that torch's recorder remembers; reading them takes 0.3 ms
_FRAMES = 30
_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"  # what is below a collective tells nothing


def groups_of(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The groups in which the ranks of a run wait for each other, by axis.

    An axis that spans the run may share its group with others: the axes' names come first.
    """
    groups = {axis.name: axis.group for axis in (mesh.tensor, mesh.data) if axis.size > 1}
    others = {"peers": mesh.peers.group, "world": dist.group.WORLD}
    known = {group.group_name for group in groups.values()}
    for name, group in others.items():
        if group is not None and group.group_name not in known:
            groups[name] = group
            known.add(group.group_name)
    return groups


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
    """The Python stack of the main thread, and of torch's own threads that run Python (the
    backward of a GPU does)."""
    main = threading.main_thread().ident
    known = {thread.ident for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == main or ident not in known:
            name = "its main thread" if ident == main else "a thread of torch"
            calls = [c for c in traceback.extract_stack(frame) if _TORCH not in c.filename]
            lines = "".join(traceback.format_list(calls[-_FRAMES:])).rstrip()
            parts.append((ident != main, f"  {name}:\n{lines}"))
    return "\n".join(text for _, text in sorted(parts))
