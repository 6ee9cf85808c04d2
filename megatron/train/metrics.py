"""metrics.jsonl is the record of a run; the console, Weights & Biases and TensorBoard show it.

A run that resumes from an earlier step, because it was killed after its last checkpoint, marks the
lines that no longer hold with `"rewound": true`. Nothing is deleted, and the lines without the mark
are in order of step.

Importing this needs no torch. A sink besides metrics.jsonl gets numbers and short strings; its
library is imported only when the sink is opened.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from megatron.config.training import LoggingConfig
from megatron.data.files import write_atomically
from megatron.libraries import Library, load

if TYPE_CHECKING:
    import wandb

    from megatron.parallel.mesh import Mesh
else:
    wandb = Library("wandb")

Line = dict[str, Any]
GRACE = 5.0  # seconds that an error waits for the sinks
LONGEST = 200  # most characters of a string that a sink gets
FINISH_SECONDS = 60  # the longest that a lost network may delay the end of a run
INIT_SECONDS = 30  # the same for its start


class Metrics:
    """One JSON object per line, and a progress bar; only the first rank of the mesh writes."""

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
        """path: the file to append to; None writes no file. start: steps done before this process.
        stream: the console, by default standard output.

        Lines that a full or broken disk does not take are reported once, kept in memory and retried
        with each new line, so that the run goes on to its next save. Raises OSError, naming the
        file, on all ranks in this constructor (each calls it), and at the end of a `with` if lines
        are still not on disk.
        """
        from megatron.parallel.agree import on_all_ranks

        self.is_first = mesh.is_first
        self.path = Path(path) if self.is_first and path is not None else None
        self.sinks = list(sinks)
        self.stream = stream or sys.stdout
        self.prefix = ""  # of each line on the console
        self.exit_code = 0
        self._step = start
        self._unwritten: list[str] = []
        self._end: int | None = None  # size of the file in bytes, without those lines
        on_all_ranks(mesh, lambda: None if self.path is None else mark_rewound(self.path, start))
        # No bar in a log file, where it would hide the lines in between.
        is_shown = self.is_first and sys.stderr.isatty()
        self.bar = tqdm(
            initial=start, total=steps, unit="step", desc="pretrain", disable=not is_shown
        )
        for sink in self.sinks:
            self.log(f"metrics go to {sink.name}, too: {sink.destination}")

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
            self.bar.write(self.prefix + text, file=self.stream)
            self.stream.flush()

    def advance(self) -> None:
        """Count a finished step."""
        self._step += 1
        self.bar.update()

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
        short = {
            key: value
            for key, value in finite.items()
            if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST)
        }
        for sink in list(self.sinks):
            try:
                sink.write(short)
            except Exception as error:  # a lost network or a full disk ends the sink, not the run
                self._close(sink, 1, error)

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

    def _close(self, sink: Sink, exit_code: int, cause: Exception | None = None) -> None:
        """Close a sink; report `cause`, or else an error of closing it."""
        self.sinks.remove(sink)
        try:
            sink.close(exit_code)
        except Exception as error:
            cause = cause or error
        if cause is not None:
            self.log(f"{sink.name} did not get all of this run: {one_line(cause)}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        code = self.exit_code if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code not in (0, self.exit_code):
            self.write({"step": self._step, "ended": type(error).__name__, "exit_code": code})

        def close_all() -> None:
            for sink in list(self.sinks):
                self._close(sink, code)

        # A sink may wait for a network, but an error is shown after GRACE seconds at most.
        closing = Thread(target=close_all, daemon=True)
        closing.start()
        closing.join(None if error is None else GRACE)
        self.bar.close()
        if self._unwritten and error is None:
            raise OSError(f"{self.path}: {len(self._unwritten)} lines could not be written")


class Clock:
    """Time spent since the start, and training throughput since it was last read."""

    def __init__(self) -> None:
        self.start = self.since = time.monotonic()
        self.tokens = 0
        self.documents = Counter[str]()
        """This rank's cut and empty documents since the last line; impossible kinds are absent."""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def count(self, kind: str, documents: Sequence[int | None]) -> None:
        """documents: the Batch.num_cut or num_empty of each micro-batch."""
        counts = [each for each in documents if each is not None]
        if counts:
            self.documents[kind] += sum(counts)

    def tokens_per_second(self) -> float:
        """The rate since the last call, without the time under `paused`."""
        now = time.monotonic()
        rate = self.tokens / (now - self.since)
        self.since, self.tokens = now, 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        self.since += time.monotonic() - before


def peak_memory(mesh: Mesh) -> int:
    """The largest peak memory of a rank so far, in bytes: on GPUs of its tensors, on CPUs of the
    whole process with its libraries (every rank calls this)."""
    import torch

    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(mesh.device)
    else:
        peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    return max(mesh.control.gather(peak))


def in_words(terms: Mapping[str, float]) -> str:
    """The terms of a loss that has several, for the console."""
    if len(terms) == 1:
        return ""
    return f" ({', '.join(f'{name} {mean:.4f}' for name, mean in terms.items())})"


def read_metrics(path: str | Path) -> list[Line]:
    """The valid lines, in order of step; lines that were rewound or cut short are left out."""
    return [line for line in _lines(Path(path).read_bytes()) if not line.get("rewound")]


