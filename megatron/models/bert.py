"""BERT: an encoder that sees both ways, the heads it is pretrained with, and those of tasks (paper,
section 5.2).

b sequences   s tokens of each   n = b s   h hidden   v padded vocabulary   k picked positions

pre-LN:  transformer(sum of embeddings), then a final norm
post-LN: transformer(norm(sum of embeddings)); its layers end in norms of their own
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megatron.config.model import TOKEN_TYPES, BertConfig, FinetunedConfig
from megatron.models.transformer import Transformer
from megatron.parallel.layers import LayerFactory

SPAN_ENDS = 2  # scores of a token as the first and as the last one of a span


class BertEncoder(nn.Module):
    """Token ids and types [b, s] to [n, h]."""

    def __init__(self, config: BertConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        h, std = config.hidden_size, config.init_method_std
        is_pre = config.residual_order == "pre-ln"
        self.word_embedding = factory.word_embedding(
            vocab_size, h, divisible_by=config.make_vocab_size_divisible_by, std=std
        )
        self.position_embedding = factory.position_embedding(
            config.max_position_embeddings, h, std=std
        )
        self.token_type_embedding = factory.position_embedding(TOKEN_TYPES, h, std=std)
        self.embedding_norm = (
            nn.Identity() if is_pre else factory.norm(h, epsilon=config.layernorm_epsilon)
        )
        self.embedding_dropout = factory.dropout(config.hidden_dropout, "embedding")
        self.transformer = Transformer(
            config, factory, range(config.num_layers), order=config.residual_order, gelu="none"
        )
        self.final_norm = (
            factory.norm(h, epsilon=config.layernorm_epsilon) if is_pre else nn.Identity()
        )

    def forward(self, tokens: Tensor, token_types: Tensor, is_real: Tensor) -> Tensor:
        """tokens, token_types: int64 [b, s]; is_real: bool [b, s], False for padding.

        No token attends to padding; what comes out at padding means nothing.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = (
            self.word_embedding(tokens.flatten())
            + self.position_embedding(positions.flatten())
            + self.token_type_embedding(token_types.flatten())
        )
        x = self.embedding_dropout(self.embedding_norm(x))
        return self.final_norm(self.transformer(x, tokens.shape[0], is_real[:, None, None, :]))


class Pooler(nn.Module):
    """What is seen at the first token of each sequence: [n, h] of b sequences to [b, h]."""

    def __init__(self, config: BertConfig, factory: LayerFactory) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense = factory.linear(h, h, std=config.init_method_std)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        return torch.tanh(self.dense(x.view(batch, -1, x.shape[1])[:, 0]))


class MaskedTokenHead(nn.Module):
    """Logits or losses of tokens that the input hides; tied to the word embedding."""

    def __init__(self, config: BertConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense = factory.linear(h, h, std=config.init_method_std)
        self.norm = factory.norm(h, epsilon=config.layernorm_epsilon)
        self.head = factory.head(vocab_size, bias_divisible_by=config.make_vocab_size_divisible_by)

    def forward(
        self,
        x: Tensor,
        embedding: nn.Module,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x [k, h]: logits [k, v/t], the loss of labels [k], or the sum of scales [k] x loss."""
        return self.head(self.norm(F.gelu(self.dense(x))), embedding, labels, scales)


class BERT(nn.Module):
    def __init__(self, config: BertConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.encoder = BertEncoder(config, factory, vocab_size)
        self.pooler = Pooler(config, factory)
        self.mlm = MaskedTokenHead(config, factory, vocab_size)
        self.sop = factory.linear(config.hidden_size, 2, std=config.init_method_std)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        is_real: Tensor,
        picked: Tensor | None = None,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(of masked-token prediction, of sentence order): logits [k, v/t] of this rank's columns,
        with labels the loss of each [k], with scales too the sum of scale x loss; and logits
        [b, 2], of segments in order and swapped.

        tokens, token_types, is_real: as of the encoder. picked: int64 [k], the positions (row x s +
        column) to predict; None for all n. labels: int64 [k]. scales: [k].
        """
        x = self.encoder(tokens, token_types, is_real)
        order = self.sop(self.pooler(x, tokens.shape[0]))
        rows = x if picked is None else x[picked]
        return self.mlm(rows, self.encoder.word_embedding, labels, scales), order


class FinetunedBert(nn.Module):
    """A pretrained BERT with the head of a task: a linear layer, after dropout, on the encoder.

    A classifier scores its classes and a choice one option at a time, both at the first token; a
    span is found by scores of every token, and has no pooler.
    """

    def __init__(self, config: FinetunedConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.encoder = BertEncoder(config, factory, vocab_size)
        self.pooler = None if config.head == "span" else Pooler(config, factory)
        self.dropout = factory.dropout(config.hidden_dropout, "head")
        outputs = {"classifier": len(config.labels), "choice": 1, "span": SPAN_ENDS}[config.head]
        self.head = factory.linear(config.hidden_size, outputs, std=config.init_method_std)

    def forward(self, tokens: Tensor, token_types: Tensor, is_real: Tensor) -> Tensor:
        """Scores [b, classes], [b, 1] of options or [b, s, 2], fp32 at least; arguments as of the
        encoder."""
        x = self.encoder(tokens, token_types, is_real)
        if self.pooler is None:
            return self._score(x).view(*tokens.shape, SPAN_ENDS)
        return self._score(self.pooler(x, tokens.shape[0]))

    def _score(self, x: Tensor) -> Tensor:
        """x [n, h] to scores [n, k], fp32: in bf16 scores that differ by less than one part in 256
        would be equal, and the first of them the answer."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = {name: each.to(wide) for name, each in self.head.named_parameters()}
        scores: Tensor = functional_call(self.head, weights, (self.dropout(x).to(wide),))
        return scores
