"""A question of benchmarks/ as its users run it, or on ranks of the pool, in miniature."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import Contender, Figures, Rank

ROOT = Path(__file__).parents[2]


def start(*words: object) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, in the project's folder."""
    command, environ = [sys.executable, *map(str, words)], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def run(folder: Path, question: str, *words: object, status: int = 0) -> dict[str, Any]:
    """The record of one round of one turn, with its page as "page" and the output as "printed"."""
    file, page = folder / "record.json", folder / "page.md"
    common = ["--rounds", "1", "--turns", "1", "--json", file, "--page", page]
    ended = start(f"benchmarks/{question}.py", *words, *common)
    assert ended.returncode == status, ended.stdout[-3000:] + ended.stderr[-3000:]
    record: dict[str, Any] = json.loads(file.read_text())[0]
    return record | {"page": page.read_text(), "printed": ended.stdout}


def figures(record: dict[str, Any], name: str, group: str = "") -> dict[str, Any]:
    """Of the only round of a contender."""
    found = [c for c in record["contenders"] if (c["name"], c["group"]) == (name, group)]
    (contender,) = found
    assert not contender["reason"], contender["reason"]
    (only,) = contender["rounds"]
    return only


class Connected(Rank):
    """A rank of the pool."""

    def connect(self) -> None: ...


def turns(contenders: Sequence[Contender]) -> list[Figures | None]:
    """Of each its first turn on this rank of the pool."""
    rank = Connected(dist.get_rank(), dist.get_world_size())
    return [each.run(rank, **each.arguments)() for each in contenders]
