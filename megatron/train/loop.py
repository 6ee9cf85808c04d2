"""The training loop: batches in, metrics and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp, inf
from typing import Any

from megatron.config.resume import data_fingerprint
from megatron.config.training import TrainingConfig
from megatron.data.batch import Batch, Samples
from megatron.train.evaluate import mean_losses
from megatron.train.loader import prefetch
from megatron.train.metrics import Metrics
from megatron.train.replicas import check_replicas
from megatron.train.saver import Saver
from megatron.train.signals import SIGNALS, StopSignals, exit_code
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What `train` needs beside the state."""

    training: TrainingConfig
    log_interval: int
    global_batch_size: int
    learning_rate: Callable[[int], float]  # of the update's number, counted from 1
    train_data: Samples
    validation_data: Samples | None
    metrics: Metrics
    signals: StopSignals
    saver: Saver
    save_interval: int | None
    owes_evaluation: bool = False  # the checkpoint it went on from was saved without one


def tell_start(
    state: TrainState, loop: Loop, news: Sequence[str], identity: Mapping[str, Any]
) -> None:
    """Say, on the console and in the record, where a run starts and what it runs on.

    news: of `start.begin`. identity: that of the data sets.
    """
    facts, data = state.describe(), data_fingerprint(identity)
    loop.metrics.describe(facts)
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in (state.mesh.data, state.mesh.tensor))
    size = f"{facts['parameters']:,} parameters in {facts['dtype']}"
    lr = loop.learning_rate(state.updates + 1)
    for each in (
        f"{size} on {facts['device']}, ranks {axes}",
        *news,
        f"step {state.step}, {state.samples} samples consumed, learning rate {lr:.3e}, data {data}",
    ):
        loop.metrics.say(each)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    loop.metrics.write({"step": state.step, "started": now, "data": data, **facts})


def train(state: TrainState, loop: Loop) -> str:
    """Train to `train_iters`, or to an exit that was asked for; return what ended it.

    At the end the state is evaluated and saved; after a signal it is saved alone, since the
    scheduler waits for no evaluation.
    """
    clock, agreed = Clock(), None
    loop.signals.arm()
    if loop.owes_evaluation and state.step % loop.training.eval_interval == 0:
        _evaluate(state, loop)  # a signal came when it was due
    end = "train_iters" if state.step >= loop.training.train_iters else None
    with closing(_steps_to_come(state, loop)) as steps:
        while end is None:
            batches, lr = next(steps), loop.learning_rate(state.updates + 1)
            result = train_step(state, batches, lr, wants_stop=lambda: _wants_stop(loop, clock))
            clock.tokens += result.tokens
            loop.metrics.advance()
            end = _end(state, loop, stop=result.stop)
            saves = _is_due(state, loop.save_interval, end)
            agreed = _check(state, loop, batches, saves, agreed)
            if _is_due(state, loop.log_interval, end):
                _log(state, loop, result, lr, clock)
            with clock.paused():
                validation_loss = None
                if end not in SIGNALS and _is_due(state, loop.training.eval_interval, end):
                    validation_loss = _evaluate(state, loop)
                if saves:
                    loop.saver.save(state, validation_loss)
                _report_saves(state, loop, is_last=end is not None)
    loop.metrics.write({"step": state.step, "ended": end, "exit_code": exit_code(end)})
    loop.metrics.say(_last_word(state, loop, end))
    return end


def _last_word(state: TrainState, loop: Loop, end: str) -> str:
    if end == "train_iters":
        return f"step {state.step} | done: --train-iters {loop.training.train_iters}"
    return f"step {state.step} | ended by {end}; the same command with --load goes on"


def _is_due(state: TrainState, interval: int | None, end: str | None) -> bool:
    """Whether what happens at every multiple of `interval`, and at the end, happens now."""
    return end is not None or (interval is not None and state.step % interval == 0)


def _check(
    state: TrainState, loop: Loop, batches: list[Batch], saves: bool, agreed: int | None
) -> int | None:
    """Compare replicas at their interval, and before a save: what is kept is what all hold.

    agreed: the last step at which all did, or None; returned anew.
    """
    interval = loop.training.check_replicas_interval
    if not interval or not (saves or state.step % interval == 0):
        return agreed
    check_replicas(state, batches, agreed)
    return state.step


