"""JSON lines in and out of the tests of the corpus steps."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.data.json_lines import find_shards, open_shard
from tests.dist import PATIENCE


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, or of all shards of a folder."""
    files = find_shards([path]) if path.is_dir() else [path]
    records = []
    for file in files:
        with open_shard(file) as stream:
            records += [json.loads(line) for line in stream]
    return records


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def dropped(facts: dict[str, Any]) -> dict[str, int]:
    """Documents by the reason for which they went, in a manifest."""
    return {reason: count["documents"] for reason, count in facts["dropped"].items()}


def duplicates(folder: Path) -> list[dict[str, Any]]:
    """Lines of its duplicates.jsonl, if there is one, without where the documents were."""
    path = folder / "duplicates.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    places = ("file", "offset", "kept_file", "kept_offset")
    return [{k: value for k, value in line.items() if k not in places} for line in lines]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an output folder but run.json, which tells what one run took."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "run.json"
    }


def stages(folder: Path) -> dict[str, int]:
    """Tasks of each stage of the run that filled the folder."""
    facts = json.loads((folder / "run.json").read_text())
    return {stage["stage"]: stage["tasks"] for stage in facts["stages"]}


def wait_until(condition: Callable[[], bool]) -> None:
    """The time limit is a guard against hangs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
