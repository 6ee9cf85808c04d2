"""How long and in which batches to train, and when to evaluate, check and leave."""

from dataclasses import dataclass

from megatron.config.checks import non_negative, optional_positive, positive


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

    eval_interval: int = 1000
    """Steps between evaluations on the validation split."""

    eval_iters: int = 100
    """Global batches of an evaluation; 0 does not evaluate."""

    exit_interval: int | None = None
    """Save and exit at the next step that is a multiple of this."""

    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""

    compile: bool | None = None
    """Compile the transformer's layers with torch.compile: seconds to a minute at the start, then
    faster steps. If not given: on a GPU whose compiler works."""

    check_replicas_interval: int = 100
    """Steps between comparisons of what the ranks hold in common; 0 does not compare."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "micro_batch_size", "eval_interval")
        non_negative(self, "seed", "eval_iters", "check_replicas_interval")
        optional_positive(self, "global_batch_size", "exit_interval", "exit_duration_in_mins")
