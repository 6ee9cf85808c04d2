"""A question of benchmarks/ in miniature, with processes from the fork server of tests/dist.py."""

import atexit
import json
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import scratch
from benchmarks.processes import work
from tests.dist import PRELOADED

ROOT = Path(__file__).parents[2]


@contextmanager
def forked() -> Iterator[None]:
    """Contenders' processes start in a tenth of a second, in place of four seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.multiple("benchmarks.processes", SPAWN=context, work=work_and_exit):
        yield


def work_and_exit(*arguments: Any) -> None:
    """A forked process ends without the functions that atexit has."""
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()


def as_a_rank(question: str, words: list[str]) -> None:
    """One of the processes that torchrun would start, for `start_ranks`."""
    sys.argv = [f"benchmarks/{question}.py", *words]
    with forked():
        import_module(f"benchmarks.{question}").QUESTION.run()


def run(
    folder: Path, question: str, *words: object, status: int = 0, **changes: Any
) -> dict[str, Any]:
    """The record of one round of one turn by this command line, with its page as "page". changes:
    of the question's fields."""
    file, page = folder / "record.json", folder / "page.md"
    common = ["--rounds", 1, "--turns", 1, "--json", file, "--page", page]
    command = [f"benchmarks/{question}.py", *words, *common]
    module, ended = import_module(f"benchmarks.{question}"), 0
    scratch.cache_clear()  # as in a new process
    with forked(), patch.object(sys, "argv", [str(word) for word in command]):
        try:
            replace(module.QUESTION, **changes).run()
        except SystemExit as stop:  # Python exits with 1 where the code is a text
            ended = stop.code if isinstance(stop.code, int) else 1
    assert ended == status
    record: dict[str, Any] = json.loads(file.read_text())[0]
    return record | {"page": page.read_text()}


def figures(record: dict[str, Any], name: str, group: str = "") -> dict[str, Any]:
    """A contender's figures of the only round."""
    found = [c for c in record["contenders"] if (c["name"], c["group"]) == (name, group)]
    (contender,) = found
    assert not contender["reason"], contender["reason"]
    (only,) = contender["rounds"]
    return only
