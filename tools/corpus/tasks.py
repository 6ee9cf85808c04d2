"""Tasks of a stage, and the markers that they leave when they are done."""

import hashlib
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.files import atomic_writer
from tools.corpus.settings import StepSettings


class Task(NamedTuple):
    key: str
    """Its name among the tasks of its stage, usable as a file name."""
    arguments: tuple[Any, ...]
    """Values that differ in their repr; files are described by a Unit."""
    weight: int = 1
    """Share of the stage's work, in bytes if possible, for the progress bar."""


def execute(
    marker: Path, fingerprint: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Run a task, in a worker, and write its marker.  Returns its result and what it took."""
    start = time.process_time()
    result = function(*arguments)
    outcome = {
        "fingerprint": fingerprint,
        "result": result,
        "cpu_seconds": time.process_time() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    content = json.dumps(outcome)
    with atomic_writer(marker) as file:
        file.write(content.encode())
    return json.loads(content)  # type: ignore[no-any-return]


def marker_of(folder: Path, task: Task) -> Path:
    return folder / f"{task.key}.done.json"


def read_marker(marker: Path, fingerprint: str) -> Any | None:
    """The outcome of a task that was done before, None if it was not."""
    try:
        outcome = json.loads(marker.read_bytes())
    except FileNotFoundError:
        return None
    return outcome if outcome["fingerprint"] == fingerprint else None


def digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def telling(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments that tell a task from others; settings are in the history already."""
    return [
        each.__qualname__ if callable(each) else each
        for each in arguments
        if not isinstance(each, StepSettings)
    ]
