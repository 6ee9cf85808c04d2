"""How long, in what precision and in which batches to train, and what to report."""

from dataclasses import dataclass

from megatron.config.checks import SettingError, non_negative, optional_positive, positive


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    train_iters: int
    """Optimizer steps to train for, those before a resume included."""

    micro_batch_size: int = 1
    """Samples of one forward and backward pass on one model."""

    global_batch_size: int | None = None
    """Samples of an optimizer step; --micro-batch-size x data-parallel size if not given."""

    seed: int = 1234
    """Seed of initialisation, data order and dropout."""

    bf16: bool = False
    """Compute in bfloat16, with fp32 master weights and gradient accumulation."""

    fp16: bool = False
    """Compute in float16 with dynamic loss scaling and fp32 master weights."""

    log_interval: int = 10
    """Steps between lines of metrics."""

    eval_interval: int = 1000
    """Steps between evaluations on the validation split."""

    eval_iters: int = 100
    """Global batches of an evaluation; 0 does not evaluate."""

    exit_interval: int | None = None
    """Save and exit at the next step that is a multiple of this."""

    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""

    metrics_file: str | None = None
    """JSON lines of metrics; metrics.jsonl in --save if not given."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "micro_batch_size", "log_interval", "eval_interval")
        non_negative(self, "seed", "eval_iters")
        optional_positive(self, "global_batch_size", "exit_interval", "exit_duration_in_mins")
        if self.fp16 and self.bf16:
            raise SettingError("--fp16 and --bf16 exclude each other; --no-fp16 --bf16 would work")
