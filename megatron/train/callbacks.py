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
from pathlib import Path
from pkgutil import resolve_name
from resource import RUSAGE_SELF, getrusage
from socket import gethostname
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
    from megatron.train.phases import Phases
    from megatron.train.state import TrainState
    from megatron.train.step import StepResult
    from megatron.train.utilization import Flops

Line = dict[str, Any]
ENDS = ("train_iters", "exit_interval", "exit_duration_in_mins")
"""Reasons for the end of a training, besides signals and those of callbacks."""
COMPUTING = ("forward", "backward", "forward and backward")


class Clock:
    """Time since the start of the training."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._paused, self._pauses = 0.0, 0
        self.waited = 0.0
        """Seconds of waiting for data."""

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
        strings, or dicts of them. text: shows them on the console; by default names and values.
        What is added after the line of a step, such as in post_evaluation, gets a line of its own.
        Raises TypeError for other values, such as tensors, which the host would wait for, and
        ValueError for a name that another callback adds."""
        for name, value in values.items():
            if (owner := self._owners.setdefault(name, self._callback)) is not self._callback:
                raise ValueError(f"{name}: {type(owner).__name__} adds it to the metrics already")
            if not isinstance(value, int | float | str | Mapping):
                kind = type(value).__name__
                raise TypeError(
                    f"{name} is a {kind}, and must be an int, float or str: float({name})"
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
    callback: Callback = made
    callback.config = config  # also where its constructor does not call that of Callback
    return callback


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


class Throughput(Callback):
    """Since the last line: time of a step, tokens (or samples without tokens) per second, share of
    the time that the host waits for data, and model FLOPs utilisation."""

    def __init__(self, flops: Flops | None = None) -> None:
        """flops: of a token; None leaves out what needs them."""
        super().__init__()
        self.flops = flops

    def pre_train(self) -> None:
        clock = self.training.clock
        self.tokens, self.steps, self.since, self.waited = 0, 0, clock.training, clock.waited

    def pre_step(self, batches: Sequence[Batch]) -> None:
        self.unit = batches[0].unit

    def post_step(self, result: StepResult) -> None:
        self.tokens += result.tokens
        self.steps += 1

    def pre_log(self) -> None:
        training, clock, unit = self.training, self.training.clock, self.unit
        devices = training.state.mesh.size()
        seconds = clock.training - self.since
        rate, of_step = self.tokens / seconds, seconds / self.steps
        waited = (clock.waited - self.waited) / seconds
        training.add(
            f"{1000 * of_step:,.0f} ms | {rate:,.0f} {unit}/s",
            **{f"{unit}_per_second": rate, f"{unit}_per_second_per_device": rate / devices},
            step_seconds=of_step,
        )
        training.add(
            f"{100 * waited:.0f} % waiting for data" * (waited > 0.02), data_wait_share=waited
        )
        if (flops := self.flops) is not None:
            per_device = rate / devices
            training.add("", tflops_per_device=per_device * flops.full / 1e12)
            if (peak := flops.peak) is not None:
                mfu = per_device * flops.full / peak
                training.add(f"MFU {100 * mfu:.0f} %", mfu=mfu)
                if flops.causal is not None:
                    training.add("", mfu_causal=per_device * flops.causal / peak)
        self.pre_train()


class PeakMemory(Callback):
    """The largest peak memory of a rank, see `peak_memory`; on a GPU, of how much."""

    def pre_log(self) -> None:
        mesh = self.training.state.mesh
        peak, of_all = peak_memory(mesh), ""
        if mesh.device.type == "cuda":
            import torch

            total = torch.cuda.get_device_properties(mesh.device).total_memory
            of_all = f"of {total / 2**30:.0f} "
        self.training.add(f"{peak / 2**30:.1f} {of_all}GiB", peak_memory_bytes=peak)


class TimeLeft(Callback):
    """Time until the last step at the pace since the first one, with evaluations and saves."""

    def pre_train(self) -> None:
        self.first: tuple[int, float] | None = None

    def post_step(self, result: StepResult) -> None:
        if self.first is None:  # compiles, and is slower than the others
            self.first = self.training.state.step, self.training.clock.elapsed

    def pre_log(self) -> None:
        assert self.first is not None
        (first, start), training = self.first, self.training
        step, elapsed = training.state.step, training.clock.elapsed
        pace = (elapsed - start) / (step - first) if step > first else elapsed
        seconds = (training.steps - step) * pace
        training.add(f"{duration(seconds)} left" if seconds else "", seconds_left=seconds)


def duration(seconds: float) -> str:
    """Seconds in the two largest units: 40 s, 5 min 40 s, 2 h 5 min, 3 d 4 h."""
    seconds = round(seconds)
    for unit, size, rest, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {rest}"
    minutes = f"{seconds // 60:.0f} min " if seconds >= 60 else ""
    return f"{minutes}{seconds % 60:.0f} s"


class PhaseTimes(Callback):
    """Seconds of forward and backward in the step before a line of metrics, and of each phase
    (phases.py): of the rank that takes the median time, and of the slowest."""

    def __init__(self, log_interval: int) -> None:
        super().__init__()
        self.log_interval = log_interval

    def pre_train(self) -> None:
        self.running: Phases | None = None
        self.timed: Phases | None = None

    def pre_step(self, batches: Sequence[Batch]) -> None:
        from megatron.train.phases import Phases

        state = self.training.state
        # A GPU has done its part of a step when the host has read the next step's loss.
        self.timed, self.running = self.running or self.timed, None
        if (state.step + 2) % self.log_interval == 0 or self.log_interval == 1:
            self.running = Phases(state.mesh.device)
        state.mark = str if self.running is None else self.running.mark

    def pre_log(self) -> None:
        if self.timed is None:
            return
        control, seconds, self.timed = self.training.state.mesh.control, self.timed.seconds(), None
        computing = sum(seconds.get(name, 0.0) for name in COMPUTING)
        ranks = control.gather((computing, control.rank, gethostname(), seconds))
        ranks.sort(key=lambda each: each[:2])
        for name, place in (("median", (len(ranks) - 1) // 2), ("slowest", -1)):
            busy, rank, host, phases = ranks[place]
            about = {"seconds": busy, "rank": rank, "host": host, "phases": phases}
            self.training.add("", **{f"{name}_{key}": each for key, each in about.items()})


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

    def pre_train(self) -> None:
        if self.training.state.step >= self.last:
            self.training.log(f"warning: --profile-step-end {self.last} is past: no trace")

    def pre_step(self, batches: Sequence[Batch]) -> None:
        step = self.training.state.step + 1  # a resumed run may begin between the two
        if self.profile is None and self.first <= step <= self.last:
            from torch.profiler import profile

            with self.training.paused():  # it imports sympy, which takes seconds
                self.profile = profile()  # of the host, and of the GPU where there is one
                self.profile.start()

    def post_step(self, result: StepResult) -> None:
        if self.training.state.step == self.last:
            self.write()

    def post_train(self, end: str) -> None:
        self.write()

    def on_error(self, error: BaseException) -> None:
        if self.profile is not None:  # one that runs at the end of a process crashes it
            self.profile.stop()

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


def usual(name: str, log_interval: int, flops: Flops | None = None) -> list[Callback]:
    """Those of every training; name: of the progress bar."""
    counts = [Throughput(flops), PeakMemory(), DocumentCounts(), PhaseTimes(log_interval)]
    return [*counts, TimeLeft(), Progress(name)]


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
