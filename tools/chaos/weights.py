"""The arrays of a run's newest checkpoint, and those of two runs compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import read_manifest, step_folders

Weights = Callable[[Path], Mapping[str, Any]]
SHOWN = 8  # names of arrays that differ


def newest(save: Path) -> Mapping[str, Any] | None:
    """{name: tensor} of the newest checkpoint of megatron/, whole at any layout, with moments and
    counters; None without one."""
    import torch
    from safetensors import safe_open

    if not (folders := step_folders(save)):
        return None
    manifest, whole = read_manifest(folders[0]), dict[str, Any]()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(safe_open(folders[0] / name, "pt"))
            for name in manifest["files"]
            if name.endswith(".safetensors")
        }
        for key, facts in manifest["tensors"].items():
            for each in facts["slices"]:
                part = files[each["file"]].get_tensor(each.get("tensor", key))
                whole.setdefault(key, part.new_empty(facts["shape"]))
                box = zip(each["offset"], each["shape"], strict=True)
                whole[key][tuple(slice(at, at + size) for at, size in box)] = part
    return whole | {"step": torch.tensor(int(folders[0].name.rpartition("_")[2]))}


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """Whether all arrays are equal: in every bit with a tolerance of 0, else up to a difference
    whose norm is this part of theirs; whole numbers always in every bit."""
    import torch

    differences: dict[str, float] = {}
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = (torch.as_tensor(x[name]) if name in x else None for x in (ours, theirs))
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            differences[name] = float("inf")
        elif a.reshape(-1).view(torch.uint8).ne(b.reshape(-1).view(torch.uint8)).any():
            is_real, a, b = a.is_floating_point(), a.double(), b.double()
            norm = b.norm().item() if is_real else 0.0
            differences[name] = (a - b).norm().item() / norm if norm else float("inf")
    beyond = {name: each for name, each in differences.items() if not each <= tolerance}
    beyond = beyond if tolerance else differences
    return {
        "equal": bool(ours) and not beyond,
        "arrays": len(ours.keys() | theirs.keys()),
        "tolerance": tolerance,
        "largest": max(differences.values(), default=0.0),
        "differ": sorted(beyond, key=lambda name: -beyond[name])[:SHOWN],
    }
