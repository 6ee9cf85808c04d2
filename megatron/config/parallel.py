"""How the model is cut over processes."""

from dataclasses import dataclass, field

from megatron.config.checks import positive


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = field(default=1, metadata={"alias": "model_parallel_size"})
    """Processes that share one model, each holding a slice of every layer; the remaining
    factor of the world size is data parallelism. Also spelt --model-parallel-size."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size")
