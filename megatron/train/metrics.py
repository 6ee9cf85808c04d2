"""metrics.jsonl is the record of a run; the console shows the same numbers to a person.

A run that goes back to an earlier step, because it was killed after its last checkpoint, marks the
lines that no longer hold with `"rewound": true`. Nothing is deleted, and the lines without the mark
are in order of step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from megatron.train.sinks import Sink, one_line

if TYPE_CHECKING:  # read_metrics needs no torch
    from megatron.parallel.mesh import Mesh

Line = dict[str, Any]
GRACE = 5.0  # seconds that an error waits for the sinks
LONGEST = 200  # characters of a string that a sink gets


def read_metrics(path: str | Path) -> list[Line]:
    """The lines that stand, in order of step: what was rewound or cut short is left out."""
    return [line for line in _lines(Path(path).read_bytes()) if not line.get("rewound")]


class Metrics:
    """One JSON object a line, and a progress bar; only the first rank of the mesh writes."""

    def __init__(
        self,
        path: str | Path | None,
        mesh: Mesh,
        *,
        start: int,
        steps: int,
        sinks: Sequence[Sink] = (),
        stream: TextIO | None = None,
    ) -> None:
        """path: appended to; None keeps no file. start: steps done before this process.

        Lines that a full disk does not take are said once, kept in memory and tried again with
        each new one: a run goes on to its next save. Raises OSError, naming the file, here, and at
        the end of a `with` where some are still not on disk.
        """
        self.is_first = mesh.is_first
        self.path = Path(path) if self.is_first and path is not None else None
        self.sinks = list(sinks)
        self.stream = stream or sys.stdout
        self.prefix = ""  # of each line on the console
        self.exit_code = 0
        self._step = start
        self._unwritten: list[str] = []
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mark_rewound(self.path, start)
        # Not in a log file, where it would hide the lines between its own.
        is_shown = self.is_first and sys.stderr.isatty()
        self.bar = tqdm(
            initial=start, total=steps, unit="step", desc="pretrain", disable=not is_shown
        )
        for sink in self.sinks:
            self.log(f"metrics go to {sink.name}, too: {sink.place}")

    def describe(self, facts: dict[str, Any]) -> None:
        """Write what holds for the whole run to run.json beside the metrics."""
        if self.path is not None:
            text = json.dumps(facts, indent=1) + "\n"
            self.path.with_name("run.json").write_text(text, encoding="utf-8")

    def write(self, line: Line) -> None:
        """Append a line; a number that is not finite becomes null, as JSON has no other word."""
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in line.items()
        }
        self.exit_code = line.get("exit_code", self.exit_code)
        self._step = line.get("step", self._step)
        if self.path is not None:
            self._unwritten.append(json.dumps(finite, allow_nan=False) + "\n")
            self._write_out(self.path)
        self._send({key: value for key, value in finite.items() if _is_short(value)})

    def log(self, text: str) -> None:
        if self.is_first:
            self.bar.write(self.prefix + text, file=self.stream)
            self.stream.flush()

    def advance(self) -> None:
        """A step is done."""
        self._step += 1
        self.bar.update()

    def _write_out(self, path: Path) -> None:
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(self._unwritten))
        except OSError as error:
            if path.is_file():
                os.truncate(path, size)  # no line is there in part, or twice
            if len(self._unwritten) == 1:
                self.log(f"warning: {path}: {error.strerror}; its lines are kept in memory")
        else:
            self._unwritten.clear()

    def _send(self, line: Line) -> None:
        for sink in list(self.sinks):
            try:
                sink.write(line)
            except Exception as error:  # a lost network or a full disk ends the sink, not the run
                self.sinks.remove(sink)
                self.log(f"{sink.name} gets no more of this run: {one_line(error)}")
                with suppress(Exception):  # said
                    sink.close(1)

    def _close_sinks(self, exit_code: int) -> None:
        for sink in self.sinks:
            try:
                sink.close(exit_code)
            except Exception as error:  # of what it could not send
                self.log(f"{sink.name} did not get all of this run: {one_line(error)}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = self.exit_code if kind is None else _exit_code(error)
        if code not in (0, self.exit_code):
            self.write({"step": self._step, "ended": kind and kind.__name__, "exit_code": code})
        # A sink may wait for a network; an error is told soon.
        closing = Thread(target=self._close_sinks, args=(code,), daemon=True)
        closing.start()
        closing.join(None if kind is None else GRACE)
        self.bar.close()
        if self._unwritten and kind is None:
            raise OSError(f"{self.path}: {len(self._unwritten)} lines could not be written")


def mark_rewound(path: Path, start: int) -> None:
    """Mark what does not stand in a run that goes on from step `start`.

    That is every line of a later step, all lines for a run from scratch, and one cut short by a
    kill. The file is replaced whole, or, where there is nothing to mark, left alone.
    """
    if not path.exists():
        return
    with _named(path):
        data = path.read_bytes()
        lines = [_marked(line, start) for line in _lines(data)]
        marked = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if marked != data:
            _replace(path, marked)


def _marked(line: Line, start: int) -> Line:
    stands = start > 0 and line.get("step", 0) <= start
    return line if stands else {**line, "rewound": True}


def _lines(data: bytes) -> Iterator[Line]:
    for text in data.splitlines():
        yield _parse(text) or {"torn": text.decode(errors="backslashreplace"), "rewound": True}


def _parse(text: bytes) -> Line | None:
    """None where a kill, a power cut or a full disk left something else than a line."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the new name on an empty file
    beside.replace(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk is reported without the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST)


def _exit_code(error: BaseException | None) -> int:
    """Of a process that this exception ends."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)
