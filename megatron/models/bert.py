"""BERT: a bidirectional encoder, its pretraining heads, and heads of tasks (paper, section 5.2).

b sequences   s tokens in each   n = b s   h hidden   v padded vocabulary   k picked positions

pre-LN:  transformer(sum of embeddings), then a final norm
post-LN: transformer(norm(sum of embeddings)); each layer ends in its own norm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megatron.config.model import TOKEN_TYPES, BertConfig, FinetunedConfig
from megatron.data.batch import ExampleBatch
from megatron.data.bert import BertBatch
from megatron.models import gpt
from megatron.parallel.factory import LayerFactory

RESIDUAL_ORDERS: dict[str, type[gpt.TransformerLayer]] = {
    "pre-ln": gpt.TransformerLayer,
    "post-ln": gpt.PostNormLayer,
}
SPAN_ENDS = 2  # scores of a token: as the first and as the last token of a span


class BertEncoder(nn.Module):
    """Maps token ids and types [b, s] to [n, h]."""

    def __init__(
        self, config: BertConfig, factory: LayerFactory, vocab_size: int, *, is_tied: bool = False
    ) -> None:
        """vocab_size: the true one; the factory pads it. is_tied: whether a head also uses the word
        embedding."""
        super().__init__()
        h, std = config.hidden_size, config.init_method_std
        positions, rows = config.max_position_embeddings, config.make_vocab_size_divisible_by
        is_pre = config.residual_order == "pre-ln"
        self.word_embedding: nn.Module | None = factory.word_embedding(
            vocab_size, h, divisible_by=rows, std=std, is_tied=is_tied
        )
        self.position_embedding = factory.position_embedding(positions, h, std=std)
        self.token_type_embedding = factory.position_embedding(TOKEN_TYPES, h, std=std)
        self.embedding_norm = nn.Identity() if is_pre else gpt.make_norm(config, factory)
        self.embedding_dropout = factory.dropout(config.dropout_of_embeddings, "embedding")
        self.transformer = gpt.Transformer(config, factory, RESIDUAL_ORDERS[config.residual_order])
        self.exchange, self.context = factory.exchange, factory.context
        self.final_norm = gpt.make_norm(config, factory) if is_pre else nn.Identity()
        self.gather = factory.gather()

    def embed(self, batch: BertBatch | ExampleBatch) -> Tensor:
        """Norm of the sum of the embeddings, [n, h], without dropout, which is in `layers`."""
        assert self.word_embedding is not None
        size, device = batch.tokens.shape[-1], batch.tokens.device
        positions = (
            torch.arange(size, device=device) if batch.token_order is None else batch.token_order
        )
        positions = positions.expand_as(batch.tokens)
        x = (
            self.word_embedding(batch.tokens.flatten())
            + self.position_embedding(positions.flatten())
            + self.token_type_embedding(batch.token_types.flatten())
        )
        return self.embedding_norm(x)

    def layers(
        self, x: Tensor, batch: BertBatch | ExampleBatch, numbers: Sequence[int] | None = None
    ) -> Tensor:
        """Hidden states after the last layer, or after the last of `numbers`. No token attends to
        padding; the output at padding positions has no meaning."""
        self.context.require_local(batch)
        is_real, keys = self.exchange(batch.is_real), self.transformer.dropout_keys(batch)
        count = is_real.numel() // is_real.shape[-1]
        at = gpt.Sequences(
            count=count,
            mask=self.context.padding_mask(is_real),
            is_causal=False,
            dropout_keys=keys,
            attention_dropout_keys=self.context.attention_keys(self.exchange(keys), count),
        )
        if numbers is None or 0 in numbers:  # see Decoder
            x = self.embedding_dropout(x, keys)
        return self.transformer(x, at, numbers)

    def output(self, x: Tensor) -> Tensor:
        """Input of the heads, from the output x of `layers`: [n, h] of all tokens on every rank."""
        return self.gather(self.final_norm(x))


class Pooler(nn.Module):
    """Dense layer and tanh on the first token of each sequence: [n, h] of b sequences to [b, h]."""

    def __init__(self, config: BertConfig, factory: LayerFactory) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense = factory.linear(h, h, std=config.init_method_std)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        return torch.tanh(self.dense(x.view(batch, -1, x.shape[1])[:, 0]))


class MaskedTokenHead(nn.Module):
    """Logits or losses of masked tokens; tied to the word embedding."""

    def __init__(self, config: BertConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense = factory.linear(h, h, std=config.init_method_std)
        self.norm = factory.layer_norm(h, epsilon=config.layernorm_epsilon)
        self.head = factory.head(
            vocab_size,
            h,
            divisible_by=config.make_vocab_size_divisible_by,
            bias=True,
            untied_std=None if config.has_tied_head else config.init_method_std,
        )

    def forward(
        self,
        x: Tensor,
        embedding: nn.Module | None,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Maps x [k, h] to logits [k, v/t], losses of labels [k], or sum of scales [k] x loss."""
        return self.head(self.norm(F.gelu(self.dense(x))), embedding, labels, scales)


