"""metrics.jsonl is the record of a run; the console and callbacks (loggers.py) show it.

A run that resumes from an earlier step, because it was killed after its last checkpoint, marks the
lines that no longer hold with `"rewound": true`. Nothing is deleted, and the lines without the mark
are in order of step.

Importing this needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from megatron.data.files import write_atomically
from megatron.errors import UsageError

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.train.callbacks import Callback

Line = dict[str, Any]
GRACE = 5.0  # seconds that an error waits until callbacks are closed


class Metrics:
    """One JSON object per line; only the first rank of the mesh writes."""

    def __init__(
        self,
        path: str | Path | None,
        mesh: Mesh,
        *,
        start: int,
        callbacks: Sequence[Callback] = (),
        stream: TextIO | None = None,
    ) -> None:
        """path: the file to append to; None writes no file. start: steps done before this process.
        callbacks: get each line, and are closed at the end. stream: the console, by default
        standard output.

        Lines that a full or broken disk does not take are reported once, kept in memory and retried
        with each new line, so that the run goes on to its next save. Raises OSError, naming the
        file, on all ranks in this constructor (each calls it), and at the end of a `with` if lines
        are still not on disk.
        """
        from megatron.parallel.agree import on_all_ranks

        self.is_first = mesh.is_first
        self.path = Path(path) if self.is_first and path is not None else None
        self.callbacks = list(callbacks)
        self.stream = stream or sys.stdout
        self.prefix = ""  # of each line on the console
        self.exit_code = 0
        self._step = start
        self._closed: list[Callback] = []
        self._is_leaving = False  # with an error
        self._failure: Exception | None = None  # of closing a callback
        self._unwritten: list[str] = []
        self._end: int | None = None  # size of the file in bytes, without those lines
        on_all_ranks(mesh, lambda: None if self.path is None else mark_rewound(self.path, start))

    def describe(self, facts: dict[str, Any]) -> None:
        """Write the facts of the whole run to run.json, beside the metrics."""
        if self.path is not None:
            text = json.dumps(facts, indent=1) + "\n"
            try:
                write_atomically(self.path.with_name("run.json"), text.encode())
            except OSError as error:
                self.log(f"warning: {error}")

    def log(self, text: str) -> None:
        """Write a line to the console."""
        if self.is_first:
            tqdm.write(self.prefix + text, file=self.stream)  # above a progress bar
            self.stream.flush()

    def advance(self) -> None:
        """Count a finished step."""
        self._step += 1

    def write(self, line: Line) -> None:
        """Append a line; non-finite numbers become null, since JSON has no form for them."""
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in line.items()
        }
        self.exit_code = line.get("exit_code", self.exit_code)
        self._step = line.get("step", self._step)
        if self.path is not None:
            self._unwritten.append(json.dumps(finite, allow_nan=False) + "\n")
            self._append(self.path)
        for each in self.callbacks:
            # An error ends this rank alone, where other callbacks' collectives would never end.
            if each in self._closed or (self._is_leaving and not each.may_fail):
                continue
            try:
                each.log_metrics(finite)
            except Exception as error:  # a lost network or a full disk ends it, not the run
                if not each.may_fail:
                    raise
                self._close(each, 1, error)

    def _append(self, path: Path) -> None:
        """Append the lines that are not yet on disk."""
        try:
            with path.open("ab") as file:
                if self._end is None:
                    self._end = file.tell()
                if file.tell() > self._end:  # so that no line is partial or repeated
                    file.truncate(self._end)
                file.write("".join(self._unwritten).encode())
        except OSError as error:
            with suppress(OSError):  # the next line retries this
                if self._end is not None:
                    os.truncate(path, self._end)
            if len(self._unwritten) == 1:
                self.log(f"warning: {path}: {error.strerror}; its lines are kept in memory")
        else:
            self._unwritten.clear()
            self._end = None

    def _close(self, callback: Callback, exit_code: int, cause: Exception | None = None) -> None:
        """Close a callback; report `cause`, or else an error of closing it."""
        self._closed.append(callback)
        try:
            callback.close(exit_code)
        except Exception as error:
            cause = cause or error
            if not callback.may_fail:
                self._failure = self._failure or error
        if cause is not None:
            self.log(f"{type(callback).__name__} did not get all of this run: {one_line(cause)}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_leaving = error is not None
        code = self.exit_code if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code not in (0, self.exit_code):
            self.write({"step": self._step, "ended": type(error).__name__, "exit_code": code})

        def close_all() -> None:
            for each in self.callbacks:
                if each not in self._closed:
                    self._close(each, code)

        # One may wait for a network, but an error is shown after GRACE seconds at most.
        closing = Thread(target=close_all, daemon=True)
        closing.start()
        closing.join(None if error is None else GRACE)
        if error is not None:
            return
        if self._failure is not None:
            raise self._failure
        if self._unwritten:
            raise OSError(f"{self.path}: {len(self._unwritten)} lines could not be written")


def read_metrics(path: str | Path) -> list[Line]:
    """The valid lines, in order of step; lines that were rewound or cut short are left out."""
    return [line for line in _lines(Path(path).read_bytes()) if not line.get("rewound")]


def mark_rewound(path: Path, start: int) -> None:
    """Mark the lines that do not hold in a run that starts from step `start`: every line of a later
    step, all lines for a run from scratch, and one cut short by a kill.

    The file is replaced as a whole, or left unchanged if there is nothing to mark. Raises
    UsageError for a file of another kind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        lines, marked = [*_lines(before)], ""
        # A kill may leave one line that is torn, and a power cut a file that begins with zeros.
        is_torn = before[:1] == b"{" and len(lines) == 1 and "rewound" in lines[0]
        is_record = any("step" in line for line in lines) or is_torn
        if not is_record and before[:1] not in (b"", b"\0"):
            raise UsageError(str(path), None, "the record of a run, or a new file")
        for line in lines:
            stands = start > 0 and line.get("step", 0) <= start
            marked += json.dumps(line if stands else {**line, "rewound": True}) + "\n"
        if marked.encode() != before:
            write_atomically(path, marked.encode())
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def _lines(data: bytes) -> Iterator[Line]:
    for text in data.splitlines():
        try:
            # Other programs write NaN and Infinity, which JSON does not have.
            line = json.loads(text, parse_constant=lambda _: None)
        except ValueError:  # torn by a kill, a power cut or a full disk
            line = None
        if isinstance(line, dict):
            yield line
        else:
            yield {"torn": text.decode(errors="backslashreplace"), "rewound": True}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
