"""Checkpoints that know nothing of the layout they were saved at.

A tensor is logically whole: its slices tile the true shape, without padding. A rank that loads
reads what overlaps its own part, at any layout. A checkpoint is written beside its final name and
renamed when everything is on disk, or fails on every rank and leaves nothing. safetensors and JSON
only; megatron/config/checkpoints.py says how the folder looks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.config.checkpoints import (
    FORMAT,
    Place,
    check_tiling,
    checksum_of,
    damage,
    overlap,
    place_of,
    read_manifest,
    seal,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec
from megatron.train.agree import agree
from megatron.train.folder import prepare, reason, set_aside, space, sync, write_file

__all__ = [
    "Part",
    "Piece",
    "Written",
    "load",
    "own_parts",
    "read_manifest",
    "save",
    "verify",
    "write",
]

NOTHING: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """This rank's part of the logically whole tensor `key`, laid out as `spec` says."""

    key: str
    spec: ShardingSpec
    local: Tensor


@dataclass(frozen=True)
class Part:
    """A slice of the tensor `key` [shape] that this rank writes, and where it starts."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on disk; bytes: of all its files but the manifest; notes: what else was
    done for it."""

    path: Path
    bytes: int
    notes: tuple[str, ...]


def own_parts(pieces: Iterable[Piece], mesh: Mesh) -> list[Part]:
    """What this rank writes: each slice is written once, by the first of the ranks that hold it."""
    parts = []
    for piece in pieces:
        real = piece.spec.real(piece.local)
        cut = {axis.name for _, axis in piece.spec.cuts}
        holders = [axis for axis in (mesh.data, mesh.tensor) if axis.name not in cut]
        if real.numel() and not any(axis.rank for axis in holders):
            offset = tuple(part.start for part in piece.spec.place)
            parts.append(Part(piece.key, piece.spec.shape, offset, real))
    return parts


def save(
    directory: str | Path,
    step: int,
    pieces: Iterable[Piece],
    facts: Mapping[str, Any],
    mesh: Mesh,
    attached: Mapping[str, bytes] = NOTHING,
) -> Path:
    """Write SAVE/step_XXXXXXXX with every tensor, `facts` (JSON) and the files {name: content} that
    are attached; every rank calls this."""
    return write(directory, step, own_parts(pieces, mesh), facts, mesh, attached=attached).path


def write(
    directory: str | Path,
    step: int,
    parts: Sequence[Part],
    facts: Mapping[str, Any],
    mesh: Mesh,
    *,
    attached: Mapping[str, bytes] = NOTHING,
    went_back_to: int | None = None,
) -> Written:
    """Write SAVE/step_XXXXXXXX from the parts of all ranks, which have to see one directory.

    attached: {name: content} of further files; those of the first rank are written. went_back_to:
    checkpoints beyond this step are of a run that was given up, and are renamed; so is whatever has
    this checkpoint's name. Raises OSError on every rank where one fails; then nothing of this
    checkpoint is left.
    """
    final = Path(directory) / f"step_{step:08d}"
    staging = final.with_name(f".{final.name}.partial")
    try:
        left = agree(mesh, lambda: prepare(staging) if mesh.is_first else ())[0]
        summaries = agree(mesh, lambda: _write_share(staging, parts, attached, mesh))
        written = agree(
            mesh,
            lambda: _commit(final, summaries, facts, went_back_to) if mesh.is_first else None,
        )[0]
    except BaseException:
        if mesh.is_first:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    assert written is not None
    return replace(written, notes=(*left, *written.notes))


def _write_share(
    staging: Path, parts: Sequence[Part], attached: Mapping[str, bytes], mesh: Mesh
) -> dict[str, Any]:
    """Write this rank's slices, and on the first rank what is attached; return what the manifest
    says of them."""
    shard = _write_shard(staging, parts, mesh)
    own = attached if mesh.is_first else NOTHING
    return {**shard, "files": {**shard["files"], **_write_attached(staging, own)}}


