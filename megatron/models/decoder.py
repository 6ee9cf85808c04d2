"""Common base of models that predict the next token: word embedding, transformer, final norm, and a
head that may be tied to the word embedding.

The stages of such a model are `embed`, `layers` and `loss`; a batch holds tensors on the model's
device. A pipeline rank builds its part of the model, with the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.model import TextModelConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.transformer import (
    KeyValueCache,
    Sequences,
    Transformer,
    TransformerLayer,
    make_norm,
)
from megatron.parallel.factory import LayerFactory


class Decoder(nn.Module):
    terms: ClassVar = ("loss",)
    make_layer: ClassVar[type[TransformerLayer]] = TransformerLayer

    def __init__(self, config: TextModelConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.positions = config.max_position_embeddings
        h, std, part = config.hidden_size, config.init_method_std, factory.part
        rows, is_tied = config.make_vocab_size_divisible_by, config.has_tied_head
        self.word_embedding: nn.Module | None = None  # also the weight of a tied head
        if part.is_first or (part.is_last and is_tied):
            self.word_embedding = factory.word_embedding(
                vocab_size, h, divisible_by=rows, std=std, is_tied=is_tied
            )
        if part.is_first:
            self.add_positions(config, factory)
            self.embedding_dropout = factory.dropout(config.dropout_of_embeddings, "embedding")
        self.transformer = Transformer(config, factory, self.make_layer)
        self.exchange = factory.exchange
        if part.is_last:
            self.final_norm = make_norm(config, factory)
            self.head = factory.head(
                vocab_size, h, divisible_by=rows, untied_std=None if is_tied else std
            )

    def add_positions(self, config: TextModelConfig, factory: LayerFactory) -> None:
        """Create what the first stage adds to the word embedding; nothing here."""

    def denominators(self, batch: GPT2Batch) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def embed(self, batch: GPT2Batch) -> Tensor:
        """Hidden states [n, h], the input of the first layer."""
        assert self.word_embedding is not None
        words = self.word_embedding(batch.tokens.flatten())
        return self.embedding_dropout(words, self.transformer.rows(batch))

    def turns(self, batch: GPT2Batch) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of rotary positions; None for a model without rotary positions."""
        return None

    def stream(self, batch: GPT2Batch, number: int) -> Tensor:
        """Input of layer `number` for a batch of arrays, as a tensor on meta."""
        return self.transformer.stream(batch.tokens.size)

    def layers(
        self,
        x: Tensor,
        batch: GPT2Batch,
        cache: KeyValueCache | None = None,
        *,
        numbers: Iterable[int] | None = None,
    ) -> Tensor:
        """Hidden states after the last layer, or after the last of `numbers`.

        cache: keys and values of the tokens read so far; the batch's are added. Evaluation only.
        """
        starts, size = self.exchange(batch.document_starts), batch.tokens.shape[1]
        rows = self.transformer.rows(batch)
        mask = None if starts is None else document_mask(starts)
        if cache is not None:
            assert mask is None
            assert not self.training
            mask = cache.mask(size, x.device)
        at = Sequences(
            count=len(batch.tokens),
            mask=mask,
            is_causal=mask is None and size > 1,  # a single query is the last of all tokens
            rows=rows,
            core_rows=self.exchange(rows),
            cache=cache,
            turns=self.turns(batch),
        )
        x = self.transformer(x, at, numbers)
        if cache is not None:
            cache.advance(size)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """This rank's columns [m, v/t] of the logits, from rows [m, h] of the `layers` output."""
        return self.head(self.final_norm(x), self.word_embedding)

    def losses(self, x: Tensor, batch: GPT2Batch, scales: Tensor | None = None) -> Tensor:
        """Loss of each label [n]; with floating-point scales [b, s], the sum of scale x loss."""
        labels = batch.labels.flatten()
        scales = None if scales is None else scales.flatten()
        return self.head(self.final_norm(x), self.word_embedding, labels, scales)

    def loss(self, x: Tensor, batch: GPT2Batch, loss_scales: Tensor) -> Tensor:
        """Cross-entropy of each counted token: see Objective."""
        return self.losses(x, batch, batch.loss_mask.double() * loss_scales)[None]

    def forward(self, batch: GPT2Batch, loss_scales: Tensor | None = None) -> Tensor:
        """Runs all stages. With loss_scales see `loss`; without, this rank's columns [n, v/t] of
        the logits."""
        x = self.layers(self.embed(batch), batch)
        return self.logits(x) if loss_scales is None else self.loss(x, batch, loss_scales)


def document_mask(document_starts: Tensor) -> Tensor:
    """Maps document starts [b, s] to the bool mask [b, 1, s, s]: causal, within one document."""
    same_document = document_starts[:, :, None] == document_starts[:, None, :]
    return torch.tril(same_document)[:, None]
