"""What a manifest is made of: checksums, versions, and the books in one line."""

import contextlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from tools.corpus.program import say
from tools.corpus.records import Funnel, documents
from tools.corpus.shards import MANIFEST, checksum

PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "tokenizers", "gigatoken", "orjson")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """That of the step that filled the folder; None where no step has."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and "step" in found else None


def known_checksums(folder: Path) -> dict[str, str]:
    """Of the shards that a step wrote into the folder, by name, if they have their size still."""
    return {
        shard["name"]: shard["sha256"]
        for shard in (read_manifest(folder) or {}).get("shards", [])
        for path in [folder / shard["name"]]
        if path.is_file() and path.stat().st_size == shard.get("bytes")
    }


def checksum_of(file: str, modified: int) -> str:
    del modified  # tells the task from one on an older file
    return checksum(Path(file))


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a step writes, as far as they are there."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def check_output(name: str, funnel: Funnel) -> None:
    """ValueError where nothing is left: whoever wanted that would not have run the step."""
    if not documents(funnel.output):
        raise ValueError(
            f"{name}: none of {documents(funnel.input)} documents is left; dropped: {_lost(funnel)}"
        )


def _lost(funnel: Funnel) -> str:
    lost = [f"{documents(n)} {why}" for why, n in sorted(funnel.dropped.items())]
    return ", ".join(lost) or "none"


def summarise(name: str, funnel: Funnel, output: Path) -> None:
    say(
        f"{name}: {documents(funnel.input)} documents in, {documents(funnel.output)} out to "
        f"{output}; dropped: {_lost(funnel)}"
    )
