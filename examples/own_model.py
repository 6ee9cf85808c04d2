"""A block and a loss of your own in GPT-2, by the project's programs, at every layout.

    python pretrain.py --model examples.own_model:KIND --preset quickstart --mock-data \\
        --label-smoothing 0.1

GPT-NeoX (arXiv 2204.06745) adds attention and MLP to the hidden states side by side. The loss is
cross-entropy, with labels smoothed as `--label-smoothing` says.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from megatron.api import (
    GPT2,
    GPT2Batch,
    GPT2Config,
    PretrainGPT2Config,
    Sequences,
    TransformerLayer,
    WholeLogitsLoss,
    find_kind,
)


class ParallelLayer(TransformerLayer):
    """x + Attention(norm(x)) + MLP(norm(x)); x is [n, h], or this rank's part of it."""

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        attention = self.attention(self.attention_norm(x), at)
        mlp = self.mlp(self.mlp_norm(x))
        keys = at.dropout_keys
        return x + self.attention_dropout(attention, keys) + self.mlp_dropout(mlp, keys)


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(GPT2Config):
    kind: ClassVar[str] = f"{__name__}:KIND"
    label_smoothing: float = 0.0
    """Share of each label that is spread over the vocabulary."""


class NeoX(GPT2):
    make_layer = ParallelLayer

    def __init__(self, config: NeoXConfig, factory: Any, vocab_size: int) -> None:
        super().__init__(config, factory, vocab_size)
        self.label_smoothing = config.label_smoothing

    def loss(self, x: Tensor, batch: GPT2Batch, loss_scales: Tensor) -> Tensor:
        if not self.label_smoothing:
            return super().loss(x, batch, loss_scales)
        own = WholeLogitsLoss(self, self.head.mesh, self.smoothed)
        return own.loss(x, batch, loss_scales)

    def smoothed(self, logits: Tensor, batch: GPT2Batch) -> Tensor:
        """The sum over this rank's tokens; a step divides by the number of those that count."""
        labels = batch.labels.flatten()
        losses = F.cross_entropy(
            logits, labels, reduction="none", label_smoothing=self.label_smoothing
        )
        return losses @ batch.loss_mask.flatten().to(losses.dtype)


@dataclass(frozen=True, kw_only=True)
class PretrainNeoXConfig(PretrainGPT2Config):
    model: NeoXConfig


# As GPT-2, but for these; there are no tables to convert it to HuggingFace.
KIND = replace(
    find_kind("gpt2"),
    config=f"{__name__}:NeoXConfig",
    model=f"{__name__}:NeoX",
    program=f"{__name__}:PretrainNeoXConfig",
    conversion=None,
)
