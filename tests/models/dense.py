"""A factory of plain torch modules: the same models with nothing of megatron/parallel in them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.models.gpt2 import GPT2
from megatron.parallel.layers import LayerFactory


class PlainAttention(nn.Module):
    """Softmax attention, written out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        if mask is None:  # the queries are the last of the tokens
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class PlainHead(nn.Module):
    def __init__(self, vocabulary: int, *, bias_divisible_by: int | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias_divisible_by else None

    def forward(
        self,
        x: Tensor,
        embedding: nn.Embedding,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        logits = x @ embedding.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        if labels is None:
            return logits
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses if scales is None else (losses * scales).sum()


def recompute(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return checkpoint(function, *arguments, use_reentrant=False)


DENSE_FACTORY = LayerFactory(
    column=lambda inputs, outputs, parts=1, std=0.0: nn.Linear(inputs, parts * outputs),
    row=lambda inputs, outputs, std: nn.Linear(inputs, outputs),
    linear=lambda inputs, outputs, std: nn.Linear(inputs, outputs),
    word_embedding=lambda vocabulary, hidden, divisible_by, std: nn.Embedding(vocabulary, hidden),
    position_embedding=lambda positions, hidden, std: nn.Embedding(positions, hidden),
    norm=lambda hidden, epsilon: nn.LayerNorm(hidden, eps=epsilon),
    dropout=lambda p, name: nn.Dropout(p),
    attention_core=lambda dropout, name: PlainAttention(),
    head=PlainHead,
    checkpoint=recompute,
)


def dense_gpt2(section: ModelConfig, vocab_size: int, weights: dict[str, Tensor]) -> GPT2:
    """In fp64, with the whole weights of a model of layers that are cut."""
    model = GPT2(section, DENSE_FACTORY, vocab_size).double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict({name: weights[name].reshape(shape) for name, shape in shapes.items()})
    return model
