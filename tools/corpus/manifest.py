"""Contents of a manifest: checksums, versions, and the document counts in one line."""

import contextlib
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.files import sha256
from megatron.data.json_lines import DAMAGED, MANIFEST
from tools.corpus.program import say
from tools.corpus.records import BAD_LINE, DAMAGED_FILE, Funnel, documents

DAMAGES_SHOWN = 5
PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "tokenizers", "gigatoken", "orjson")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Manifest of the step that filled the folder; None if no step has."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and "step" in found else None


def known_checksums(folder: Path) -> dict[str, str]:
    """Checksums, by name, of the folder's shards that a step wrote and whose size is unchanged."""
    return {
        shard["name"]: shard["sha256"]
        for shard in (read_manifest(folder) or {}).get("shards", [])
        for path in [folder / shard["name"]]
        if path.is_file() and path.stat().st_size == shard.get("bytes")
    }


def same_content(files: Mapping[Path, int], inputs: Sequence[dict[str, Any]]) -> bool:
    """Whether files of these sizes are the inputs of a manifest, in order; may read them."""
    named = [(file.name, size) for file, size in files.items()]
    if named != [(each["name"], each["bytes"]) for each in inputs]:
        return False
    known = {folder: known_checksums(folder) for folder in {file.parent for file in files}}
    return all(
        (known[file.parent].get(file.name) or sha256(file)) == each["sha256"]
        for file, each in zip(files, inputs, strict=True)
    )


def checksum_of(file: str, modified: int) -> str:
    del modified  # tells the task from one on an older file
    return sha256(Path(file))


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect what a step writes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def check_output(name: str, funnel: Funnel, output: Path) -> None:
    """Raises ValueError if no document is left: nobody runs a step for that."""
    if documents(funnel.output):
        return
    bad = sum(documents(funnel.dropped.get(why, {})) for why in (BAD_LINE, DAMAGED_FILE))
    if documents(funnel.input) == bad:
        first = next(rejected_lines(output), None)
        place = "; the first of {n} lines that are none: {file}, byte {offset}: {reason}"
        raise ValueError(
            f"{name}: --input holds no document{place.format(n=bad, **first) if first else ''}"
        )
    raise ValueError(
        f"{name}: none of {documents(funnel.input)} documents is left; dropped: {_lost(funnel)}"
    )


def _lost(funnel: Funnel) -> str:
    lost = [f"{documents(n)} {why}" for why, n in sorted(funnel.dropped.items())]
    return ", ".join(lost) or "none"


def rejected_lines(output: Path) -> Iterator[dict[str, Any]]:
    """{file, offset, reason} of all input that was rejected."""
    with contextlib.suppress(FileNotFoundError), (output / "rejected.jsonl").open("rb") as lines:
        yield from map(json.loads, lines)


def summarise(name: str, funnel: Funnel, output: Path, place: str) -> None:
    """Print counts and damages.  place: name of the output."""
    say(
        f"{name}: {documents(funnel.input)} documents in, {documents(funnel.output)} out to "
        f"{place}; dropped: {_lost(funnel)}"
    )
    if DAMAGED_FILE in funnel.dropped:
        damages = (bad for bad in rejected_lines(output) if DAMAGED in bad["reason"])
        for bad in itertools.islice(damages, DAMAGES_SHOWN):
            say("warning: {file}, byte {offset}: {reason}".format(**bad))