def _write_attached(staging: Path, attached: Mapping[str, bytes]) -> dict[str, Any]:
    files = {}
    for name, content in attached.items():
        file = staging / name
        assert name != "manifest.json"
        assert not file.exists(), name
        write_file(file, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return files


def _write_shard(staging: Path, parts: Sequence[Part], mesh: Mesh) -> dict[str, Any]:
    """Write this rank's slices; return what the manifest says of them."""
    if not parts:
        return {"files": {}, "tensors": {}}
    file = staging / f"shard_{mesh.tensor.rank:05d}.safetensors"
    own = {part.key: part.tensor.contiguous() for part in parts}
    needed = sum(tensor.nbytes for tensor in own.values())
    try:
        save_file(own, file)
        file.chmod(0o644)  # like every other file: the library leaves it to its owner
        facts = {"bytes": file.stat().st_size, "sha256": checksum_of(file)}
        sync(file, forget=True)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{file}: {reason(error)}; {space(file, needed)}") from error
    return {"files": {file.name: facts}, "tensors": {p.key: _entry(p, file.name) for p in parts}}


def _entry(part: Part, file: str) -> dict[str, Any]:
    shape = list(part.tensor.shape)
    return {
        "dtype": str(part.tensor.dtype).removeprefix("torch."),
        "shape": list(part.shape),
        "slices": [{"file": file, "offset": list(part.offset), "shape": shape}],
    }


def _commit(
    final: Path,
    summaries: list[dict[str, Any]],
    facts: Mapping[str, Any],
    went_back_to: int | None,
) -> Written:
    """Give the staged folder its manifest and its name. All that takes room comes before that."""
    staging = final.with_name(f".{final.name}.partial")
    pointer = final.with_name(".latest.partial")
    manifest = _manifest(summaries, facts)
    write_file(staging / "manifest.json", json.dumps(seal(manifest), indent=1).encode())
    write_file(pointer, f"{final.name}\n".encode())
    sync(staging)
    notes = set_aside(final, went_back_to)
    staging.rename(final)
    sync(final.parent)
    pointer.replace(final.with_name("latest"))
    sync(final.parent)
    return Written(final, sum(file["bytes"] for file in manifest["files"].values()), notes)


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
    check_tiling(tensors, files)
    return {"format": FORMAT, **facts, "files": files, "tensors": tensors}


def verify(path: Path, mesh: Mesh) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank: each file is read by one of them."""

    def own_share() -> list[str]:
        try:
            manifest = read_manifest(path)
        except (ValueError, OSError) as error:
            return [str(error)]
        return damage(path, manifest, (mesh.control.rank, mesh.control.size))

    found = mesh.control.gather(own_share())
    return list(dict.fromkeys(line for lines in found for line in lines))


def load(
    path: Path, pieces: Iterable[Piece], mesh: Mesh, *, verified: bool = False
) -> dict[str, Any]:
    """Fill every piece from the checkpoint at `path`; return its manifest.

    verified: `verify` has found nothing just now. Raises FileNotFoundError where a file is missing,
    ValueError for a file that is damaged, a missing tensor or another shape.
    """
    manifest = read_manifest(path)
    if not verified and (found := verify(path, mesh)):
        raise ValueError(found[0])
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(safe_open(path / name, "pt")) for name in _shards(manifest)
        }
        for piece in pieces:
            _read(files, _slices(path, manifest, piece), piece)
    return manifest


def _shards(manifest: Mapping[str, Any]) -> set[str]:
    """The files that hold tensors."""
    return {each["file"] for tensor in manifest["tensors"].values() for each in tensor["slices"]}


def _slices(path: Path, manifest: Mapping[str, Any], piece: Piece) -> list[dict[str, Any]]:
    saved = manifest["tensors"].get(piece.key)
    if saved is None:
        raise ValueError(f"{path} has no tensor {piece.key}")
    if tuple(saved["shape"]) != piece.spec.shape:
        raise ValueError(
            f"{path}: {piece.key} is {saved['shape']}, this model's {list(piece.spec.shape)}"
        )
    slices: list[dict[str, Any]] = saved["slices"]
    return slices


@torch.no_grad()
def _read(files: Mapping[str, Any], slices: Iterable[Mapping[str, Any]], piece: Piece) -> None:
    """Copy what overlaps this rank's part; padding rows become zero."""
    target = piece.spec.place
    piece.local[len(piece.spec.real(piece.local)) :].zero_()
    for saved in slices:
        source = place_of(saved)
        common = overlap(source, target)
        if common is not None:
            part = files[saved["file"]].get_slice(piece.key)[_relative(common, source)]
            piece.local[_relative(common, target)].copy_(part)


def _relative(part: Place, origin: Place) -> Place:
    pairs = zip(part, origin, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)
