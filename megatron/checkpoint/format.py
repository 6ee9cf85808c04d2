"""A checkpoint as files: names, manifest, slices, and checks that it is whole. No torch.

    SAVE/latest                                  name of the newest one
    SAVE/step_00000100/manifest.json             settings, counters, every tensor and its slices
    SAVE/step_00000100/shard_00000.safetensors   the slices that global rank 0 wrote
    SAVE/step_00000100/vocab.json, merges.txt    the tokenizer, if the run knew it
    SAVE/step_00000200.abandoned                 whole, from a run that went back to an earlier step
    SAVE/.step_00000300.partial                  being written, or its writer was killed
    SAVE/.step_00000050.removed                  being removed

A folder named step_XXXXXXXX is a whole checkpoint at every moment. A manifest holds checksums of
itself and of all other files. A tensor's slices are boxes that tile its true shape, without
padding, so that a rank of any layout finds its own part. In its file a slice has the tensor's name
or, if a rank has several slices of a tensor, a name of its own: "tensor" in the manifest.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from megatron.data.files import sha256

FORMAT = 2
FORMAT_OF_PARTS = 3  # some slices have their own names, as in ZeRO; older programs misread them
STEP_FOLDER = "step_[0-9]{8}"


def step_folders(directory: str | Path) -> list[Path]:
    """The folders step_XXXXXXXX of a --save directory, the highest step first."""
    found = Path(directory).glob("step_*")
    folders = [path for path in found if re.fullmatch(STEP_FOLDER, path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


def one_step(load: str | Path) -> Path | None:
    """The checkpoint's folder that `load` names, or that it leads to as a link of any name; None if
    it names a directory of checkpoints."""
    paths = Path(load), Path(realpath(load))  # which passes over a ring of links
    return next((path for path in paths if re.fullmatch(STEP_FOLDER, path.name)), None)


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest has been read. `verify` and `newest_whole` also compare every byte
    with it, and `newest_readable` compares names and sizes."""

    path: Path
    manifest: dict[str, Any]


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a checksum of all of it, which detects a flipped bit in a counter."""
    plain: dict[str, Any] = json.loads(json.dumps(manifest))
    rest = {key: value for key, value in plain.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "checksum": hashlib.sha256(text.encode()).hexdigest()}


def read_manifest(path: Path, *, alone: bool = False) -> dict[str, Any]:
    """The manifest of one checkpoint folder, checked against itself and the sizes of the files.

    alone: leaves out the other files, some of which may be elsewhere. Raises FileNotFoundError if
    it or a file is missing, ValueError if one is damaged. The content of the files is not read: see
    `damage`.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, so that {path} is no whole checkpoint")
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        number = manifest["format"]
        is_known = number in (FORMAT, FORMAT_OF_PARTS)
        if is_known and manifest.get("checksum") != seal(manifest)["checksum"]:
            raise ValueError("its checksum is not that of the rest of it")
        if is_known:
            check_tiling(manifest["tensors"], manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{file} is damaged: {reason}") from error
    if not is_known:
        formats = f"{FORMAT} and {FORMAT_OF_PARTS}"
        raise ValueError(f"{file}: its format is {number!r}, only {formats} are read here")
    for name, facts in () if alone else manifest["files"].items():
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name} is not there, but its manifest lists it")
        if (size := (path / name).stat().st_size) != facts["bytes"]:
            raise ValueError(f"{path / name}: {size} bytes, its manifest says {facts['bytes']}")
    return {"kind": "gpt2", **manifest}  # the first checkpoints held GPT-2 and did not say so


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, checked as in `read_manifest`."""
    return Checkpoint(path, read_manifest(path))


def damage(path: Path, files: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Hash files of a checkpoint; yields (name, a line if it is missing or changed, else "").

    path: the folder. files: some of those of its manifest.
    """
    for name, facts in files.items():
        line = ""
        try:
            if sha256(path / name) != facts["sha256"]:
                line = f"{path / name} is damaged: its checksum is not that of the manifest"
        except OSError as error:  # removed since, or unreadable on its disk
            line = f"{path / name} is damaged: {error.strerror or error}"
        yield name, line


def check_tiling(tensors: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Raise ValueError unless the slices of each tensor lie in these files and cover it exactly
    once; takes time linear in their number.

    The sum of signed corners determines how many boxes cover each element: a corner's sign has a
    factor -1 for each dim in which it is the box's upper end. So boxes tile the whole exactly if
    their corners sum to those of the whole.
    """
    for key, tensor in tensors.items():
        slices, whole = tensor["slices"], {"offset": [0] * len(tensor["shape"]), **tensor}
        if missing := {each["file"] for each in slices} - files.keys():
            raise ValueError(f"a slice of {key} is in {min(missing)}, which is not listed")
        corners: Counter[tuple[int, ...]] = Counter()
        for box, weight in (*((each, 1) for each in slices), (whole, -1)):
            signed: list[tuple[tuple[int, ...], int]] = [((), weight)]
            for start, size in zip(box["offset"], box["shape"], strict=True):
                ends = ((start, 1), (start + size, -1))
                signed = [((*corner, at), sign * s) for corner, sign in signed for at, s in ends]
            for corner, sign in signed:
                corners[corner] += sign
        if any(corners.values()) or any(size < 0 for each in slices for size in each["shape"]):
            raise ValueError(f"the slices of {key} do not cover it exactly once")
