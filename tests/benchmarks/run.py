"""A question of benchmarks/ as its users run it, in miniature."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(folder: Path, question: str, *words: object, status: int = 0) -> dict[str, Any]:
    """The record of one round of one turn, with its page as "page" and the output as "printed".

    Figures of a contender: `figures(record, name, group)`.
    """
    file, page = folder / "record.json", folder / "page.md"
    command = [sys.executable, f"benchmarks/{question}.py", *map(str, words)]
    command += ["--rounds", "1", "--turns", "1", "--json", str(file), "--page", str(page)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
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