class BERT(nn.Module):
    terms: ClassVar = ("mlm_loss", "sop_loss")

    def __init__(self, config: BertConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.is_tied, heads = config.has_tied_head, factory.whole()
        self.encoder = BertEncoder(config, factory, vocab_size, is_tied=self.is_tied)
        self.pooler = Pooler(config, heads)
        self.mlm = MaskedTokenHead(config, heads, vocab_size)
        self.sop = heads.output(config.hidden_size, 2, std=config.init_method_std)
        self.counts_samples = factory.context.counts_samples

    def stages(self) -> list[list[str]]:
        """See Decoder."""
        first = ["word_embedding", "position_embedding", "token_type_embedding"]
        first += ["embedding_norm", "embedding_dropout"]
        layers = [[f"encoder.transformer.layers.{n}"] for n in self.encoder.transformer.layers]
        last = ["encoder.final_norm", "encoder.gather", "pooler", "mlm", "sop"]
        last += ["encoder.word_embedding"] * self.is_tied
        return [[f"encoder.{name}" for name in first], *layers, last]

    def denominators(self, batch: BertBatch) -> list[float]:
        samples = float(len(batch.is_swapped) * self.counts_samples)
        return [float(np.count_nonzero(batch.loss_mask)), samples]

    def embed(self, batch: BertBatch) -> Tensor:
        return self.encoder.embed(batch)

    def stream(self, batch: BertBatch, number: int) -> Tensor:
        """Input of layer `number` for a batch of arrays, as a tensor on meta."""
        return self.encoder.transformer.stream_like(batch.tokens.size)

    def layers(
        self, x: Tensor, batch: BertBatch, *, numbers: Sequence[int] | None = None
    ) -> Tensor:
        return self.encoder.layers(x, batch, numbers)

    def logits(self, x: Tensor) -> Tensor:
        """This rank's columns [n, v/t] of the logits of all tokens, from the output of `layers`."""
        return self.mlm(self.encoder.output(x), self.encoder.word_embedding)

    def loss(self, x: Tensor, batch: BertBatch, loss_scales: Tensor) -> Tensor:
        """Cross-entropy of each masked token, and of each sample's segment order: see Objective."""
        x = self.encoder.output(x)
        scales = batch.is_counted * loss_scales[0]
        words = self.encoder.word_embedding
        masked = self.mlm(x[batch.masked], words, batch.masked_labels, scales)
        order = self.sop(self.pooler(x, len(batch.tokens)))
        wide = torch.promote_types(order.dtype, torch.float32)
        of_order = F.cross_entropy(order.to(wide), batch.is_swapped, reduction="sum")
        of_order = of_order * self.counts_samples  # only where x has the first token
        return torch.stack([masked, of_order * loss_scales[1].to(wide)])

    def forward(
        self, batch: BertBatch, loss_scales: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs all stages. With loss_scales see `loss`; without, this rank's columns [n, v/t] of
        the logits of all tokens, and scores [b, 2] of segments in order and swapped."""
        x = self.layers(self.embed(batch), batch)
        if loss_scales is not None:
            return self.loss(x, batch, loss_scales)
        order = self.sop(self.pooler(self.encoder.output(x), len(batch.tokens)))
        return self.logits(x), order


class FinetunedBert(nn.Module):
    """A pretrained BERT with the head of a task: dropout and a linear layer on the encoder.

    A classifier scores its classes, a choice one option at a time; both read the first token. A
    span head scores every token and has no pooler.
    """

    terms: ClassVar = ("loss",)

    def __init__(self, config: FinetunedConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size, heads = vocab_size, factory.whole()
        self.encoder = BertEncoder(config, factory, vocab_size)
        self.pooler = None if config.head == "span" else Pooler(config, heads)
        self.dropout = heads.dropout(config.hidden_dropout, "head")
        outputs = {"classifier": len(config.labels), "choice": 1, "span": SPAN_ENDS}[config.head]
        self.head = heads.output(config.hidden_size, outputs, std=config.init_method_std)
        self.context = factory.context

    def denominators(self, batch: ExampleBatch) -> list[float]:
        return [float(batch.counted.sum() * self.context.counts_samples)]

    def embed(self, batch: ExampleBatch) -> Tensor:
        return self.encoder.embed(batch)

    def layers(self, x: Tensor, batch: ExampleBatch) -> Tensor:
        return self.encoder.layers(x, batch)

    def loss(self, x: Tensor, batch: ExampleBatch, loss_scales: Tensor) -> Tensor:
        """Cross-entropy of each example's label; for a span the mean of two, of its first and its
        last token, each over the tokens of its sequence only: see Objective."""
        scores = self.scores(x, batch)
        losses = F.cross_entropy(scores, batch.labels, reduction="none").mean(1)
        counted = batch.counted * self.context.counts_samples
        return (losses * counted).sum() * loss_scales.to(scores.dtype)

    def scores(self, x: Tensor, batch: ExampleBatch) -> Tensor:
        """Scores for each example's k labels, [b, candidates, k] in fp32 or wider. Candidates are
        classes or options, with k = 1, or tokens as the first and last one of a span, with k = 2;
        padding scores minus infinity."""
        x = self.encoder.output(x)
        keys = gpt.dropout_keys(batch)
        if self.pooler is None:
            scores = self._score(x, keys).view(*batch.tokens.shape, SPAN_ENDS)
            return self.context.whole(scores).masked_fill(~batch.is_real[..., None], -torch.inf)
        sequences = batch.tokens.numel() // batch.tokens.shape[-1]
        keys = None if keys is None else keys.view(sequences, -1)[:, 0]
        scores = self.context.of_first(self._score(self.pooler(x, sequences), keys))
        return scores.view(len(batch.tokens), -1, 1)

    def forward(self, batch: ExampleBatch, loss_scales: Tensor | None = None) -> Tensor:
        """Runs all stages. With loss_scales see `loss`; without, see `scores`."""
        x = self.layers(self.embed(batch), batch)
        return self.scores(x, batch) if loss_scales is None else self.loss(x, batch, loss_scales)

    def _score(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Maps x [n, h] to scores [n, k] in fp32. In bf16, scores that differ by less than one part
        in 256 would be equal, and the first of them would be the answer."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = {name: each.to(wide) for name, each in self.head.named_parameters()}
        return functional_call(self.head, weights, (self.dropout(x, keys).to(wide),))
