"""The training loop: batches in, metrics and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp

import torch
from torch.distributed import ReduceOp

from megatron.config.training import TrainingConfig
from megatron.data.gpt2 import Batch, GPT2Dataset
from megatron.data.sampler import micro_batches
from megatron.parallel.collectives import all_reduce
from megatron.train.evaluate import mean_loss
from megatron.train.metrics import Metrics
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What `train` needs beside the state."""

    training: TrainingConfig
    global_batch_size: int
    learning_rate: Callable[[int], float]  # of the step's number, counted from 1
    train_data: GPT2Dataset
    validation_data: GPT2Dataset | None
    metrics: Metrics
    save: Callable[[], None] | None
    save_interval: int | None


def train(state: TrainState, loop: Loop) -> None:
    """Train to `train_iters`, or to an exit that was asked for; evaluate and save at the end."""
    training = loop.training
    clock = Clock()
    if state.step >= training.train_iters:
        loop.metrics.say(
            f"nothing to do: step {state.step} of --train-iters {training.train_iters}"
        )
    while state.step < training.train_iters:
        lr = loop.learning_rate(state.step + 1)
        result = train_step(state, _batches(state, loop), lr)
        clock.tokens += result.tokens
        loop.metrics.advance()
        is_end = state.step == training.train_iters or _is_exit(state, training, clock)
        if is_end or state.step % training.log_interval == 0:
            _log(state, loop, result, lr, clock)
        if is_end or state.step % training.eval_interval == 0:
            with clock.paused():
                _evaluate(state, loop)
        is_due = loop.save_interval and state.step % loop.save_interval == 0
        if loop.save is not None and (is_end or is_due):
            with clock.paused():
                loop.save()
        if is_end:
            return


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


def _batches(state: TrainState, loop: Loop) -> list[Batch]:
    numbers = micro_batches(
        state.samples,
        global_batch_size=loop.global_batch_size,
        micro_batch_size=loop.training.micro_batch_size,
        data_rank=state.mesh.data.rank,
        data_size=state.mesh.data.size,
    )
    return [loop.train_data.batch(each) for each in numbers]


def _is_exit(state: TrainState, training: TrainingConfig, clock: Clock) -> bool:
    if training.exit_interval and state.step % training.exit_interval == 0:
        return True
    if training.exit_duration_in_mins is None:
        return False
    # Clocks differ between ranks, and all must leave at the same step.
    late = torch.tensor(
        float(clock.elapsed > 60 * training.exit_duration_in_mins), device=state.mesh.device
    )
    for axis in (state.mesh.tensor, state.mesh.data):
        all_reduce(late, axis, ReduceOp.MAX)
    return bool(late.item())


def _log(state: TrainState, loop: Loop, result: StepResult, lr: float, clock: Clock) -> None:
    line = {
        "step": state.step,
        "samples": state.samples,
        "loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens_per_second": clock.tokens_per_second(),
        "elapsed_seconds": clock.elapsed,
        "loss_scale": state.scaler.scale,
        "skipped_steps": state.skipped,
    }
    loop.metrics.write(line)
    loop.metrics.say(
        f"step {state.step} | loss {result.loss:.4f} | lr {lr:.3e} | grad norm "
        f"{result.grad_norm:.3f} | {line['tokens_per_second']:.0f} tokens/s"
        + (
            f" | loss scale {state.scaler.scale:g}, {state.skipped} skipped"
            if state.skipped
            else ""
        )
    )


def _evaluate(state: TrainState, loop: Loop) -> None:
    data, training = loop.validation_data, loop.training
    if data is None or training.eval_iters == 0:
        return
    # A split smaller than what was asked for is evaluated whole.
    samples = min(training.eval_iters * loop.global_batch_size, data.samples_per_epoch)
    loss = mean_loss(state.model, data, samples, training.micro_batch_size, state.mesh)
    line = {
        "step": state.step,
        "samples": state.samples,
        "validation_loss": loss,
        "validation_perplexity": exp(loss),
        "validation_samples": samples,
    }
    loop.metrics.write(line)
    loop.metrics.say(f"step {state.step} | validation loss {loss:.4f} | perplexity {exp(loss):.2f}")
