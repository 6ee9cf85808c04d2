"""What a fine-tuned BERT is trained for: the right class, option or span of each example."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.examples import ExampleBatch
from megatron.train.loader import to_device


class RightAnswers:
    """Cross-entropy of each example's label; of a span the mean of those of its first and its last
    token, each over the tokens of the sequence alone."""

    terms = ("loss",)

    def counts(self, batch: ExampleBatch) -> list[float]:
        return [float(batch.counted.sum())]

    def sums(
        self, model: Any, batch: ExampleBatch, device: torch.device, factors: Tensor
    ) -> Tensor:
        logits = answer_scores(model, batch, device)
        labels, counted = to_device(device, batch.labels, batch.counted)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = F.cross_entropy(logits.to(wide), labels, reduction="none").mean(1)
        return (losses * counted).sum() * factors.to(wide)


def answer_scores(model: Any, batch: ExampleBatch, device: torch.device) -> Tensor:
    """Logits [b, candidates, k] of each example's k labels: those of its classes or options, k = 1,
    or of its tokens as first and last of a span, k = 2; minus infinity at padding."""
    shape = batch.tokens.shape
    arrays = (batch.tokens, batch.token_types, batch.is_real)
    rows = (each.reshape(-1, shape[-1]) for each in arrays)
    tokens, token_types, is_real = to_device(device, *rows)
    logits: Tensor = model(tokens, token_types, is_real)
    if logits.dim() == 3:
        return logits.masked_fill(~is_real[..., None], -torch.inf)
    return logits.reshape(shape[0], -1, 1)
