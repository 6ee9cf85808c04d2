"""Inspect checkpoints: list them, check that they are complete, show their contents.

    python tools/checkpoint.py ls checkpoints
    python tools/checkpoint.py verify checkpoints --step 1000
    python tools/checkpoint.py show checkpoints

DIR is the directory that was given to --save, or one step_XXXXXXXX in it. Torch is not needed.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.format import (
    STEP_FOLDER,
    damage,
    read_checkpoint,
    read_manifest,
    step_folders,
)
from megatron.config.parse import parse_call, user_errors
from megatron.errors import UsageError

Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]

# Kinds of other folders in a --save directory, and the patterns of their names.
OTHERS = {
    "abandoned": rf"{STEP_FOLDER}\.abandoned(-[0-9]+)?",
    "partial, of a save that runs or was killed": rf"\.{STEP_FOLDER}\.partial",
    "half removed": rf"\.{STEP_FOLDER}\.removed",
}


def ls(directory: Directory, json: bool = False) -> None:
    """List the checkpoints: step, size, date, run, layout, validation loss, state.

    Only sizes are checked, not contents; verify reads everything.

    Args:
        directory: directory of checkpoints, or one of them.
        json: print JSON.
    """
    folders = _folders(directory) + _others(directory)
    if not folders:
        raise FileNotFoundError(_nothing(directory))
    rows = [_row(folder) for folder in folders]
    if json:
        print(_json(rows))
        return
    header = ["checkpoint", "size", "saved", "run", "layout", "validation loss", "", "state"]
    print(_aligned([header, *map(_cells, rows)]))
    if not any(row["latest"] for row in rows) and (directory / "latest").is_file():
        print(f"latest names {(directory / 'latest').read_text().strip()}, which is not there")


def verify(
    directory: Directory, step: int | None = None, newest: bool = False, json: bool = False
) -> int:
    """Read every byte of every checkpoint; the status is 0 only if all of them are whole.

    Args:
        directory: directory of checkpoints, or one of them.
        step: verify only the checkpoint of this step.
        newest: verify only the highest step.
        json: print JSON.
    """
    folders = _chosen(directory, step)[: 1 if newest else None]
    found = {folder.name: _damage(folder) for folder in folders}
    if json:
        print(_json(found))
    else:
        for name, lines in found.items():
            print(f"{name}  {'whole' if not lines else 'damaged'}")
            print("".join(f"  {line}\n" for line in lines), end="")
    return int(any(found.values()))


def show(directory: Directory, step: int | None = None, json: bool = False) -> None:
    """Show the contents of the newest checkpoint: settings, counters, environment, tensors.

    Args:
        directory: directory of checkpoints, or one of them.
        step: show the checkpoint of this step.
        json: print JSON.
    """
    folder = _chosen(directory, step)[0]
    manifest = read_manifest(folder)
    tensors = manifest["tensors"]
    del manifest["files"], manifest["checksum"]
    if json:
        print(_json({"checkpoint": str(folder), "parameters": _parameters(tensors), **manifest}))
        return
    del manifest["tensors"]
    facts = {
        "checkpoint": folder,
        "parameters": f"{_parameters(tensors):,}",
        **dict(_flat(manifest)),
    }
    print(_aligned([[name, str(value)] for name, value in facts.items()]))
    print()
    rows = [
        [name, each["dtype"], str(each["shape"]), f"{len(each['slices'])}"]
        for name, each in tensors.items()
    ]
    print(_aligned([["tensor", "dtype", "shape", "slices"], *rows]))


def _folders(directory: Path) -> list[Path]:
    """The checkpoints, highest step first; `directory` may itself be one."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; one given to --save would work")
    if (
        re.fullmatch(STEP_FOLDER, directory.resolve().name)
        or (directory / "manifest.json").exists()
    ):
        return [directory]
    return step_folders(directory)


def _chosen(directory: Path, step: int | None) -> list[Path]:
    folders = _folders(directory)
    if step is None:
        if not folders:
            raise FileNotFoundError(_nothing(directory))
        return folders
    chosen = [folder for folder in folders if folder.resolve().name == f"step_{step:08d}"]
    if not chosen:
        there = ", ".join(folder.name for folder in folders) or "none"
        raise UsageError("--step", step, f"one of {there}, which {directory} has")
    return chosen


def _nothing(directory: Path) -> str:
    return f"{directory} holds no checkpoint; a directory given to --save would work"


def _others(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _kind(path) in OTHERS and path.is_dir())


def _kind(path: Path) -> str:
    kinds = (kind for kind, pattern in OTHERS.items() if re.fullmatch(pattern, path.name))
    return next(kinds, "")


def _row(folder: Path) -> dict[str, Any]:
    manifest, wrong = {}, None
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        wrong = str(error)
    kind = _kind(folder)
    latest = folder.parent / "latest"
    return {
        "checkpoint": folder.name,
        "step": int(re.findall("[0-9]{8}", folder.name)[0]) if "step_" in folder.name else None,
        "kind": kind or "checkpoint",
        "wrong": wrong,
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        "saved": datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "minutes"),
        "run": manifest.get("run"),
        "layout": manifest.get("environment", {}).get("layout"),
        "validation_loss": manifest.get("validation_loss"),
        "latest": latest.is_file() and latest.read_text().strip() == folder.name,
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    state = row["wrong"] or "complete"
    loss = row["validation_loss"]
    return [
        row["checkpoint"],
        _size(row["bytes"]),
        row["saved"],
        (row["run"] or "-")[:8],
        " x ".join(f"{name} {size}" for name, size in (row["layout"] or {}).items()) or "-",
        "-" if loss is None else f"{loss:.4f}",
        "latest" if row["latest"] else "",
        state if row["kind"] == "checkpoint" else row["kind"],
    ]


def _damage(folder: Path) -> list[str]:
    try:
        checkpoint = read_checkpoint(folder)
    except (ValueError, OSError) as error:
        return [str(error)]
    total = sum(facts["bytes"] for facts in checkpoint.manifest["files"].values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc=folder.name, leave=False, delay=1, disable=None
    ) as bar:
        return damage(checkpoint, progress=bar.update)


def _parameters(tensors: Mapping[str, Any]) -> int:
    return sum(prod(each["shape"]) for key, each in tensors.items() if key.startswith("model."))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _flat(each, f"{prefix}{name}.")
        else:
            yield prefix + name, each


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


if __name__ == "__main__":
    with user_errors(os.environ):
        commands = {"ls": ls, "verify": verify, "show": show}
        sys.exit(parse_call(commands, sys.argv[1:], os.environ)())