def mark_rewound(path: Path, start: int) -> None:
    """Mark the lines that do not hold in a run that starts from step `start`: every line of a later
    step, all lines for a run from scratch, and one cut short by a kill.

    The file is replaced as a whole, or left unchanged if there is nothing to mark.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        marked = ""
        for line in _lines(before):
            stands = start > 0 and line.get("step", 0) <= start
            marked += json.dumps(line if stands else {**line, "rewound": True}) + "\n"
        if marked.encode() != before:
            write_atomically(path, marked.encode())
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def _lines(data: bytes) -> Iterator[Line]:
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill, a power cut or a full disk
            line = None
        if isinstance(line, dict):
            yield line
        else:
            yield {"torn": text.decode(errors="backslashreplace"), "rewound": True}


def open_sinks(
    logging: LoggingConfig,
    metrics_path: str | Path | None,
    environ: Mapping[str, str],
    start: int,
    facts: Mapping[str, Any],
    mesh: Mesh,
    stop: Callable[[str], None],
) -> list[Sink]:
    """The requested sinks, on the first rank of the mesh; one that cannot open is reported.

    start: steps done before this process. facts: the settings of the run, as JSON values.
    stop: called with "wandb", from some thread, when a person stops the run on wandb's page.
    """
    sinks: list[Sink] = []
    for name in ("TensorBoard", "wandb") if mesh.is_first else ():
        try:
            if name == "TensorBoard" and logging.tensorboard_dir is not None:
                sinks.append(TensorBoardSink(logging.tensorboard_dir, start))
            if name == "wandb" and logging.wandb_project is not None:
                assert metrics_path is not None  # see PretrainConfig.check
                folder, project = Path(metrics_path).parent, logging.wandb_project
                sinks.append(WandbSink(project, folder, environ, start, facts, stop))
        except Exception as error:  # any error of the library; the run trains without it
            print(f"{name} gets nothing of this run: {one_line(error)}")
    return sinks


class TensorBoardSink:
    """Scalars in an event file; steps of an earlier process after `start` are purged."""

    name = "TensorBoard"

    def __init__(self, directory: str | Path, start: int) -> None:
        self.destination = str(directory)
        # A run from scratch purges all earlier steps; a resumed one keeps step `start`.
        purge = start + 1 if start else 0
        self._writer = load("torch.utils.tensorboard").SummaryWriter(
            str(directory), purge_step=purge, flush_secs=30
        )

    def write(self, line: Mapping[str, float | str]) -> None:
        for key, value in line.items():
            if key != "step" and not isinstance(value, str):
                self._writer.add_scalar(key, value, global_step=int(line["step"]))

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases that later processes continue.

    Steps that a resumed run repeats are there twice: nothing is removed from a run of wandb.
    Only the lines and the facts are sent, neither code nor other activity of the machine. wandb
    itself finds its key and WANDB_MODE. Without a key or a network, the run is kept on disk; a
    later process may be online again.
    """

    name = "wandb"

    def __init__(
        self,
        project: str,
        folder: Path,
        environ: Mapping[str, str],
        start: int,
        facts: Mapping[str, Any],
        stop: Callable[[str], None],
    ) -> None:
        """folder: gets wandb.json, which names the run, and wandb/, which holds its data."""
        folder.mkdir(parents=True, exist_ok=True)
        if "WANDB_CACHE_DIR" not in environ:  # else it logs to the home directory
            os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_SECONDS,
            init_timeout=INIT_SECONDS,
            silent=True,
            stop_fn=lambda: stop("wandb"),
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        run_id, mode, reason = run_of(folder / "wandb.json", project, start), "", ""
        hooks = sys.exit, sys.excepthook  # wandb puts its own there to learn the exit code
        while True:
            try:
                wandb.setup(settings)  # or else it prints which key it found
                mode = mode or environ.get("WANDB_MODE", "")
                mode = mode or ("online" if wandb.login(prompt=False, verify=False) else "offline")
                self._run = wandb.init(
                    project=project,
                    dir=str(folder),
                    id=run_id,
                    resume="allow",
                    mode=mode,  # type: ignore[arg-type]
                    config=dict(facts),
                    allow_val_change=True,  # a resumed run may have other settings
                    settings=settings,
                )
                break
            except Exception as error:  # e.g. of the network or the key
                wandb.teardown()  # its service holds the id
                if mode == "offline":
                    raise
                mode, reason = "offline", f" because of {one_line(error)}"
            finally:
                sys.exit, sys.excepthook = hooks
        # wandb's own step counter only grows; wandb drops lines of steps that it has passed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.destination = f"run {run_id} of project {project}"
        if mode == "offline":
            files = folder / "wandb" / f"offline-run-*-{run_id}"
            self.destination += f", kept on disk{reason}; wandb sync {files} sends it"

    def write(self, line: Mapping[str, float | str]) -> None:
        self._run.log(dict(line))

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


Sink = TensorBoardSink | WandbSink
"""Methods of both may raise any error: Metrics reports it once and goes on without the sink."""


def run_of(path: Path, project: str, start: int) -> str:
    """The run's id: the one in `path` if a run of this project is resumed, else a new one."""
    if start and path.exists():
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["project"] == project:
            return str(run["id"])
    run = {"project": project, "id": secrets.token_hex(4)}
    write_atomically(path, json.dumps(run).encode() + b"\n")
    return str(run["id"])


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
