"""Dynamic loss scaling for fp16 (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """Halves the scale after an overflow and doubles it after `window` steps without one.

    A run that needs no scaling has window None: its scale stays, and an overflow is an error.
    """

    scale: float = 1.0
    window: int | None = None
    smallest: float = 1.0
    good_steps: int = 0

    @classmethod
    def dynamic(cls) -> LossScaler:
        """For fp16: gradients of a small model overflow a few times, and the scale settles."""
        return cls(scale=2.0**16, window=1000)

    def update(self, overflowed: bool) -> None:
        """Account for one step; every rank of the model passes the same value."""
        if overflowed:
            if self.window is None or self.scale <= self.smallest:
                raise FloatingPointError(
                    f"the gradient is not finite at loss scale {self.scale:g}, and a smaller scale "
                    "cannot help; a lower --lr, a longer --lr-warmup-iters or --bf16 may"
                )
            self.scale = max(self.smallest, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.window is not None and self.good_steps % self.window == 0:
            self.scale *= 2
