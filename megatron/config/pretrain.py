"""The settings of a pretraining run, and the facts that hold between its sections."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.apex import require_apex
from megatron.config.bert import BertConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import UsageError
from megatron.config.data import BertDataConfig, DataConfig, GPT2DataConfig
from megatron.config.logging import LoggingConfig, require_sinks
from megatron.config.model import ModelConfig
from megatron.config.optimizer import BertOptimizerConfig, OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """What the programs share; each has sections of its own for model and data."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def data_parallel_size(self, world_size: int) -> int:
        """Models trained side by side by world_size processes."""
        return world_size // self.parallel.tensor_model_parallel_size

    def global_batch_size(self, world_size: int) -> int:
        """Samples of an optimizer step."""
        smallest = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.training.global_batch_size or smallest

    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches its floor."""
        return self.optimizer.lr_decay_iters or self.training.train_iters

    def metrics_file(self) -> str | None:
        """Where the record of the run is kept; None keeps none."""
        save = self.checkpoint.save
        return self.logging.metrics_file or (save and str(Path(save) / "metrics.jsonl"))

    def check(self, world_size: int) -> None:
        """Raise ValueError, naming flags and values that work, where sections disagree."""
        self.parallel.check(self.model.num_attention_heads, world_size)
        self._check_batch(world_size)
        self._check_positions()
        self._check_schedule()
        require_apex(
            optimizer_impl=self.optimizer.optimizer_impl, layernorm_impl=self.model.layernorm_impl
        )
        require_sinks(self.logging, self.metrics_file())

    def _check_batch(self, world_size: int) -> None:
        batch = self.global_batch_size(world_size)
        copies, micro = self.data_parallel_size(world_size), self.training.micro_batch_size
        if batch % (copies * micro):
            raise UsageError(
                f"--global-batch-size {batch} does not divide by --micro-batch-size {micro} x "
                f"data-parallel size {copies}; "
                f"--global-batch-size {_next_multiple(batch, copies * micro)} would work"
            )

    def _check_positions(self) -> None:
        length, positions = self.data.seq_length, self.model.max_position_embeddings
        if length > positions:
            raise UsageError(
                f"--seq-length {length} is above --max-position-embeddings {positions}; "
                f"--seq-length {positions} or --max-position-embeddings {length} would work"
            )

    def _check_schedule(self) -> None:
        warmup, end = self.optimizer.lr_warmup_iters, self.lr_decay_iters()
        if warmup > end:
            source = (
                "--train-iters" if self.optimizer.lr_decay_iters is None else "--lr-decay-iters"
            )
            raise UsageError(
                f"--lr-warmup-iters {warmup} is above {source} {end}, where decay ends; "
                f"--lr-warmup-iters {end} would work"
            )


@dataclass(frozen=True, kw_only=True)
class PretrainGPT2Config(PretrainConfig):
    data: GPT2DataConfig = field(default_factory=GPT2DataConfig)


@dataclass(frozen=True, kw_only=True)
class PretrainBertConfig(PretrainConfig):
    model: BertConfig
    data: BertDataConfig = field(default_factory=BertDataConfig)
    optimizer: BertOptimizerConfig = field(default_factory=BertOptimizerConfig)


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
