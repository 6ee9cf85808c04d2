"""Inspect checkpoints: list them, check that they are complete, show their contents.

    python tools/checkpoint.py ls checkpoints
    python tools/checkpoint.py verify checkpoints --step 1000
    python tools/checkpoint.py show checkpoints

DIR is the directory that was given to --save, or one step_XXXXXXXX in it. Torch is not needed.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from json import dumps
from math import prod
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from megatron.checkpoint import format as files
from megatron.config.parse import parse_call, whole_program
from megatron.errors import UsageError
from tools.report import numbers

Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]

# Kinds of other folders in a --save directory, and the patterns of their names.
OTHERS = {
    "abandoned": rf"{files.STEP_FOLDER}\.abandoned(-[0-9]+)?",
    "partial, of a save that runs or was killed": rf"\.{files.STEP_FOLDER}\.partial",
    "half removed": rf"\.{files.STEP_FOLDER}\.removed",
}
NOTHING = "holds no checkpoint; a directory given to --save would work"


def ls(directory: Directory, json: bool = False) -> None:
    """List the checkpoints: step, size, date, run, layout, validation loss, state.

    Only sizes are checked, not contents; verify reads everything.

    Args:
        directory: directory of checkpoints, or one of them.
        json: print JSON.
    """
    folders = _folders(directory)
    others = (path for path in directory.iterdir() if _kind(path) in OTHERS)
    folders += sorted(path for path in others if path.is_dir())
    if not folders:
        raise FileNotFoundError(f"{directory} {NOTHING}")
    rows = [_row(folder) for folder in folders]
    if json:
        print(dumps(rows, indent=1))
        return
    lines = [["checkpoint", "size", "saved", "run", "layout", "validation loss", "", "state"]]
    for row in rows:
        loss, layout = row["validation_loss"], row["layout"] or {}
        state = row["wrong"] or "complete"
        cells = [
            row["checkpoint"],
            numbers.size(row["bytes"]),
            row["saved"],
            (row["run"] or "-")[:8],
            " x ".join(f"{name} {size}" for name, size in layout.items()) or "-",
            "-" if loss is None else f"{loss:.4f}",
            "latest" if row["latest"] else "",
            state if row["kind"] == "checkpoint" else row["kind"],
        ]
        lines.append(cells)
    print(numbers.aligned(lines))
    if not any(row["latest"] for row in rows) and (directory / "latest").is_file():
        print(f"latest names {(directory / 'latest').read_text().strip()}, which does not exist")


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
    wrong: dict[str, list[str]] = {}  # by checkpoint
    for folder in _chosen(directory, step)[: 1 if newest else None]:
        try:
            checkpoint = files.read_checkpoint(folder)
        except (ValueError, OSError) as error:
            wrong[folder.name] = [str(error)]
            continue
        sizes = {name: facts["bytes"] for name, facts in checkpoint.manifest["files"].items()}
        look = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1, "disable": None}
        wrong[folder.name] = []
        with tqdm(total=sum(sizes.values()), desc=folder.name, **look) as bar:
            for name, line in files.damage(folder, checkpoint.manifest["files"]):
                bar.update(sizes[name])
                wrong[folder.name] += [line] if line else []
    if json:
        print(dumps(wrong, indent=1))
    else:
        for name, lines in wrong.items():
            print(f"{name}  {'whole' if not lines else 'damaged'}")
            print("".join(f"  {line}\n" for line in lines), end="")
    return int(any(wrong.values()))


def show(directory: Directory, step: int | None = None, json: bool = False) -> None:
    """Show the contents of the newest checkpoint: settings, counters, environment, tensors.

    Args:
        directory: directory of checkpoints, or one of them.
        step: show the checkpoint of this step.
        json: print JSON.
    """
    folder = _chosen(directory, step)[0]
    manifest = files.read_manifest(folder)
    tensors = manifest["tensors"]
    del manifest["files"], manifest["checksum"]
    model = [each["shape"] for key, each in tensors.items() if key.startswith("model.")]
    parameters = sum(map(prod, model))
    if json:
        print(dumps({"checkpoint": str(folder), "parameters": parameters, **manifest}, indent=1))
        return
    del manifest["tensors"]
    facts = {"checkpoint": folder, "parameters": f"{parameters:,}", **dict(_flat(manifest))}
    print(numbers.aligned([[name, str(value)] for name, value in facts.items()]))
    print()
    rows = [
        [name, each["dtype"], str(each["shape"]), str(len(each["slices"]))]
        for name, each in tensors.items()
    ]
    print(numbers.aligned([["tensor", "dtype", "shape", "slices"], *rows]))


def _folders(directory: Path) -> list[Path]:
    """The checkpoints, highest step first; `directory` may itself be one."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; one given to --save would work")
    name = directory.resolve().name
    if re.fullmatch(files.STEP_FOLDER, name) or (directory / "manifest.json").exists():
        return [directory]
    return files.step_folders(directory)


def _chosen(directory: Path, step: int | None) -> list[Path]:
    """The folder of the step, or all if None. Raises FileNotFoundError or UsageError if there is
    none."""
    folders = _folders(directory)
    if not folders:
        raise FileNotFoundError(f"{directory} {NOTHING}")
    if step is None:
        return folders
    chosen = [folder for folder in folders if folder.resolve().name == f"step_{step:08d}"]
    if not chosen:
        steps = ", ".join(folder.name for folder in folders)
        raise UsageError("--step", step, f"one of {steps}, which {directory} has")
    return chosen


def _kind(path: Path) -> str:
    kinds = (kind for kind, pattern in OTHERS.items() if re.fullmatch(pattern, path.name))
    return next(kinds, "checkpoint")


def _row(folder: Path) -> dict[str, Any]:
    manifest, wrong = {}, None
    try:
        manifest = files.read_manifest(folder)
    except (ValueError, OSError) as error:
        wrong = str(error)
    latest = folder.parent / "latest"
    return {
        "checkpoint": folder.name,
        "step": int(re.findall("[0-9]{8}", folder.name)[0]) if "step_" in folder.name else None,
        "kind": _kind(folder),
        "wrong": wrong,
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        "saved": datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "minutes"),
        "run": manifest.get("run"),
        "layout": manifest.get("environment", {}).get("layout"),
        "validation_loss": manifest.get("validation_loss"),
        "latest": latest.is_file() and latest.read_text().strip() == folder.name,
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _flat(each, f"{prefix}{name}.")
        else:
            yield prefix + name, each


if __name__ == "__main__":
    with whole_program(os.environ):
        commands = {"ls": ls, "verify": verify, "show": show}
        sys.exit(parse_call(commands, sys.argv[1:], os.environ)())
