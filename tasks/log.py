"""What is told of a seed while it trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron.train.finetune import Course
from megatron.train.loop import Clock
from megatron.train.metrics import Metrics
from megatron.train.state import TrainState
from megatron.train.step import StepResult
from tasks.spread import is_number

LINES = 10  # of metrics in an epoch


class Log:
    """Lines of metrics in the file of a seed, and for a person on stderr."""

    def __init__(self, metrics: Metrics, state: TrainState, course: Course) -> None:
        self.metrics = metrics
        self.state = state
        self.seed = course.seed
        self.every = -(-course.steps_per_epoch // LINES)
        self.clock = Clock()
        self.epoch = 0

    def step(self, result: StepResult, lr: float) -> None:
        self.clock.tokens += result.tokens
        self.metrics.advance()
        if self.state.step % self.every:
            return
        line = {
            "step": self.state.step,
            "epoch": self.epoch,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": self.clock.tokens_per_second(),
            "elapsed_seconds": self.clock.elapsed,
        }
        if self.state.scaler.is_scaling:
            scale = {"loss_scale": self.state.scaler.scale, "skipped_steps": self.state.skipped}
            line |= scale
        self.told(line)

    def told(self, line: Mapping[str, Any]) -> None:
        self.metrics.write({"step": self.state.step, "seed": self.seed, **line})
        self.clock.tokens_per_second()  # what is not training does not count
        if self.metrics.is_first:
            words = [_as_text(key, value) for key, value in line.items() if is_number(value)]
            self.metrics.bar.write(f"seed {self.seed} | {' | '.join(words)}", file=sys.stderr)


def _as_text(key: str, value: float) -> str:
    """A figure for a person; tokens per second as pretraining tells them."""
    return f"{value:.0f} tokens/s" if key == "tokens_per_second" else f"{key} {value:.4g}"
