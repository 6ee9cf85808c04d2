"""The training loop: batches in; metrics, evaluations and checkpoints out.

    batches of a step  ->  learning rate  ->  train_step (step.py)  ->  reason to end
                       ->  replica check  ->  log  ->  evaluate  ->  save  ->  next step, or end

Pretraining (pretrain.py) and fine-tuning (tasks/finetune.py) use this loop with different batches,
evaluations, ways to save and callbacks (callbacks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.save import Saver
from megatron.config.launch import SIGNALS, Stopped, StopSignals
from megatron.config.training import TrainingConfig
from megatron.data.batch import Batch
from megatron.train.callbacks import Clock, Training, call, reported
from megatron.train.evaluate import in_words
from megatron.train.metrics import Metrics
from megatron.train.replicas import check_replicas
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step
from megatron.train.watch import note


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Everything that `train` needs besides the state."""

    training: TrainingConfig
    batches: Generator[Sequence[Batch]]
    """This rank's micro-batches of each step up to training.steps."""
    learning_rate: Callable[[int], float]
    """The learning rate of an update, by its number, counted from 1."""
    evaluate: Callable[[TrainState], float | None]
    """Evaluates and records; returns the loss, or None if there is nothing to evaluate. Raises
    Stopped on all ranks if `signals.is_urgent()` on one."""
    save: Callable[[TrainState, float | None], None] | None
    """Saves the state with its validation loss; every rank calls it at the same steps. None keeps
    nothing."""
    saver: Saver | None = None
    """Given if `save` may still be writing after it has returned."""
    metrics: Metrics
    """Has the callbacks."""
    signals: StopSignals
    facts: Callable[[TrainState], Mapping[str, Any]]
    """Fields of a line of metrics besides the step and its numbers."""
    log_interval: int
    save_interval: int | None
    evaluate_first: bool = False


def train(state: TrainState, loop: Loop, begin: Callable[[], object] = lambda: None) -> str:
    """Train to `train_iters` or to a requested exit; return the reason for the end. begin: called
    after the callbacks' pre_train.

    At the end the state is evaluated and saved. After a signal it is only logged and saved, since
    Slurm does not wait for an evaluation or a check: a running one is cut short. After a signal
    in the last step the reason is still `train_iters`, unless it cuts an evaluation or check short.
    """
    training, saver, clock, metrics = loop.training, loop.saver, Clock(), loop.metrics
    callbacks = metrics.callbacks
    about = Training(state, training.steps, metrics.write, metrics.log, clock, loop.signals)
    for each in callbacks:
        each.training = replace(about, _callback=each)
    wants_outputs = any(each.wants_outputs for each in callbacks)
    end: str | None = None
    checked: int | None = None  # the step of the last replica check

    def wants_stop() -> bool:
        """Whether this rank has a reason to stop; all ranks stop at the step where one has."""
        minutes = training.exit_duration_in_mins
        is_late = minutes is not None and clock.elapsed > 60 * minutes
        has_failed = saver is not None and saver.failed
        return is_late or loop.signals.received is not None or has_failed

    def is_due(interval: int | None) -> bool:
        """Whether the step is a multiple of `interval` or the run ends."""
        return end is not None or (interval is not None and state.step % interval == 0)

    @contextmanager
    def stoppable(phase: str) -> Iterator[None]:
        """Around a phase that a signal to one rank cuts short on all ranks; the run then ends."""
        nonlocal end
        note(phase)
        with clock.paused():
            try:
                yield
            except Stopped:
                reasons = state.mesh.control.gather(loop.signals.received)
                end = next((each for each in reasons if each in SIGNALS), "SIGTERM")
                metrics.log(f"step {state.step} | {end} cut the {phase} short")

    def evaluate() -> float | None:
        """The loss of an evaluation; None without one."""
        loss = None
        with stoppable("evaluation"):
            call(callbacks, "pre_evaluation")
            loss = loop.evaluate(state)
            call(callbacks, "post_evaluation", loss)
            about.flush()
        return loss

    with closing(loop.batches), reported(callbacks):
        call(callbacks, "pre_train")
        begin()
        if loop.evaluate_first:
            evaluate()
        if end is None and state.step >= training.steps:
            end = "train_iters"
        while end is None:
            with clock.waiting():
                batches = next(loop.batches)
            lr = loop.learning_rate(state.updates + 1)
            call(callbacks, "pre_step", batches)
            note("train step", state.step)
            result = train_step(state, batches, lr, wants_stop, return_outputs=wants_outputs)
            metrics.advance()
            call(callbacks, "post_step", result)
            result = replace(result, outputs=None)  # the next step needs their memory

            if state.step >= training.steps:
                end = "train_iters"
            elif result.stop:
                if saver is not None:
                    saver.close()  # raises on all ranks at once if a save has failed
                # The lowest rank with a signal, or a request of a callback, gives the reason.
                received = filter(None, state.mesh.control.gather(loop.signals.received))
                end = next(received, "exit_duration_in_mins")
            elif training.exit_interval and state.step % training.exit_interval == 0:
                end = "exit_interval"

            every = training.check_replicas_interval
            is_checked = bool(every) and (is_due(loop.save_interval) or state.step % every == 0)
            if is_checked and end not in SIGNALS:
                with stoppable("replica check"):  # before a save, so only correct states are saved
                    check_replicas(state, batches, checked, loop.signals.is_urgent)
                    checked = state.step
            if is_due(loop.log_interval):
                log_step(state, loop, result, lr, about)
            validation_loss = None
            if end not in SIGNALS and is_due(training.eval_interval):
                validation_loss = evaluate()
            with clock.paused():
                if loop.save is not None and is_due(loop.save_interval):
                    note("save")
                    call(callbacks, "pre_save")
                    loop.save(state, validation_loss)
                    call(callbacks, "post_save")
                    about.flush()
                if saver is not None:
                    if end is not None:
                        saver.close()
                    # A rank that sees a failed save votes to stop in the next step; then all raise.
                    for report in [] if saver.failed else saver.reports():
                        metrics.write({"step": state.step, **report.facts()})
                        metrics.log(f"step {state.step} | {report}")
        call(callbacks, "post_train", end)
        about.flush()
    return end


def log_step(state: TrainState, loop: Loop, result: StepResult, lr: float, about: Training) -> None:
    line: dict[str, Any] = {
        "step": state.step,
        **loop.facts(state),
        "loss": result.loss,
        **result.terms,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "elapsed_seconds": about.clock.elapsed,
    }
    texts = [
        f"step {state.step}/{about.steps} ({100 * state.step / about.steps:.0f} %)",
        f"loss {result.loss:.4f}{in_words(result.terms)}",
        f"lr {lr:.3e}",
        f"grad norm {result.grad_norm:.3f}",
    ]
    if state.scaler.is_scaling:
        line |= {"loss_scale": state.scaler.scale, "skipped_steps": state.skipped}
        texts.append(f"loss scale {state.scaler.scale:g}, {state.skipped} skipped")
    call(loop.metrics.callbacks, "pre_log")
    added, shown = about.take()
    for name in line.keys() & added.keys():
        raise ValueError(f"{about.owner(name)} adds {name}, which the line has already")
    loop.metrics.write(line | added)
    loop.metrics.log(" | ".join(texts + shown))
