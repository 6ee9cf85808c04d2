"""How a run starts: from scratch, from a checkpoint, or from the weights of one."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.config.resume import Start, examine, no_whole_one
from megatron.parallel.mesh import Mesh
from megatron.train.checkpoint import verify
from megatron.train.state import TrainState


def begin(
    state: TrainState, start: Start, check: Callable[[Path, Mapping[str, Any]], None]
) -> list[str]:
    """Take up the newest checkpoint of `start` that every rank finds whole, byte for byte.

    check: raises where the run of (folder, manifest) is another one than this.
    Returns what the user should know: where the run starts, what was passed over and why.
    """
    if not start.folders:
        return ["starting from scratch"]
    path, manifest, passed_over = newest_whole(start.folders, state.mesh)
    news = [f"passed over: {reason}" for reason in passed_over]
    check(path, manifest)
    if start.finetune:
        state.load_weights(path, verified=True)
        return [*news, f"starting at step 0 from the weights of {path}"]
    state.load(path, verified=True)
    differences = _differences(manifest["environment"], environment(state.mesh))
    return [*news, f"going on from {path}", *differences]


def newest_whole(folders: Sequence[Path], mesh: Mesh) -> tuple[Path, dict[str, Any], list[str]]:
    """(folder, manifest, what is wrong with each that was passed over) of the first whole one.

    Every rank calls this and gets the same. Raises ValueError with every reason where there is
    none.
    """
    reasons: list[str] = []
    for path in folders:
        manifest, reason = examine(path)
        found = [each for each in mesh.peers.gather(reason) if each] or verify(path, mesh)
        if not found:
            return path, manifest, reasons
        reasons.append(found[0])
    raise ValueError(no_whole_one(reasons))


def environment(mesh: Mesh) -> dict[str, Any]:
    """What decides the last bits of a sum, beside the program: kept in every checkpoint."""
    device = mesh.device
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "layout": {axis.name: axis.size for axis in (mesh.data, mesh.tensor)},
    }


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
        "the last bits may differ from those of an undisturbed run"
        for name in ("torch", "threads", "device", "layout")
        if saved[name] != now[name]
    ]
