"""Runs of pretrain_gpt2.py under tools.chaos, on ranks that are forked with torch imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.programs import REST, ROOT, SHAPE, pretrain, some_data
from tools.chaos.__main__ import Settings, run, undisturbed
from tools.chaos.supervise import Command

LAUNCHER = str(Path(sys.executable).with_name("torchrun"))
SIZE = "--nproc-per-node"


class ForkedRanks:
    """A start of ["torchrun", "--nproc-per-node", N, "pretrain_gpt2.py", ...], without torchrun:
    the ranks have to notice each other's end themselves.

    data: of --data-path. before: called in each rank first.
    """

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        *,
        data: Path,
        before: Callable[[], None] | None = None,
    ) -> None:
        _, flag, size, _, *flags = words
        assert flag == SIZE
        self._stack = ExitStack()
        prepared = partial(prepare, dict(environ), before)
        self._run = self._stack.enter_context(
            pretrain(" ".join(flags), world=int(size), folder=folder, before=prepared, data=data)
        )

    def status(self) -> int | None:
        codes = [process.exitcode for process in self._run.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def launcher(self) -> int | None:
        return None

    def ranks(self) -> dict[int, int]:
        """Those that run the program: before a rank has a log, its errors are the tests' own."""
        processes = enumerate(zip(self._run.processes, self._run.logs, strict=True))
        return {
            rank: process.pid or 0
            for rank, (process, log) in processes
            if log.exists() and process.exitcode is None
        }

    def size(self) -> int:
        return len(self._run.processes)

    def kill(self) -> None:
        self._stack.close()

    def text(self) -> str:
        return self._run.text()


def prepare(variables: Mapping[str, str], before: Callable[[], None] | None) -> None:
    os.environ.update(variables)
    if before is not None:
        before()


def forked(words: str, world: int) -> list[str]:
    """The command that ForkedRanks starts."""
    return [LAUNCHER, SIZE, str(world), str(ROOT / "pretrain_gpt2.py"), *words.split()]


def calm(words: str, folder: Path, *, world: int = 1, command: Sequence[str] | None = None) -> Path:
    """An undisturbed run on forked ranks, of this command or that of the words: it has the same
    bits however its ranks are started."""
    folder.mkdir(parents=True, exist_ok=True)
    data, start = some_data(folder), forked(words, world)
    command = command or start

    def launch(made: Sequence[str], environ: Mapping[str, str], logs: Path) -> ForkedRanks:
        return ForkedRanks([*start, *made[len(command) :]], environ, logs, data=data)

    undisturbed(folder / "undisturbed", command, launch, 600.0)
    return folder / "undisturbed"


def chaos(
    faults: str,
    words: str,
    folder: Path,
    *,
    world: int = 2,
    before: Callable[[], None] | None = None,
    torchrun: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The report of a run with these faults (TOML). before: of forked ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    data, file = some_data(folder), folder / "faults.toml"
    file.write_text(faults)
    command = forked(words, world)
    launch: Any = partial(ForkedRanks, data=data, before=before)
    if torchrun:
        command[4:4] = [*SHAPE.split(), *REST.split(), "--data-path", str(data)]
        command[1:1] = ["--standalone", "--monitor-interval", "0.1"]
        settings["undisturbed"] = calm(words, folder, world=world, command=command)
        launch = Command
    made = Settings(faults=file, output=folder / "chaos", **settings)
    return run(made, command, launch)
