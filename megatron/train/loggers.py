"""TensorBoard and Weights & Biases as callbacks, which show the lines of metrics.jsonl.

Importing this needs no torch. A library is imported when its callback is opened.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.training import LoggingConfig
from megatron.data.files import write_atomically
from megatron.libraries import Library, load
from megatron.train.callbacks import Callback
from megatron.train.metrics import one_line

if TYPE_CHECKING:
    import wandb

    from megatron.parallel.mesh import Mesh
else:
    wandb = Library("wandb")

LONGEST = 200  # most characters of a string that is shown
FINISH_SECONDS = 60  # the longest that a lost network may delay the end of a run
INIT_SECONDS = 30  # the same for its start


class Logger(Callback):
    """Shows the numbers and short strings of each line elsewhere, and samples as texts. An error
    ends it, not the run."""

    may_fail = True
    destination: str

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        if "sample" in line:
            name, text = f"sample_{line['sample']}", f"{line['prompt']}{line['text']}"
            self.show_text(line["step"], name, text)
            return
        shown = {}
        for key, value in line.items():
            is_short = isinstance(value, str) and len(value) <= LONGEST
            if is_short or isinstance(value, int | float):
                shown[key] = value
        self.show(shown)

    def show(self, line: Mapping[str, float | str]) -> None:
        raise NotImplementedError

    def show_text(self, step: int, name: str, text: str) -> None:
        raise NotImplementedError


class TensorBoard(Logger):
    """Scalars in an event file; steps of an earlier process after `start` are purged."""

    def __init__(self, directory: str | Path, start: int) -> None:
        self.destination = str(directory)
        # A run from scratch purges all earlier steps; a resumed one keeps step `start`.
        purge = start + 1 if start else 0
        self._writer = load("torch.utils.tensorboard").SummaryWriter(
            str(directory), purge_step=purge, flush_secs=30
        )

    def show(self, line: Mapping[str, float | str]) -> None:
        for key, value in line.items():
            if key != "step" and not isinstance(value, str):
                self._writer.add_scalar(key, value, global_step=int(line["step"]))

    def show_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, global_step=step)

    def close(self, exit_code: int) -> None:
        self._writer.close()


class Wandb(Logger):
    """A run of Weights & Biases that later processes continue.

    Steps that a resumed run repeats are there twice: nothing is removed from a run of wandb.
    Only the lines and the facts are sent, neither code nor other activity of the machine. wandb
    itself finds its key and WANDB_MODE. Without a key or a network, the run is kept on disk; a
    later process may be online again.
    """

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

    def show(self, line: Mapping[str, float | str]) -> None:
        self._run.log(dict(line))

    def show_text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: text})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def run_of(path: Path, project: str, start: int) -> str:
    """The run's id: the one in `path` if a run of this project is resumed, else a new one."""
    if start and path.exists():
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["project"] == project:
            return str(run["id"])
    run = {"project": project, "id": secrets.token_hex(4)}
    write_atomically(path, json.dumps(run).encode() + b"\n")
    return str(run["id"])


def open_loggers(
    logging: LoggingConfig,
    metrics_path: str | Path | None,
    environ: Mapping[str, str],
    start: int,
    facts: Mapping[str, Any],
    mesh: Mesh,
    stop: Callable[[str], None],
) -> list[Logger]:
    """The requested ones, on the first rank of the mesh, which prints where they are shown, or why
    one cannot open.

    start: steps done before this process. facts: the settings of the run, as JSON values.
    stop: called with "wandb", from some thread, when a person stops the run on wandb's page.
    """
    loggers: list[Logger] = []
    for name in ("TensorBoard", "wandb") if mesh.is_first else ():
        try:
            if name == "TensorBoard" and logging.tensorboard_dir is not None:
                loggers.append(TensorBoard(logging.tensorboard_dir, start))
            if name == "wandb" and logging.wandb_project is not None:
                assert metrics_path is not None  # see PretrainConfig.check
                folder, project = Path(metrics_path).parent, logging.wandb_project
                loggers.append(Wandb(project, folder, environ, start, facts, stop))
        except Exception as error:  # any error of the library; the run trains without it
            print(f"{name} gets nothing of this run: {one_line(error)}")
    for each in loggers:
        print(f"metrics are shown by {type(each).__name__}, too: {each.destination}", flush=True)
    return loggers
