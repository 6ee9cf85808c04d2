from megatron.config.training import PrecisionConfig as PrecisionConfig
