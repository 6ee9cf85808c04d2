"""GPT-2: learned positions, pre-LN transformer with biases, head tied to the word embedding."""

from __future__ import annotations

from torch import Tensor

from megatron.config.model import TextModelConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.decoder import Decoder
from megatron.parallel.factory import LayerFactory


class GPT2(Decoder):
    def add_positions(self, config: TextModelConfig, factory: LayerFactory) -> None:
        positions, h = config.max_position_embeddings, config.hidden_size
        self.position_embedding = factory.position_embedding(
            positions, h, std=config.init_method_std
        )

    def embed(self, batch: GPT2Batch) -> Tensor:
        assert self.word_embedding is not None
        words = self.word_embedding(batch.tokens.flatten())
        positions = self.position_embedding(batch.positions.flatten())
        return self.embedding_dropout(words + positions, self.transformer.rows(batch))
