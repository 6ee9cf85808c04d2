"""The project's own callbacks: speed, memory, time left, phases, progress bar.

Those of every training are `usual`; settings ask for the others. Generated samples are in
inference/samples.py, the profile in profiling.py, TensorBoard and wandb in loggers.py. Importing
this needs no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from pkgutil import resolve_name
from resource import RUSAGE_SELF, getrusage
from socket import gethostname
from time import monotonic
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.data.batch import Batch
from megatron.models.registry import find_kind
from megatron.train.callbacks import Callback, open_callback

if TYPE_CHECKING:
    from megatron.config.pretrain import PretrainConfig
    from megatron.parallel.mesh import Mesh
    from megatron.train.inputs import Inputs
    from megatron.train.phases import Phases
    from megatron.train.state import TrainState
    from megatron.train.step import StepResult
    from megatron.train.utilization import Flops

COMPUTING = ("forward", "backward", "forward and backward")


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
    """The largest peak memory of a rank, see `peak_memory`; on a GPU, of how much. Records that
    of every rank when one has grown by 1 %."""

    def pre_train(self) -> None:
        self.recorded: list[int] = []

    def pre_log(self) -> None:
        mesh = self.training.state.mesh
        by_rank, of_all = peak_memory(mesh), ""
        if mesh.device.type == "cuda":
            import torch

            total = torch.cuda.get_device_properties(mesh.device).total_memory
            of_all = f"of {total / 2**30:.0f} "
        peak = max(by_rank)
        self.training.add(f"{peak / 2**30:.1f} {of_all}GiB", peak_memory_bytes=peak)
        before = self.recorded or [0] * len(by_rank)
        if any(now > 1.01 * then for now, then in zip(by_rank, before, strict=True)):
            self.recorded = by_rank
            self.training.add("", peak_memory_bytes_by_rank=by_rank)


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


class StartTimes(Callback):
    """Seconds of each phase from the start of the process to the end of the first step, on the
    first rank."""

    def pre_train(self) -> None:
        self.is_due = True

    def post_step(self, result: StepResult) -> None:
        if not self.is_due:
            return
        from megatron.train.watch import start_seconds

        self.is_due, training, seconds = False, self.training, start_seconds()
        seconds["first step"] = seconds.pop("train step")
        phases = ", ".join(f"{phase} {each:.1f}" for phase, each in seconds.items())
        training.log(f"started in {sum(seconds.values()):.1f} s: {phases}")
        training.write({"step": training.state.step, "start_seconds": seconds})


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
        for name, index in (("median", (len(ranks) - 1) // 2), ("slowest", -1)):
            busy, rank, host, phases = ranks[index]
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
        self.name, self.bar = name, tqdm(disable=True)

    def pre_train(self) -> None:
        state = self.training.state
        hidden = not (state.mesh.is_first and sys.stderr.isatty())
        start, steps = state.step, self.training.steps
        self.bar = tqdm(initial=start, total=steps, unit="step", desc=self.name, disable=hidden)

    def post_step(self, result: StepResult) -> None:
        self.bar.update()

    def close(self, exit_code: int) -> None:
        self.bar.close()


class MemorySaves(Callback):
    """Checkpoints in memory (checkpoint/memory.py), except of steps that are on disk. Each is made
    before the next step: when the step has been recorded, evaluated and saved."""

    def __init__(
        self,
        config: PretrainConfig,
        state: TrainState,
        facts: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        """facts, files: of each checkpoint, see Saver. Raises UsageError if a host has no room, the
        same on every rank; every rank calls this."""
        from megatron.checkpoint.memory import MemoryCheckpoints

        super().__init__(config)
        self.facts, self.files = facts, files
        self.memory = MemoryCheckpoints.begin(config.checkpoint, state.slices(), state.mesh)

    def pre_train(self) -> None:
        self.batches: Sequence[Batch] | None = None  # of the last step
        self.loss: float | None = None  # of its evaluation
        self.is_on_disk = False
        self.checked: int | None = None  # the step of the last replica check

    def post_step(self, result: StepResult) -> None:
        self.loss, self.is_on_disk = None, False

    def post_evaluation(self, loss: float | None) -> None:
        self.loss = loss if loss is not None and isfinite(loss) else None

    def post_save(self) -> None:
        self.is_on_disk = not self.config.checkpoint.async_save  # else a kill may lose it

    def pre_step(self, batches: Sequence[Batch]) -> None:
        from megatron.config.launch import Stopped
        from megatron.train.replicas import check_replicas
        from megatron.train.watch import note

        done, self.batches = self.batches, batches
        training, state, settings = self.training, self.training.state, self.config.checkpoint
        if done is None or self.is_on_disk or state.step % settings.memory_checkpoint_interval:
            return
        note("save")
        start, facts = monotonic(), {**state.facts(), "validation_loss": self.loss, **self.facts}
        with training.paused():
            if any(state.mesh.control.gather(training.is_urgent())):
                return  # a signal came: the next step is saved on disk
            try:
                if self.config.training.check_replicas_interval:  # as before a save on disk
                    check_replicas(state, done, self.checked, training.is_urgent)
                    self.checked = state.step
                self.memory.save(state.step, state.slices(), facts, self.files)
            except Stopped:
                return
            except OSError as error:  # the same on every rank
                training.log(f"step {state.step} | warning: it is not kept in memory: {error}")
                return
        training.add("", memory_save_seconds=monotonic() - start)

    def post_train(self, end: str) -> None:
        try:
            self.memory.remove()  # the last step is on disk
        except OSError as error:  # the same on every rank
            self.training.log(f"warning: checkpoints in memory are not removed: {error}")


def usual(name: str, log_interval: int, flops: Flops | None = None) -> list[Callback]:
    """The callbacks of every training; name: of the progress bar."""
    counts = [Throughput(flops), PeakMemory(), DocumentCounts(), PhaseTimes(log_interval)]
    return [*counts, TimeLeft(), Progress(name)]


def open_callbacks(config: PretrainConfig, inputs: Inputs) -> list[Callback]:
    """StartTimes, and those that the settings of a run ask for. Raises UsageError for one that does
    not fit."""
    logging, file = config.logging, config.metrics_file()
    model: type = resolve_name(find_kind(config.model.kind).model)
    callbacks = [StartTimes(), *(open_callback(each, config, model) for each in logging.callbacks)]
    if logging.sample_interval is not None:
        samples = resolve_name("megatron.inference.samples:TextSamples")
        callbacks.append(samples(config, inputs))
    first, last = logging.profile_step_start, logging.profile_step_end
    if first is not None and last is not None and file is not None:
        profiler = resolve_name("megatron.train.profiling:Profiler")
        callbacks.append(profiler(first, last, Path(file).parent / "profile"))
    return callbacks


def peak_memory(mesh: Mesh) -> list[int]:
    """The peak memory of each rank so far, in bytes: on GPUs of its tensors, on CPUs of the whole
    process with its libraries (every rank calls this)."""
    import torch

    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(mesh.device)
    else:
        peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    return mesh.control.gather(peak)
