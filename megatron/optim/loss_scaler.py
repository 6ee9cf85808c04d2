"""Loss scaling for fp16 (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.training import PrecisionConfig


@dataclass
class LossScaler:
    """The factor of the loss before the backward, and what an overflow does to it.

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
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflows": self.overflows,
            "skips": self.skips,
        }

    def load(self, counters: dict[str, float]) -> None:
        """Go on from a checkpoint's counters; a static scale stays what it was set to."""
        self.good_steps, self.overflows, self.skips = (
            int(counters[name]) for name in ("good_steps", "overflows", "skips")
        )
        if self.window is not None:
            self.scale = max(self.smallest, counters["scale"])
