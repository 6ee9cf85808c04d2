"""Settings: one frozen section per owner, programs compose them, parse() fills them."""

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import SettingError
from megatron.config.data import DataConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.config.precision import PrecisionConfig
from megatron.config.pretrain import PretrainConfig
from megatron.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PretrainConfig",
    "SettingError",
    "TrainingConfig",
    "parse",
    "user_errors",
]
