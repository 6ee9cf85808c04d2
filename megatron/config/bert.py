from megatron.config.model import TOKEN_TYPES as TOKEN_TYPES
from megatron.config.model import BertConfig as BertConfig
from megatron.config.model import FinetunedConfig as FinetunedConfig
from megatron.config.model import Head as Head
from megatron.config.model import ResidualOrder as ResidualOrder
