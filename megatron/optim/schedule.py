"""What changes from step to step: the learning rate, and fp16's loss scale (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import torch

from megatron.config.training import OptimizerConfig, PrecisionConfig

DECAY = {
    "cosine": lambda progress: 0.5 * (1.0 + cos(pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


def learning_rate(config: OptimizerConfig, step: int, decay_iters: int) -> float:
    """Rate of optimizer step `step`, counted from 1: linear warm-up, then decay to a floor, which
    holds from step `decay_iters` on."""
    warmup = config.lr_warmup_iters
    if step <= warmup:
        return config.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, decay_iters - warmup))
    return config.min_lr + (config.lr - config.min_lr) * DECAY[config.lr_decay_style](progress)


COUNTERS = ("scale", "good_steps", "overflows", "skips")


@dataclass
class LossScaler:
    """What the loss is multiplied by before the backward, and what an overflow does to it.

    A dynamic scale is doubled after `window` steps without overflow. Until then it bears
    `hysteresis` overflows: the last of these and every further one halve it. A static scale has
    window None. fp32 and bf16 need no scaling and skip nothing: most_skips is 0.
    """

    scale: float = 1.0
    window: int | None = None
    hysteresis: int = 1
    smallest: float = 0.0  # an overflow there ends the run
    most_skips: int = 0  # steps skipped in a row that end the run
    good_steps: int = 0  # in a row, since the scale last changed upwards
    overflows: int = 0  # since the scale last changed upwards
    skips: int = 0  # in a row

    @classmethod
    def of(cls, config: PrecisionConfig, dtype: torch.dtype) -> LossScaler:
        """That of a run whose weights and activations are of `dtype`."""
        if dtype != torch.float16:
            return cls()
        if config.loss_scale is not None:
            return cls(scale=config.loss_scale, most_skips=config.max_consecutive_skips)
        return cls(
            scale=config.first_scale(),
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            smallest=config.min_loss_scale,
            most_skips=config.max_consecutive_skips,
        )

    @property
    def is_scaling(self) -> bool:
        return self.most_skips > 0

    def may_skip(self) -> bool:
        """Whether the run goes on if the step at hand overflows."""
        return self.scale > self.smallest and self.skips + 1 < self.most_skips

    def update(self, overflowed: bool) -> None:
        """Account for one step; every rank passes the same value."""
        self.skips = self.skips + 1 if overflowed else 0
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if self.window is None:
            return
        if overflowed:
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.smallest, self.scale / 2)
        elif self.good_steps >= self.window:
            self.scale *= 2
            self.good_steps = self.overflows = 0

    def counters(self) -> dict[str, float]:
        """What changes, for a checkpoint; the rest comes from the command line."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load(self, counters: dict[str, float]) -> None:
        """Go on from a checkpoint's counters; a static scale stays what it was set to."""
        for name in COUNTERS[1:]:
            setattr(self, name, int(counters[name]))
        if self.window is not None:
            self.scale = max(self.smallest, counters["scale"])
