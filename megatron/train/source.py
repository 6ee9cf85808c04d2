"""Which code is running: what a figure can be traced to."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def commit(root: Path = ROOT) -> str | None:
    """The commit of this code, with "-dirty" behind it where a file differs from it; None where it
    lies in no repository of its own, or git is not there."""
    if not (root / ".git").exists():  # git would look in the folders above
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        ended = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() or None
