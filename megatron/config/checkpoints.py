"""Checkpoint folders as files: what is there, what each holds, and whether it is whole.

    SAVE/latest                                  name of the newest complete one
    SAVE/step_00000100/manifest.json             settings, counters, every tensor and its slices
    SAVE/step_00000100/shard_00000.safetensors   the slices that one rank wrote
    SAVE/step_00000100/vocab.json, merges.txt    the tokenizer, if the run knew it

A manifest has a checksum of itself and those of all files. megatron/train/checkpoint.py writes and
reads the tensors.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

FORMAT = 2
STEP_FOLDER = "step_[0-9]{8}"
Place = tuple[slice, ...]

_CHUNK = 1 << 22


def step_folders(directory: str | Path) -> list[Path]:
    """The folders step_XXXXXXXX of a --save directory, the highest step first."""
    found = [
        path
        for path in Path(directory).glob("step_*")
        if re.fullmatch(STEP_FOLDER, path.name) and path.is_dir()
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


def one_step(load: str | Path) -> Path | None:
    """The checkpoint's folder that `load` names, or that a link of any name leads to; None where
    it names a directory of checkpoints."""
    paths = Path(load), Path(load).resolve()
    return next((path for path in paths if re.fullmatch(STEP_FOLDER, path.name)), None)


def save_directory(load: str | Path) -> Path:
    """The directory of the checkpoints that `load` names all or one of, however it is spelt."""
    return Path(load).resolve() if one_step(load) is None else Path(load).resolve().parent


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a checksum of all of it, by which a flipped bit in a counter is found."""
    plain: dict[str, Any] = json.loads(json.dumps(manifest))
    return {**plain, "checksum": _checksum(plain)}


def _checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint folder, checked against itself and the sizes of the files.

    Raises FileNotFoundError where it or a file is missing, ValueError where one is damaged. What
    is in the files is not read: see `damage`.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, so that {path} is no whole checkpoint")
    manifest = _parse(file)
    for name, facts in manifest["files"].items():
        _check_size(path / name, facts["bytes"])
    return manifest


def _parse(file: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        found, checksum = manifest["format"], manifest.get("checksum")
        if found == FORMAT and checksum == _checksum(manifest):
            check_tiling(manifest["tensors"], manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise ValueError(f"{file}: its format is {found!r}, only {FORMAT} is read here")
    if checksum != _checksum(manifest):
        raise ValueError(f"{file} is damaged: its checksum is not that of the rest of it")
    return manifest


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, but its manifest lists it")
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"{file}: {size} bytes, its manifest says {expected}")


def damage(
    path: Path,
    manifest: Mapping[str, Any],
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """Hash the files of a checkpoint; one line for each that is missing, short or changed.

    part: (rank, size), to hash every size-th file only. progress: told of every count of bytes.
    """
    rank, size = part
    found = []
    for name, facts in list(manifest["files"].items())[rank::size]:
        try:
            _check_size(path / name, facts["bytes"])
            if checksum_of(path / name, progress) != facts["sha256"]:
                found.append(f"{path / name} is damaged: its checksum is not that of the manifest")
        except (ValueError, FileNotFoundError) as error:
            found.append(str(error))
        except OSError as error:  # a disk that cannot read it
            found.append(f"{path / name} is damaged: {error.strerror or error}")
    return found


def checksum_of(file: Path, progress: Callable[[int], object] = lambda count: None) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def check_tiling(tensors: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """The slices of each tensor lie in these files, and cover it exactly once."""
    for key, tensor in tensors.items():
        slices = tensor["slices"]
        if missing := {each["file"] for each in slices} - files.keys():
            raise ValueError(f"a slice of {key} is in {min(missing)}, which is not listed")
        places = [place_of(each) for each in slices]
        whole = tuple(slice(0, size) for size in tensor["shape"])
        covered = sum(prod(each["shape"]) for each in slices)
        inside = all(overlap(place, whole) == place for place in places)
        twice = any(overlap(one, other) for i, one in enumerate(places) for other in places[:i])
        if not inside or twice or covered != prod(tensor["shape"]):
            raise ValueError(f"the slices of {key} do not cover it exactly once")


def place_of(saved: Mapping[str, Any]) -> Place:
    """Where a slice of the manifest lies in its tensor."""
    pairs = zip(saved["offset"], saved["shape"], strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)


def overlap(one: Place, other: Place) -> Place | None:
    """What both have in common; None if that is nothing."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None
