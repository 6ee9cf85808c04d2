from megatron.config.training import BertDataConfig as BertDataConfig
from megatron.config.training import DataConfig as DataConfig
from megatron.config.training import GPT2DataConfig as GPT2DataConfig
from megatron.config.training import sample_settings as sample_settings
