from megatron.config.pretrain import require_sinks as require_sinks
from megatron.config.training import LoggingConfig as LoggingConfig
