"""How the model is cut over processes."""

from dataclasses import dataclass, field

from megatron.config.checks import UsageError, positive


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = field(default=1, metadata={"alias": "model_parallel_size"})
    """Processes that share one model, each holding a slice of every layer; the remaining
    factor of the world size is data parallelism. Also spelt --model-parallel-size."""

    distributed_timeout_minutes: float = 10.0
    """Minutes without progress after which a run of several processes stops and says which one is
    behind; longer than the longest save, evaluation or load."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "distributed_timeout_minutes")

    def check(self, heads: int, world_size: int) -> None:
        """Raise UsageError where attention heads or processes cannot be shared out evenly."""
        size = self.tensor_model_parallel_size
        if heads % size:
            works = max(n for n in range(1, size) if heads % n == 0)
            where = f", on a multiple of {works} processes" if world_size % works else ""
            raise UsageError(
                f"--num-attention-heads {heads} does not divide by --tensor-model-parallel-size "
                f"{size}; --tensor-model-parallel-size {works} would work{where}"
            )
        if world_size % size:
            works = max(n for n in range(1, size) if heads % n == 0 and world_size % n == 0)
            raise UsageError(
                f"--tensor-model-parallel-size {size} does not fit a world of {world_size} "
                f"processes; --nproc-per-node {size} of torchrun would work, or "
                f"--tensor-model-parallel-size {works}"
            )
