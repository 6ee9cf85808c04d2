"""Llama (Touvron et al., 2023, arXiv:2302.13971; 3: Grattafiori et al., 2024, arXiv:2407.21783).

Differences from GPT-2: RMSNorm, rotary positions in place of learned ones, heads of keys and values
that several query heads share, an MLP gated by SiLU, no biases, a head with its own weight.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megatron.config.model import LlamaConfig, ModelConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.gpt import Attention, Decoder, Sequences, TransformerLayer, in_heads
from megatron.parallel.factory import LayerFactory
from megatron.parallel.layers_llama import rotate


class LlamaAttention(Attention):
    """Queries and keys are rotated by their positions; a/g query heads share a key/value head."""

    def make_qkv(self, config: ModelConfig, factory: LayerFactory) -> Any:
        assert isinstance(config, LlamaConfig)
        qkv = factory.grouped_query(
            config.hidden_size,
            heads=config.num_attention_heads,
            key_value_heads=config.query_groups,
            head_size=config.head_size,
            bias=False,
            std=config.init_method_std,
        )
        self.kv_head_index = qkv.kv_head_index
        return qkv

    def heads_of(self, x: Tensor, at: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, a/t, s, d]; keys and values [b, g, s, d] of the heads that they use."""
        assert at.rotary_cos_sin is not None
        cos, sin = at.rotary_cos_sin
        if self.kv_head_index is not None and not x.is_meta:
            # Once: a GPU does not wait for it again.
            self.kv_head_index = self.kv_head_index.to(x.device)
        q, k, v = (in_heads(each, at.count, self.head_size) for each in self.qkv(x))
        # v is copied, so that it does not keep the memory of k before its rotation.
        return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


class LlamaLayer(TransformerLayer):
    make_attention: ClassVar[type[Attention]] = LlamaAttention


class Llama(Decoder):
    make_layer: ClassVar[type[TransformerLayer]] = LlamaLayer

    def __init__(self, config: LlamaConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__(config, factory, vocab_size)
        self.rotary = factory.rotary(
            config.head_size, base=config.rotary_base, scaling=config.rope_scaling
        )

    def rotary_cos_sin(self, batch: GPT2Batch) -> tuple[Tensor, Tensor]:
        positions = self.exchange(batch.positions)
        return self.rotary(positions, next(self.parameters()).dtype)
