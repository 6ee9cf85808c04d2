"""Callbacks: what a user's program does at each point of a training, without a change to the loop.

    pre_train  [pre_step  post_step  pre_log  log_metrics  pre_evaluation  post_evaluation
                pre_save  post_save] of each step  post_train  close

Throughput, memory, progress bar, profiler, generated samples, TensorBoard and wandb are callbacks
themselves (the last three in inference/samples.py and loggers.py). Importing this needs no torch.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import methodcaller
from pathlib import Path
from pkgutil import resolve_name
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from megatron.config.parts import PARTS, misfit
from megatron.data.batch import Batch
from megatron.errors import UsageError
from megatron.models.registry import find_kind
from megatron.train.signals import SIGNALS, StopSignals

if TYPE_CHECKING:
    from megatron.config.pretrain import PretrainConfig
    from megatron.parallel.mesh import Mesh
    from megatron.train.inputs import Inputs
    from megatron.train.state import TrainState
    from megatron.train.step import StepResult

Line = dict[str, Any]


class Clock:
    """Time since the start of the training."""

    def __init__(self) -> None:
        self._start, self._paused = time.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def training(self) -> float:
        """Seconds outside `paused`: of steps and of waiting for their data."""
        return self.elapsed - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - before


@dataclass
class Training:
    """The training that a callback belongs to."""

    state: TrainState
    steps: int
    """The step at which the training ends."""
    write: Callable[[Line], None]
    """Writes a line to metrics.jsonl, on the first rank; it has at least "step"."""
    log: Callable[[str], None]
    """Writes a line to the console, on the first rank."""
    clock: Clock
    _signals: StopSignals
    _added: Line = field(default_factory=dict)  # to the next line of metrics
    _texts: dict[tuple[str, ...], str] = field(default_factory=dict)  # for the console, by names

    def add(self, text: str | None = None, **numbers: float) -> None:
        """Add numbers to the next line of metrics, which has those of the first rank. text: shows
        them on the console; by default names and values. Raises TypeError for other values, such as
        tensors, which the host would wait for."""
        for name, number in numbers.items():
            if not isinstance(number, int | float):
                kind = type(number).__name__
                raise TypeError(f"{name} is a {kind}; a line of metrics has int and float")
        if text is None:
            text = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
        self._added |= numbers
        self._texts[tuple(numbers)] = text

    def take(self) -> tuple[Line, list[str]]:
        """(numbers that were added, their texts for the console) since the last call."""
        taken = dict(self._added), [text for text in self._texts.values() if text]
        self._added.clear()
        self._texts.clear()
        return taken

    def stop(self, reason: str) -> None:
        """End the run after the next step, in which the ranks agree on it, or after this one if its
        backward is still to come. One rank is enough. reason: the run records it as its end."""
        if reason in SIGNALS:
            raise ValueError(f"{reason} is a signal's, and no reason of a callback")
        self._signals.ask(reason)

    def paused(self) -> AbstractContextManager[None]:
        """Context whose time does not count in the throughput."""
        return self.clock.paused()


class Callback:
    """Base class of callbacks; a subclass overrides the methods that it needs.

    Every rank calls the same methods at the same steps, so they may use collectives. All run after
    the one time that the host waits for the device in a step. An error ends the run with its
    traceback. Random numbers that a callback draws change no result of the run; weights are for
    reading: a change to one of several replicas is an error at the next replica check.
    """

    wants_outputs: ClassVar[bool] = False
    """Whether results of steps have `outputs`: all logits and labels of the global batch."""
    may_fail: ClassVar[bool] = False
    """Whether the run goes on without this callback after an error in log_metrics or close."""
    training: Training
    """Set before pre_train."""

    def __init__(self, config: Any = None) -> None:
        """config: the PretrainConfig of the run."""
        self.config = config

    def pre_train(self) -> None:
        """Before the first step, and before a resumed checkpoint's evaluation."""

    def pre_step(self, batches: Sequence[Batch]) -> None:
        """Before a step. batches: this rank's micro-batches."""

    def post_step(self, result: StepResult) -> None:
        """After a step; state.step is its number."""

    def pre_log(self) -> None:
        """Before a line of metrics of a step: the last call for `training.add`."""

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, on every rank; times are those of the rank."""

    def pre_evaluation(self) -> None:
        """Before an evaluation."""

    def post_evaluation(self, loss: float | None) -> None:
        """After an evaluation that no signal has cut short. loss: None without data."""

    def pre_save(self) -> None:
        """Before a checkpoint."""

    def post_save(self) -> None:
        """After a checkpoint; one of --async-save may still be written."""

    def post_train(self, end: str) -> None:
        """After the last step. end: the reason for the end."""

    def on_error(self, error: Exception) -> None:
        """On the rank that raised an error in training, before it ends the run; others may see an
        error of the connection to that rank, or end without a call."""

    def close(self, exit_code: int) -> None:
        """After the run's last line of metrics, also after an error, which waits for a few seconds
        at most."""


HOOKS = {
    name: len(inspect.signature(method).parameters) - 1
    for name, method in vars(Callback).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""Number of arguments of each method of Callback."""


def call(callbacks: Sequence[Callback], hook: str, *arguments: object) -> None:
    """Calls this method of each callback."""
    for each in tuple(callbacks):
        methodcaller(hook, *arguments)(each)


