"""A pretrained BERT, with the head of a task in place of its own (paper, section 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron.config.model import FinetunedConfig
from megatron.models.bert import BertEncoder, Pooler
from megatron.parallel.layers import LayerFactory

SPAN_ENDS = 2  # scores of a token as the first and as the last one of a span


class FinetunedBert(nn.Module):
    """A linear layer, after dropout, on what the encoder sees.

    A classifier scores its classes and a choice one option at a time, both at the first token; a
    span is told from scores at every token, and has no pooler.
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
