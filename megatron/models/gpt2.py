"""GPT-2: embeddings, pre-LN transformer, final norm, head tied to the word embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.cache import KeyValueCache
from megatron.models.transformer import Transformer
from megatron.parallel.layers import LayerFactory


class GPT2(nn.Module):
    def __init__(self, config: ModelConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.positions = config.max_position_embeddings
        h, std = config.hidden_size, config.init_method_std
        self.word_embedding = factory.word_embedding(
            vocab_size, h, divisible_by=config.make_vocab_size_divisible_by, std=std
        )
        self.position_embedding = factory.position_embedding(self.positions, h, std=std)
        self.embedding_dropout = factory.dropout(config.hidden_dropout, "embedding")
        self.transformer = Transformer(config, factory, range(config.num_layers))
        self.final_norm = factory.norm(h, epsilon=config.layernorm_epsilon)
        self.head = factory.head(vocab_size)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        document_starts: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Logits [n, v/t] of this rank's columns, with labels the loss of each token [n], with
        scales too the sum of scale x loss, which is what training differentiates.

        All arguments are [b, s], scales in floating point, the others int64. document_starts:
        where in the sample the document of each token begins; then no token attends to another
        document. None attends across documents.
        """
        x = self.read(tokens, positions, document_starts)
        of_tokens = (None if each is None else each.flatten() for each in (labels, scales))
        return self.head(x, self.word_embedding, *of_tokens)

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        document_starts: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """What the head sees of each token, [n, h]; arguments as above.

        cache: of what was read before, which `tokens` follow and then belong to; evaluation only.
        """
        mask = None if document_starts is None else document_mask(document_starts)
        if cache is not None:
            assert mask is None
            assert not self.training
            mask = cache.mask(tokens.shape[1], tokens.device)
        x = self.word_embedding(tokens.flatten()) + self.position_embedding(positions.flatten())
        x = self.transformer(self.embedding_dropout(x), tokens.shape[0], mask, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [m, v/t] of this rank's columns, of the rows [m, h] of what `read` returns."""
        return self.head(x, self.word_embedding)


def document_mask(document_starts: Tensor) -> Tensor:
    """[b, s] document starts to the bool mask [b, 1, s, s]: causal, within one document."""
    same_document = document_starts[:, :, None] == document_starts[:, None, :]
    return torch.tril(same_document)[:, None]
