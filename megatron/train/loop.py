"""The training loop: batches in; metrics, evaluations and checkpoints out.

Pretraining (pretrain.py) and fine-tuning (tasks/finetune.py) are this loop with other batches,
another evaluation and another way to save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.config.training import TrainingConfig
from megatron.data.batch import Batch
from megatron.train.metrics import Metrics
from megatron.train.replicas import check_replicas
from megatron.train.signals import SIGNALS, StopSignals
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step
from megatron.train.watch import note


class Checkpoints(Protocol):
    """Saves that may still be written; checkpoint.save.Saver says what each does."""

    @property
    def failed(self) -> bool: ...

    def reports(self) -> Sequence[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What `train` needs beside the state."""

    training: TrainingConfig
    batches: Generator[Sequence[Batch]]
    """This rank's micro-batches of each step up to training.train_iters."""
    learning_rate: Callable[[int], float]
    """Of the update's number, counted from 1."""
    evaluate: Callable[[TrainState], float | None]
    """Evaluates and records; returns the loss, or None where there is nothing to evaluate."""
    save: Callable[[TrainState, float | None], None]
    """Saves the state with its validation loss; every rank calls it at the same steps."""
    saver: Checkpoints
    metrics: Metrics
    signals: StopSignals
    facts: Callable[[TrainState], Mapping[str, Any]]
    """What a line of metrics holds besides the step and its numbers."""
    log_interval: int
    save_interval: int | None
    post_step: Callable[[TrainState, StepResult], None] = lambda state, result: None
    owes_evaluation: bool = False
    """The checkpoint that this run resumes was saved without the evaluation that was due."""


def train(state: TrainState, loop: Loop) -> str:
    """Train to `train_iters`, or to an exit that was asked for; return what ended it.

    At the end the state is evaluated and saved; after a signal it is only saved, since the
    scheduler does not wait for an evaluation.
    """
    training, clock, agreed = loop.training, Clock(), None
    if loop.owes_evaluation and state.step % training.eval_interval == 0:
        loop.evaluate(state)
    end = "train_iters" if state.step >= training.train_iters else None
    with closing(loop.batches):
        while end is None:
            batches, lr = next(loop.batches), loop.learning_rate(state.updates + 1)
            result = train_step(state, batches, lr, wants_stop=lambda: _wants_stop(loop, clock))
            clock.tokens += result.tokens
            loop.metrics.advance()
            loop.post_step(state, result)
            end = _end(state, loop, stop=result.stop)

            saves = _is_due(state, loop.save_interval, end)
            interval = training.check_replicas_interval
            if interval and (saves or state.step % interval == 0):
                check_replicas(state, batches, agreed)  # before a save: what is kept is correct
                agreed = state.step
            if _is_due(state, loop.log_interval, end):
                _log(state, loop, result, lr, clock)
            with clock.paused():
                validation_loss = None
                if end not in SIGNALS and _is_due(state, training.eval_interval, end):
                    note("evaluation")
                    validation_loss = loop.evaluate(state)
                if saves:
                    note("save")
                    loop.save(state, validation_loss)
                if end is not None:
                    loop.saver.close()
                # A failed save is left to the next vote: ranks do not see it at the same step.
                for report in [] if loop.saver.failed else loop.saver.reports():
                    loop.metrics.write({"step": state.step, **report.facts()})
                    loop.metrics.log(f"step {state.step} | {report}")
    return end


def _is_due(state: TrainState, interval: int | None, end: str | None) -> bool:
    """Whether what happens at every multiple of `interval`, and at the end, happens now."""
    return end is not None or (interval is not None and state.step % interval == 0)


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
    rate = clock.tokens_per_second()
    line = {
        "step": state.step,
        **loop.facts(state),
        "loss": result.loss,
        **result.terms,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens_per_second": rate,
        "elapsed_seconds": clock.elapsed,
    }
    text = (
        f"step {state.step} | loss {result.loss:.4f}{spell(result.terms)} | lr {lr:.3e} | "
        f"grad norm {result.grad_norm:.3f} | {rate:.0f} tokens/s"
    )
    if state.scaler.is_scaling:
        line |= {"loss_scale": state.scaler.scale, "skipped_steps": state.skipped}
        text += f" | loss scale {state.scaler.scale:g}, {state.skipped} skipped"
    loop.metrics.write(line)
    loop.metrics.log(text)


def spell(terms: Mapping[str, float]) -> str:
    """The terms of a loss that has several, in words."""
    if len(terms) == 1:
        return ""
    return f" ({', '.join(f'{name} {mean:.4f}' for name, mean in terms.items())})"


class Clock:
    """Time spent since the start, and training throughput since it was last read."""

    def __init__(self) -> None:
        self.start = self.since = time.monotonic()
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
