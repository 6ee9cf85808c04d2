"""Reading a checkpoint into the tensors of a run, whatever the two layouts are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron.checkpoint.format import (
    Box,
    box_of,
    damage,
    examine,
    overlap,
    read_manifest,
)
from megatron.checkpoint.resume import newest_readable
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec


@dataclass(frozen=True)
class TensorSlice:
    """This rank's slice of the logically whole tensor `key`, cut and padded as `spec` says."""

    key: str
    spec: ShardingSpec
    local: Tensor


def newest_whole(folders: Sequence[Path], mesh: Mesh) -> tuple[Path, dict[str, Any], list[str]]:
    """As `newest_readable`, but of the first whole one, of which every byte is read.

    Every rank calls this and gets the same; of `folders` those of the first rank hold for all.
    """

    def look(path: Path) -> tuple[dict[str, Any], str]:
        manifest, reason = examine(path)
        seen = mesh.control.gather((reason, manifest.get("checksum")))
        found = [each for each, _ in seen if each]
        if not found and len(set(seen)) > 1:
            found = [f"{path} is not the same on all ranks; it must be in a shared directory"]
        found = found or verify(path, mesh)
        return manifest, found[0] if found else ""

    return newest_readable(mesh.control.gather(list(folders))[0], look)


def verify(path: Path, mesh: Mesh) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank: each file is read by one of them."""
    manifest, reason = examine(path)
    share = (mesh.control.rank, mesh.control.size)
    found = mesh.control.gather([reason] if reason else damage(path, manifest, share))
    return list(dict.fromkeys(line for lines in found for line in lines))


def load(
    path: Path, slices: Iterable[TensorSlice], mesh: Mesh, *, verified: bool = False
) -> dict[str, Any]:
    """Fill every slice from the checkpoint at `path`, padding with zeros; return its manifest.

    verified: `verify` has found nothing just now. Raises FileNotFoundError where a file is missing,
    ValueError for a file that is damaged, a missing tensor or another shape.
    """
    manifest = read_manifest(path)
    if not verified and (found := verify(path, mesh)):
        raise ValueError(found[0])
    with ExitStack() as opened, torch.no_grad():
        files: dict[str, Any] = {}
        for each in slices:
            own = each.spec.local_slices
            each.local[len(each.spec.real(each.local)) :].zero_()
            for saved in _saved_slices(path, manifest, each):
                box, name = box_of(saved), saved["file"]
                if (common := overlap(box, own)) is None:
                    continue
                if name not in files:
                    files[name] = opened.enter_context(safe_open(path / name, "pt"))
                values = files[name].get_slice(each.key)[_within(common, box)]
                each.local[_within(common, own)].copy_(values)
    return manifest


def _saved_slices(
    path: Path, manifest: Mapping[str, Any], wanted: TensorSlice
) -> list[dict[str, Any]]:
    saved = manifest["tensors"].get(wanted.key)
    if saved is None:
        raise ValueError(f"{path} has no tensor {wanted.key}")
    if tuple(saved["shape"]) != wanted.spec.shape:
        raise ValueError(
            f"{path}: {wanted.key} is {saved['shape']}, this model's {list(wanted.spec.shape)}"
        )
    slices: list[dict[str, Any]] = saved["slices"]
    return slices


def _within(box: Box, outer: Box) -> Box:
    """The box in the coordinates of an outer one."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def load_weights(
    path: Path,
    weights: Iterable[TensorSlice],
    mesh: Mesh,
    *,
    missing: Collection[str] = (),
    surplus: Collection[str] = (),
    verified: bool = False,
) -> None:
    """Fill weights, keyed by parameter name, from a checkpoint at whatever precision: from its fp32
    masters where it has them, since the weights were rounded from those.

    missing: modules (first components of names) of this model that are left as they are, and that
    the checkpoint may not have. surplus: modules of the checkpoint that this model may not have.
    Raises ValueError, naming the weight, where names or shapes do not match otherwise.
    """
    saved = read_manifest(path)["tensors"]
    wanted = {each.key: each for each in weights if each.key.partition(".")[0] not in missing}
    found = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    if lacking := wanted.keys() - found:
        raise ValueError(f"{path} has no {min(lacking)}, which this model needs")
    if more := {name for name in found - wanted.keys() if name.partition(".")[0] not in surplus}:
        raise ValueError(f"{path} has {min(more)}, for which this model has no use")
    slices = [
        replace(each, key=key if (key := f"master.{name}") in saved else f"model.{name}")
        for name, each in wanted.items()
    ]
    load(path, slices, mesh, verified=verified)
