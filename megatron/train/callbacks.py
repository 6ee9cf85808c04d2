"""Callbacks: what a user's program does at each point of a training, without a change to the loop.

    pre_train  [pre_step  post_step  pre_log  log_metrics  pre_evaluation  post_evaluation
                pre_save  post_save] of each step  post_train  close

Throughput, memory and progress bar (monitors.py), the profile (profiling.py), TensorBoard and wandb
(loggers.py) and generated samples (inference/samples.py) are callbacks themselves. Importing this
needs no torch.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.launch import SIGNALS, StopSignals
from megatron.config.parts import PARTS, misfit
from megatron.data.batch import Batch
from megatron.errors import UsageError

if TYPE_CHECKING:
    from megatron.train.state import TrainState
    from megatron.train.step import StepResult

Line = dict[str, Any]
ENDS = ("train_iters", "exit_interval", "exit_duration_in_mins")
"""Reasons for the end of a training, besides signals and those of callbacks."""


PAUSE = "not training"


class Clock:
    """Time since the start of the training."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._paused, self._pauses = 0.0, 0
        self.waited = 0.0
        """Seconds of waiting for data."""
        self.span: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Context of each pause, called with PAUSE; a profile sets record_function."""

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
        self._pauses += 1
        try:
            with self.span(PAUSE):
                yield
        finally:
            self._pauses -= 1
            self._paused += (time.monotonic() - before) * (self._pauses == 0)  # the outermost

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around waiting for data."""
        before = time.monotonic()
        yield
        self.waited += time.monotonic() - before


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
    _callback: Callback | None = None
    _added: Line = field(default_factory=dict)  # to the next line of metrics
    _texts: dict[tuple[str, ...], str] = field(default_factory=dict)  # for the console, by names
    _owners: dict[str, Callback | None] = field(default_factory=dict)  # of names

    def add(self, text: str | None = None, **values: Any) -> None:
        """Add values to the next line of metrics, which has those of the first rank: numbers,
        strings, or lists and dicts of them. text: shows them on the console; by default names and
        values. A value that is added after the line of a step, such as in post_evaluation, gets a
        line of its own.
        Raises TypeError for other values, such as tensors, which the host would wait for, and
        ValueError for a name that another callback adds."""
        for name, value in values.items():
            if (owner := self._owners.setdefault(name, self._callback)) is not self._callback:
                raise ValueError(f"{name}: {type(owner).__name__} adds it to the metrics already")
            if not isinstance(value, int | float | str | list | Mapping):
                kind = type(value).__name__
                raise TypeError(
                    f"{name} is a {kind}, and must be a number, str, list or dict: float({name})"
                )
        if text is None:
            shown = {n: f"{v:.4g}" if isinstance(v, float) else v for n, v in values.items()}
            text = ", ".join(f"{name} {value}" for name, value in shown.items())
        self._added |= values
        self._texts[tuple(values)] = text

    def owner(self, name: str) -> str:
        """The class of the callback that added this value."""
        return type(self._owners[name]).__name__

    def take(self) -> tuple[Line, list[str]]:
        """(numbers that were added, their texts for the console) since the last call."""
        taken = dict(self._added), [text for text in self._texts.values() if text]
        self._added.clear()
        self._texts.clear()
        return taken

    def flush(self) -> None:
        """Write what was added since the last line as a line of its own."""
        added, texts = self.take()
        if added:
            self.write({"step": self.state.step, **added})
        if texts:
            self.log(" | ".join([f"step {self.state.step}", *texts]))

    def stop(self, reason: str) -> None:
        """End the run after the next step, in which the ranks agree on it, or after this one if its
        backward is still to come. One rank is enough. reason: the run records it as its end."""
        if reason in ("", *SIGNALS, *ENDS):
            raise ValueError(f"stop: {reason!r} is a reason of the loop's own; name another")
        self._signals.ask(reason)

    def is_urgent(self) -> bool:
        """Whether a signal came to this rank, whose sender waits for little more than a save."""
        return self._signals.is_urgent()

    def paused(self) -> AbstractContextManager[None]:
        """Context whose time does not count in the throughput."""
        return self.clock.paused()


class Callback:
    """Base class of callbacks; a subclass overrides the methods that it needs.

    Every rank calls the same methods at the same steps, so those between pre_train and post_train
    may use collectives. The host has waited for a step's results before post_step; the loop does
    not wait once more. An error ends the run with its traceback. Random numbers that a callback
    draws change no result of the run. Weights are for reading: a change to one of several replicas
    is an error at the next replica check.

    self.config has the settings of the run; self.training, set before pre_train, its state.
    Class attributes: with wants_outputs = True results of steps have `outputs`, all logits and
    labels of the global batch. With may_fail = True the run goes on after an error in log_metrics
    or close; after one in log_metrics the callback gets no more lines on that rank, and is closed
    there.
    """

    wants_outputs: ClassVar[bool] = False
    may_fail: ClassVar[bool] = False
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
        """Before a line of metrics of a step: the last call whose `training.add` is part of it."""

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, on every rank; times are those of the rank. Without collectives,
        if it `may_fail`."""

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

    def on_error(self, error: BaseException) -> None:
        """On the rank that raised an error or SystemExit in training, before it ends the run.
        Others may see an error of the connection to that rank, or end without a call."""

    def close(self, exit_code: int) -> None:
        """After the run's last line of metrics, in a thread, without collectives; after an error,
        which waits for a few seconds at most."""


HOOKS = {
    name: len(inspect.signature(method).parameters) - 1
    for name, method in vars(Callback).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""Number of arguments of each method of Callback."""


def call(callbacks: Sequence[Callback], hook: str, *arguments: object) -> None:
    """Calls this method of each callback."""
    for each in callbacks:
        getattr(each, hook)(*arguments)


@contextmanager
def reported(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Tells the callbacks of an error, and raises it again; errors of on_error are notes to it."""
    try:
        yield
    except BaseException as error:
        for each in callbacks:
            try:
                each.on_error(error)
            except Exception as another:
                error.add_note(f"{type(each).__name__}.on_error raised {another!r}")
        raise


def open_callback(name: str, config: Any, model: type) -> Callback:
    """The user's own of --callbacks. Raises UsageError for one that is no Callback, has a method
    that the loop would not call, or wants outputs of a model without them."""
    part = PARTS["callbacks"].find(name)
    try:
        made = part(config=config)
    except ValueError as error:
        error.add_note(f"in --callbacks {name}")
        raise
    wrong = _misfit_of_methods(made)
    if not wrong and made.wants_outputs and not hasattr(model, "logits"):
        wrong = f"it wants outputs, and a {model.__name__} has no logits"
    if wrong:
        allowed = f"module:name of a subclass of megatron.api.Callback ({wrong})"
        raise UsageError("--callbacks", name, allowed)
    made.config = config  # also where its constructor does not call that of Callback
    return made


def _misfit_of_methods(made: Any) -> str:
    """Why the loop cannot use an object as a callback; empty if it can."""
    if not isinstance(made, Callback):
        return f"it makes a {type(made).__name__}"
    for name in dir(made):
        if name in HOOKS:
            if wrong := misfit(getattr(made, name), (), HOOKS[name]):
                return f"{name}: {wrong}"
        elif callable(inspect.getattr_static(made, name)):
            near = get_close_matches(name, HOOKS, 1, 0.9)
            if near or name.startswith(("pre_", "post_", "on_")):
                known = ", ".join(near or HOOKS)
                return f"{name} is never called; {known} would be"
    return ""