@contextmanager
def reported(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Tells the callbacks of an error, and raises it again."""
    try:
        yield
    except Exception as error:
        call(callbacks, "on_error", error)
        raise


def open_callback(name: str, config: Any, model: type) -> Callback:
    """The user's own of --callbacks. Raises UsageError for one that is no Callback, has a method
    that the loop would not call, or wants outputs of a model without them."""
    made = PARTS["callbacks"].find(name)(config=config)
    wrong = _misfit_of_methods(made)
    if not wrong and made.wants_outputs and not hasattr(model, "logits"):
        wrong = f"it wants outputs, and a {model.__name__} has no logits"
    if wrong:
        allowed = f"module:name of a subclass of megatron.api.Callback ({wrong})"
        raise UsageError("--callbacks", name, allowed)
    callback: Callback = made
    return callback


def _misfit_of_methods(made: Any) -> str:
    """Why the loop cannot use an object as a callback; empty if it can."""
    if not isinstance(made, Callback):
        return f"it makes a {type(made).__name__}"
    for name in dir(made):
        if name in HOOKS:
            if wrong := misfit(getattr(made, name), (), HOOKS[name]):
                return f"{name}: {wrong}"
        elif name.startswith(("pre_", "post_", "on_")):
            near = get_close_matches(name, HOOKS, 1) or list(HOOKS)
            return f"{name} is never called; {', '.join(near)} would be"
    return ""


class Throughput(Callback):
    """Tokens, or samples without tokens, per second of training since the last line."""

    def pre_train(self) -> None:
        self.tokens, self.since = 0, self.training.clock.training

    def pre_step(self, batches: Sequence[Batch]) -> None:
        self.unit = batches[0].unit

    def post_step(self, result: StepResult) -> None:
        self.tokens += result.tokens

    def pre_log(self) -> None:
        now = self.training.clock.training
        rate = self.tokens / (now - self.since)
        self.training.add(f"{rate:.0f} {self.unit}/s", **{f"{self.unit}_per_second": rate})
        self.tokens, self.since = 0, now


class PeakMemory(Callback):
    """The largest peak memory of a rank, see `peak_memory`."""

    def pre_log(self) -> None:
        peak = peak_memory(self.training.state.mesh)
        self.training.add(f"{peak / 2**30:.1f} GiB", peak_memory_bytes=peak)


class DocumentCounts(Callback):
    """Documents since the last line that were cut or empty, where they can be."""

    def pre_train(self) -> None:
        self.counts = Counter[str]()

    def pre_step(self, batches: Sequence[Batch]) -> None:
        for each in batches:
            for kind, number in (("cut", each.num_cut), ("empty", each.num_empty)):
                if number is not None:
                    self.counts[kind] += number

    def pre_log(self) -> None:
        mesh = self.training.state.mesh
        by_rank = mesh.control.gather(self.counts) if self.counts else []
        for kind in self.counts:  # ranks that share a model read the same samples
            number = sum(each[kind] for each in by_rank) * mesh.batch.size // mesh.size()
            text = f"{number} documents {kind}" if number else ""
            self.training.add(text, **{f"{kind}_documents": number})
        self.counts.clear()


class Progress(Callback):
    """A progress bar on the first rank's terminal. A log file has none: it would hide the lines."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.bar: tqdm[Any] | None = None

    def pre_train(self) -> None:
        state = self.training.state
        if state.mesh.is_first and sys.stderr.isatty():
            start, steps = state.step, self.training.steps
            self.bar = tqdm(initial=start, total=steps, unit="step", desc=self.name)

    def post_step(self, result: StepResult) -> None:
        if self.bar is not None:
            self.bar.update()

    def close(self, exit_code: int) -> None:
        if self.bar is not None:
            self.bar.close()


class Profiler(Callback):
    """A trace of torch's profiler of the steps `first` to `last`: a file of each rank in `folder`,
    for Perfetto or chrome://tracing."""

    def __init__(self, first: int, last: int, folder: Path) -> None:
        super().__init__()
        self.first, self.last, self.folder = first, last, folder
        self.profile: Any = None

    def pre_step(self, batches: Sequence[Batch]) -> None:
        if self.training.state.step + 1 == self.first:
            from torch.profiler import profile

            with self.training.paused():  # it imports sympy, which takes seconds
                self.profile = profile()  # of the host, and of the GPU where there is one
                self.profile.start()

    def post_step(self, result: StepResult) -> None:
        if self.training.state.step == self.last:
            self.write()

    def post_train(self, end: str) -> None:
        self.write()

    def write(self) -> None:
        if self.profile is None:
            return
        training, mesh, profile = self.training, self.training.state.mesh, self.profile
        self.profile = None
        with training.paused():
            profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self.folder / f"rank_{mesh.control.rank}.json.gz"))
        training.log(f"step {training.state.step} | profile of each rank in {self.folder}")


def usual(name: str) -> list[Callback]:
    """Those of every training; name: of the progress bar."""
    return [Throughput(), PeakMemory(), DocumentCounts(), Progress(name)]


def open_callbacks(config: PretrainConfig, inputs: Inputs) -> list[Callback]:
    """Those that the settings of a run ask for. Raises UsageError for one that does not fit."""
    logging, file = config.logging, config.metrics_file()
    model: type = resolve_name(find_kind(config.model.kind).model)
    callbacks = [open_callback(name, config, model) for name in logging.callbacks]
    if logging.sample_interval is not None:
        samples = resolve_name("megatron.inference.samples:TextSamples")
        callbacks.append(samples(config, inputs))
    first, last = logging.profile_step_start, logging.profile_step_end
    if first is not None and last is not None and file is not None:
        callbacks.append(Profiler(first, last, Path(file).parent / "profile"))
    return callbacks


def peak_memory(mesh: Mesh) -> int:
    """The largest peak memory of a rank so far, in bytes: on GPUs of its tensors, on CPUs of the
    whole process with its libraries (every rank calls this)."""
    import torch

    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(mesh.device)
    else:
        peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    return max(mesh.control.gather(peak))
