"""Where metrics go beside metrics.jsonl: Weights & Biases and TensorBoard, if asked for.

A sink gets numbers and short strings. Its library is imported when it is opened, and not before.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from megatron.config.training import LoggingConfig

if TYPE_CHECKING:  # read_metrics needs no torch
    from megatron.parallel.mesh import Mesh

FINISH_SECONDS = 60  # that a lost network may hold up the end of a run
INIT_SECONDS = 30  # or its start


class Sink(Protocol):
    """May raise anything: Metrics says it once and goes on without the sink."""

    name: str
    place: str

    def write(self, line: Mapping[str, float | str]) -> None:
        """Send a line of metrics; "step" is where it belongs."""

    def close(self, exit_code: int) -> None:
        """Send what is left. exit_code: of the run."""


def open_sinks(
    logging: LoggingConfig,
    metrics_path: str | Path | None,
    environ: Mapping[str, str],
    start: int,
    facts: Mapping[str, Any],
    mesh: Mesh,
    stop: Callable[[str], None],
    say: Callable[[str], None] = print,
) -> list[Sink]:
    """The sinks asked for, on the first rank of the mesh; `say` is told of one that cannot open.

    start: steps done before this process. facts: the settings of the run, as JSON takes them.
    stop: called with "wandb", from some thread, where a person stops the run on wandb's page.
    """
    if not mesh.is_first:
        return []
    openers: dict[str, Callable[[], Sink]] = {}
    if logging.tensorboard_dir is not None:
        directory = logging.tensorboard_dir
        openers["TensorBoard"] = lambda: TensorBoardSink(directory, start)
    if logging.wandb_project is not None:
        project = logging.wandb_project
        assert metrics_path is not None  # require_sinks
        folder = Path(metrics_path).parent
        openers["wandb"] = lambda: WandbSink(
            project, folder, environ, start, facts, partial(stop, "wandb")
        )
    sinks = []
    for name, opened in openers.items():
        try:
            sinks.append(opened())
        except Exception as error:  # what the library raises: no reason not to train
            say(f"{name} gets nothing of this run: {one_line(error)}")
    return sinks


class TensorBoardSink:
    """Scalars in an event file; steps above `start` of an earlier process vanish."""

    name = "TensorBoard"

    def __init__(self, directory: str | Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(directory)
        # Of a run from scratch nothing earlier stands; step `start` of a resumed one does.
        purge = start + 1 if start else 0
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=30)

    def write(self, line: Mapping[str, float | str]) -> None:
        for key, value in line.items():
            if key != "step" and not isinstance(value, str):
                self._writer.add_scalar(key, value, global_step=int(line["step"]))

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases that later processes continue.

    Steps that a resumed run takes again are there twice: nothing is taken out of a run of wandb.
    What goes out is the lines and the facts, neither code nor what else the machine does.
    """

    name = "wandb"

    def __init__(
        self,
        project: str,
        folder: Path,
        environ: Mapping[str, str],
        start: int,
        facts: Mapping[str, Any],
        stop: Callable[[], None],
    ) -> None:
        """folder: gets wandb.json, which names the run, and wandb/, which holds its data.

        Without a network the run is kept on disk; a later process may be on line again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if "WANDB_CACHE_DIR" not in environ:  # else it logs to the home directory
            os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")
        run_id = run_of(folder / "wandb.json", project, start)
        self.place = f"run {run_id} of project {project}"
        mode, reason = wandb_mode(environ), ""
        try:
            self._run = _open_run(mode, project, folder, run_id, facts, stop)
        except Exception as error:  # of the network, of the key
            if mode == "offline":
                raise
            mode, reason = "offline", f" because of {one_line(error)}"
            self._run = _open_run(mode, project, folder, run_id, facts, stop)
        if mode == "offline":
            files = folder / "wandb" / f"offline-run-*-{run_id}"
            self.place += f", kept on disk{reason}; wandb sync {files} sends it"

    def write(self, line: Mapping[str, float | str]) -> None:
        self._run.log(dict(line))

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def wandb_mode(environ: Mapping[str, str]) -> str:
    """What WANDB_MODE says; else "online" where there is a key, and "offline" where not."""
    if environ.get("WANDB_MODE"):
        return environ["WANDB_MODE"]
    return "online" if environ.get("WANDB_API_KEY") or _in_netrc(environ) else "offline"


def _in_netrc(environ: Mapping[str, str]) -> bool:
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    home = Path(environ.get("HOME", "/"))
    path = Path(environ["NETRC"]) if environ.get("NETRC") else home / ".netrc"
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except FileNotFoundError:
        return False


def run_of(path: Path, project: str, start: int) -> str:
    """The run's id: what `path` keeps if a run of this project goes on, else a new one."""
    if start and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["project"] == project:
            return str(kept["id"])
    new = {"project": project, "id": secrets.token_hex(4)}
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(new) + "\n", encoding="utf-8")
    beside.replace(path)
    return new["id"]


def _open_run(
    mode: str,
    project: str,
    folder: Path,
    run_id: str,
    facts: Mapping[str, Any],
    stop: Callable[[], None],
) -> Any:
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=FINISH_SECONDS,
        init_timeout=INIT_SECONDS,
        silent=True,
        stop_fn=stop,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    with _process_hooks_kept():
        wandb.setup(settings)  # or else it speaks of the key it found
        try:
            run = wandb.init(
                project=project,
                dir=str(folder),
                id=run_id,
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                config=dict(facts),
                allow_val_change=True,  # a resumed run may have other settings
                settings=settings,
            )
        except Exception:
            wandb.teardown()  # its service holds the id
            raise
    # wandb's own count of steps only grows, and drops lines of a step that it has passed.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


@contextmanager
def _process_hooks_kept() -> Iterator[None]:
    """wandb puts hooks of its own in sys to learn the exit code, which close() tells it."""
    leave, report = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = leave, report


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
