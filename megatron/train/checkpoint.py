"""Checkpoints that know nothing of the layout they were saved at.

    SAVE/latest                                  name of the newest complete one
    SAVE/step_00000100/manifest.json             settings, counters, every tensor and its slices
    SAVE/step_00000100/shard_00000.safetensors   the slices that one rank wrote

A tensor is logically whole: its slices tile the true shape, without padding. A rank that loads
reads what overlaps its own part, at any layout. A checkpoint is written beside its final name and
renamed when everything is on disk. safetensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh

FORMAT = 1
Place = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """This rank's part of the logically whole tensor `key`, laid out as `layout` says."""

    key: str
    layout: Layout
    local: Tensor


def save(
    directory: str | Path,
    step: int,
    pieces: Iterable[Piece],
    facts: Mapping[str, Any],
    mesh: Mesh,
) -> Path:
    """Write SAVE/step_XXXXXXXX with every tensor and `facts` (JSON); every rank calls this.

    Each part is written once, by the first of the ranks that hold it. Needs a directory that all
    ranks see.
    """
    final = Path(directory) / f"step_{step:08d}"
    staging = final.with_name(f".{final.name}.partial")
    if mesh.is_first:
        _clean_up(final)
        staging.mkdir(parents=True)
    _barrier(mesh)
    summaries = _gather(_write_shard(staging, pieces, mesh), mesh)
    if mesh.is_first:
        _write_json(staging / "manifest.json", _manifest(summaries, facts))
        _replace_folder(final, staging)
        _put_in_place(Path(directory) / "latest", final.name)
    _barrier(mesh)
    return final


def _write_shard(staging: Path, pieces: Iterable[Piece], mesh: Mesh) -> dict[str, Any]:
    """Write this rank's slices; return what the manifest says of them."""
    own: dict[str, Tensor] = {}
    tensors: dict[str, dict[str, Any]] = {}
    name = f"shard_{mesh.tensor.rank:05d}.safetensors"
    for piece in pieces:
        real = piece.layout.real(piece.local)
        cut = {axis.name for _, axis in piece.layout.cuts}
        holders = [axis for axis in (mesh.data, mesh.tensor) if axis.name not in cut]
        if real.numel() == 0 or any(axis.rank for axis in holders):
            continue
        own[piece.key] = real.contiguous()
        offset = [part.start for part in piece.layout.place]
        tensors[piece.key] = {
            "dtype": str(real.dtype).removeprefix("torch."),
            "shape": list(piece.layout.shape),
            "slices": [{"file": name, "offset": offset, "shape": list(real.shape)}],
        }
    if not own:
        return {"files": {}, "tensors": {}}
    save_file(own, staging / name)
    (staging / name).chmod(0o644)  # like every other file: the library leaves it to its owner
    _sync(staging / name)
    return {"files": {name: _file_facts(staging / name)}, "tensors": tensors}


def _manifest(summaries: list[dict[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for summary in summaries:
        files |= summary["files"]
        for key, tensor in summary["tensors"].items():
            if key in tensors:
                tensors[key]["slices"] += tensor["slices"]
            else:
                tensors[key] = tensor
    _check_tiling(tensors)
    return {"format": FORMAT, **facts, "files": files, "tensors": tensors}


def _check_tiling(tensors: Mapping[str, Any]) -> None:
    """The slices of each tensor cover it exactly once."""
    for key, tensor in tensors.items():
        places = [_place(each) for each in tensor["slices"]]
        covered = sum(prod(each["shape"]) for each in tensor["slices"])
        overlap = any(_overlap(one, other) for i, one in enumerate(places) for other in places[:i])
        if overlap or covered != prod(tensor["shape"]):
            raise ValueError(f"checkpoint: the slices of {key} do not cover it exactly once")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint directory, checked for completeness."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, only {FORMAT} is read here")
        _check_tiling(manifest["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'manifest.json'} is damaged: {error!r}") from error
    for name, facts in manifest["files"].items():
        size = (path / name).stat().st_size
        if size != facts["bytes"]:
            raise ValueError(f"{path / name}: {size} bytes, its manifest says {facts['bytes']}")
    return manifest


def load(path: Path, pieces: Iterable[Piece], mesh: Mesh) -> dict[str, Any]:
    """Fill every piece from the checkpoint at `path`; return its manifest.

    A missing tensor, another shape or a file that does not match its checksum is a ValueError.
    """
    manifest = read_manifest(path)
    _verify_files(path, manifest, mesh)
    for piece in pieces:
        saved = manifest["tensors"].get(piece.key)
        if saved is None:
            raise ValueError(f"{path} has no tensor {piece.key}")
        if tuple(saved["shape"]) != piece.layout.shape:
            raise ValueError(
                f"{path}: {piece.key} is {saved['shape']}, this model's {list(piece.layout.shape)}"
            )
        _read(path, saved["slices"], piece)
    return manifest


def _verify_files(path: Path, manifest: Mapping[str, Any], mesh: Mesh) -> None:
    """Hash every file once, the files dealt out to the ranks; all raise if one finds damage."""
    own = mesh.data.rank * mesh.tensor.size + mesh.tensor.rank
    damaged = [
        name
        for number, (name, facts) in enumerate(manifest["files"].items())
        if number % mesh.size == own and _file_facts(path / name) != facts
    ]
    if found := [name for names in _gather(damaged, mesh) for name in names]:
        raise ValueError(f"{path / found[0]} is damaged: its checksum is not that of the manifest")


def _read(path: Path, slices: Iterable[Mapping[str, Any]], piece: Piece) -> None:
    """Copy what overlaps this rank's part; padding rows become zero."""
    target = piece.layout.place
    with torch.no_grad():
        piece.local.zero_()
        for saved in slices:
            source = _place(saved)
            common = _overlap(source, target)
            if common is None:
                continue
            with safe_open(path / saved["file"], "pt") as file:
                part = file.get_slice(piece.key)[_relative(common, source)]
            piece.local[_relative(common, target)].copy_(part)


def _place(saved: Mapping[str, Any]) -> Place:
    pairs = zip(saved["offset"], saved["shape"], strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)


def _overlap(one: Place, other: Place) -> Place | None:
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None


def _relative(part: Place, origin: Place) -> Place:
    pairs = zip(part, origin, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
    _sync(path)
    _sync(path.parent)


def _put_in_place(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n")
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean_up(final: Path) -> None:
    """Remove what a save that was interrupted left behind, and finish or undo its last step."""
    old = final.with_name(f".{final.name}.old")
    if old.exists() and not final.exists():
        old.rename(final)
    for leftover in [old, *final.parent.glob(".step_*.partial")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _replace_folder(final: Path, new: Path) -> None:
    """Rename `new` to `final`; one that is there (a step saved again) goes once it is replaced."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _barrier(mesh: Mesh) -> None:
    if mesh.size > 1:
        dist.barrier()


def _gather(value: Any, mesh: Mesh) -> list[Any]:
    """`value` of every rank, on every rank."""
    if mesh.size == 1:
        return [value]
    values: list[Any] = [None] * mesh.size
    dist.all_gather_object(values, value)
    return values
