from megatron.config.training import BertOptimizerConfig as BertOptimizerConfig
from megatron.config.training import OptimizerConfig as OptimizerConfig
