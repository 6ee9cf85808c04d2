"""A factory of plain torch modules: the same models with nothing of megatron/parallel in them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import GPT2Config
from megatron.models.gpt2 import GPT2
from megatron.parallel.factory import LayerFactory


class PlainAttention(nn.Module):
    """Softmax attention, written out."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        rows: Tensor | None = None,
        of_query: Tensor | None = None,
    ) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        if is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v


class NoDropout(nn.Module):
    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        return x


class PlainHead(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        *,
        divisible_by: int,
        bias: bool = False,
        untied_std: float | None = None,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None
        self.weight = None if untied_std is None else nn.Parameter(torch.empty(vocabulary, hidden))

    def forward(
        self,
        x: Tensor,
        embedding: nn.Embedding,
        labels: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        logits = x @ (embedding.weight if self.weight is None else self.weight).T
        if self.bias is not None:
            logits = logits + self.bias
        if labels is None:
            return logits
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses if scales is None else (losses * scales).sum()


def recompute(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return checkpoint(function, *arguments, use_reentrant=False)


def linear(
    inputs: int, outputs: int, *, parts: int = 1, bias: bool = True, std: float
) -> nn.Linear:
    return nn.Linear(inputs, parts * outputs, bias=bias)


DENSE_FACTORY = LayerFactory(
    column=linear,
    grouped_query=linear,
    row=linear,
    linear=linear,
    input=linear,
    output=linear,
    word_embedding=lambda vocabulary, hidden, **_: nn.Embedding(vocabulary, hidden),
    position_embedding=lambda positions, hidden, std: nn.Embedding(positions, hidden),
    rotary=nn.Identity,
    layer_norm=lambda hidden, epsilon: nn.LayerNorm(hidden, eps=epsilon),
    rms_norm=lambda hidden, epsilon: nn.RMSNorm(hidden, eps=epsilon),
    inner_layer_norm=lambda hidden, epsilon: nn.LayerNorm(hidden, eps=epsilon),
    dropout=lambda p, name: NoDropout(),
    attention_core=lambda dropout, name: PlainAttention(),
    head=PlainHead,
    checkpoint=recompute,
    gather=nn.Identity,
    whole=lambda: DENSE_FACTORY,
    stream_shape=lambda n, h: (n, h),
    exchange=lambda x: x,
)


def dense_gpt2(section: GPT2Config, vocab_size: int, weights: dict[str, Tensor]) -> GPT2:
    """In fp64, with the whole weights of a model of layers that are cut."""
    model = GPT2(section, DENSE_FACTORY, vocab_size).double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict({name: weights[name].reshape(shape) for name, shape in shapes.items()})
    return model
