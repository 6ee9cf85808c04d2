"""A Llama small enough for tests: 12 query heads share 3 of keys and values, which neither 2 nor 4
ranks divide."""

from typing import Any

from megatron.config.model import LlamaConfig
from tests.tiny import SEQUENCE


def llama_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 48,
        "ffn_hidden_size": 64,
        "num_attention_heads": 12,
        "num_query_groups": 3,
        "max_position_embeddings": SEQUENCE,
    }
    return LlamaConfig(**(settings | changes))
