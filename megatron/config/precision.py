"""Number formats of training, and loss scaling (paper, section 4.2)."""

import math
from dataclasses import dataclass, fields

from megatron.config.checks import UsageError, flag, optional_positive, positive

DYNAMIC = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    bf16: bool | None = None
    """Compute in bfloat16, with fp32 master weights and gradient accumulation. If neither this nor
    --fp16 is given: as the checkpoint that is resumed, else on where the device has it."""

    fp16: bool = False
    """Compute in float16 with loss scaling and fp32 master weights."""

    loss_scale: float | None = None
    """Loss scale that never changes; dynamic if not given."""

    initial_loss_scale: str = "2**16"
    """Loss scale to start with: a decimal or 2**N."""

    loss_scale_window: int = 1000
    """Steps without overflow after which the loss scale is doubled."""

    hysteresis: int = 2
    """Overflows within a window that it takes to halve the loss scale."""

    min_loss_scale: float = 1.0
    """Lowest loss scale; an overflow there ends the run."""

    max_consecutive_skips: int = 50
    """Steps skipped in a row for overflow that end the run."""

    def __post_init__(self) -> None:
        optional_positive(self, "loss_scale")
        positive(self, "loss_scale_window", "hysteresis", "min_loss_scale", "max_consecutive_skips")
        if self.fp16 and self.bf16:
            raise UsageError("--fp16 and --bf16 exclude each other; --no-fp16 --bf16 would work")
        self._check_scales()

    @property
    def name(self) -> str | None:
        """ "fp16", "bf16" or "fp32", or None where the command line leaves it open."""
        if self.fp16:
            return "fp16"
        return None if self.bf16 is None else "bf16" if self.bf16 else "fp32"

    def first_scale(self) -> float:
        """The dynamic loss scale of the first step."""
        base, power, exponent = self.initial_loss_scale.partition("**")
        try:
            value = float(base) ** int(exponent) if power else float(base)
        except (ValueError, OverflowError):
            value = math.nan
        if (power and base.strip() != "2") or not 0 < value < math.inf:
            raise UsageError(
                f"--initial-loss-scale {self.initial_loss_scale} is no positive decimal and no "
                "2**N; --initial-loss-scale 2**16 would work"
            )
        return value

    def _check_scales(self) -> None:
        if self.first_scale() < self.min_loss_scale:
            raise UsageError(
                f"--initial-loss-scale {self.initial_loss_scale} is below --min-loss-scale "
                f"{self.min_loss_scale}; --min-loss-scale {self.first_scale():g} would work"
            )
        for field in fields(self):
            is_given = getattr(self, field.name) != field.default
            if not self.fp16 and is_given and field.name not in ("bf16", "fp16"):
                raise UsageError(
                    f"{flag(field.name)} is about loss scaling, which --fp16 alone does; "
                    f"--fp16 beside it would work"
                )
            if self.loss_scale is not None and is_given and field.name in DYNAMIC:
                raise UsageError(
                    f"{flag(field.name)} is about a loss scale that changes, and --loss-scale "
                    f"{self.loss_scale:g} does not; leaving one of them out would work"
                )