class Clock:
    """Time spent since the start, and training throughput since it was last read."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.since = self.start
        self.tokens = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def tokens_per_second(self) -> float:
        """Since the last call, without what ran under `paused`."""
        now = time.monotonic()
        rate = self.tokens / (now - self.since)
        self.since, self.tokens = now, 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        self.since += time.monotonic() - before


def _steps_to_come(state: TrainState, loop: Loop) -> Generator[list[Batch]]:
    """This rank's micro-batches of each step up to `train_iters`."""
    size, left = loop.global_batch_size, loop.training.train_iters - state.step
    return prefetch(
        loop.train_data,
        range(state.samples, state.samples + left * size, size),
        micro_batch_size=loop.training.micro_batch_size,
        data_rank=state.mesh.data.rank,
        data_size=state.mesh.data.size,
    )


def _wants_stop(loop: Loop, clock: Clock) -> bool:
    """Whether this rank has a reason to leave; all leave at the step at which one has."""
    minutes = loop.training.exit_duration_in_mins
    is_late = minutes is not None and clock.elapsed > 60 * minutes
    return is_late or loop.signals.received is not None or loop.saver.failed


def _end(state: TrainState, loop: Loop, *, stop: bool) -> str | None:
    """What ends training after this step, the same on every rank; None goes on."""
    if state.step >= loop.training.train_iters:
        return "train_iters"
    if stop:
        loop.saver.close()  # raises on all ranks at once where a save has failed
        received = state.mesh.control.gather(loop.signals.received)
        return next(filter(None, received), "exit_duration_in_mins")
    interval = loop.training.exit_interval
    return "exit_interval" if interval and state.step % interval == 0 else None


def _log(state: TrainState, loop: Loop, result: StepResult, lr: float, clock: Clock) -> None:
    line = {
        "step": state.step,
        "samples": state.samples,
        "loss": result.loss,
        **result.terms,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens_per_second": clock.tokens_per_second(),
        "elapsed_seconds": clock.elapsed,
    }
    text = (
        f"step {state.step} | loss {result.loss:.4f}{_spell(result.terms)} | lr {lr:.3e} | "
        f"grad norm {result.grad_norm:.3f} | {line['tokens_per_second']:.0f} tokens/s"
    )
    if state.scaler.is_scaling:
        line |= {"loss_scale": state.scaler.scale, "skipped_steps": state.skipped}
        text += f" | loss scale {state.scaler.scale:g}, {state.skipped} skipped"
    loop.metrics.write(line)
    loop.metrics.say(text)


def _report_saves(state: TrainState, loop: Loop, *, is_last: bool) -> None:
    """Log the saves that have finished since the last step; the last one is waited for.

    One that failed is left to the next vote, since the ranks do not see it at the same step.
    """
    if is_last:
        loop.saver.close()
    for report in [] if loop.saver.failed else loop.saver.reports():
        loop.metrics.write({"step": state.step, **report.facts()})
        loop.metrics.say(f"step {state.step} | {report}")


def _evaluate(state: TrainState, loop: Loop) -> float | None:
    data, training = loop.validation_data, loop.training
    if data is None or training.eval_iters == 0:
        return None
    # A split smaller than what was asked for is evaluated whole.
    samples = min(training.eval_iters * loop.global_batch_size, data.samples_per_epoch)
    terms = mean_losses(
        state.model, state.objective, data, samples, training.micro_batch_size, state.mesh
    )
    loss, of_tokens = sum(terms.values()), next(iter(terms.values()))
    perplexity = inf if of_tokens > 700 else exp(of_tokens)  # of a run that diverges
    line = {
        "step": state.step,
        "samples": state.samples,
        "validation_loss": loss,
        **{f"validation_{name}": mean for name, mean in terms.items()},
        "validation_perplexity": perplexity,
        "validation_samples": samples,
    }
    loop.metrics.write(line)
    loop.metrics.say(
        f"step {state.step} | validation loss {loss:.4f}{_spell(terms)} | "
        f"perplexity {perplexity:.2f}"
    )
    return loss


def _spell(terms: Mapping[str, float]) -> str:
    """The terms of a loss that has several, in words."""
    if len(terms) == 1:
        return ""
    return f" ({', '.join(f'{name} {mean:.4f}' for name, mean in terms.items())})"
