"""Settings: one frozen dataclass per component, programs compose them, parse() fills them."""

from importlib.util import find_spec

if find_spec("tyro") is None:  # the first import of every program
    raise SystemExit(
        "error: what this program needs is not installed: `bash scripts/setup.sh`, then "
        "`source .venv/bin/activate`"
    )

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import UsageError
from megatron.config.model import BertConfig, FinetunedConfig, ModelConfig
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.config.training import (
    BertDataConfig,
    DataConfig,
    GPT2DataConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)

__all__ = [
    "BertConfig",
    "BertDataConfig",
    "CheckpointConfig",
    "DataConfig",
    "FinetunedConfig",
    "GPT2DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PretrainBertConfig",
    "PretrainConfig",
    "PretrainGPT2Config",
    "TrainingConfig",
    "UsageError",
    "parse",
    "user_errors",
]
