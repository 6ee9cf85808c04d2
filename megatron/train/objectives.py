"""What each kind of model is trained for: sums over a batch, and what their means are over.

A loss is a sum of terms, each the mean of something over the global batch: over its counted tokens,
masked tokens, samples. An objective gives the sums of one micro-batch and, before the model has
seen it, the denominators: step.py adds up both over micro-batches and ranks, and divides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import BertConfig, FinetunedConfig, ModelConfig
from megatron.parallel.kernels import padded_rows
from megatron.train.loader import to_device

if TYPE_CHECKING:
    from megatron.data.batch import ExampleBatch
    from megatron.data.bert import BertBatch
    from megatron.data.gpt2 import GPT2Batch


class Objective(Protocol):
    @property
    def terms(self) -> tuple[str, ...]:
        """What the record calls the k terms of the loss."""
        ...

    def denominators(self, batch: Any) -> list[float]:
        """What the mean of each term is over, in this batch: k numbers."""
        ...

    def sums(self, model: Any, batch: Any, device: torch.device, loss_scales: Tensor) -> Tensor:
        """The sum of each term over this batch x its loss scale, [k], fp32 or wider.

        loss_scales: fp64 [k].
        """
        ...


class NextToken:
    """GPT-2's: cross-entropy of each counted token."""

    terms = ("loss",)

    def denominators(self, batch: GPT2Batch) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def sums(
        self, model: Any, batch: GPT2Batch, device: torch.device, loss_scales: Tensor
    ) -> Tensor:
        arrays = (batch.tokens, batch.positions, batch.labels, batch.loss_mask)
        tokens, positions, labels, mask = to_device(device, *arrays)
        starts = batch.document_starts
        document_starts = None if starts is None else to_device(device, starts)[0]
        scales = mask.double() * loss_scales
        total: Tensor = model(tokens, positions, labels, document_starts, scales)
        return total[None]


class MaskedTokensAndOrder:
    """BERT's: cross-entropy of each masked token, and of the order of the segments of a sample."""

    terms = ("mlm_loss", "sop_loss")

    def denominators(self, batch: BertBatch) -> list[float]:
        return [float(np.count_nonzero(batch.loss_mask)), float(len(batch.is_swapped))]

    def sums(
        self, model: Any, batch: BertBatch, device: torch.device, loss_scales: Tensor
    ) -> Tensor:
        picked = np.flatnonzero(batch.loss_mask)
        is_picked = np.arange(padded_rows(len(picked))) < len(picked)
        # Padded with rows that count nothing, so that matmuls of few sizes come again and again.
        picked = np.pad(picked, (0, len(is_picked) - len(picked)))
        labels = batch.labels.reshape(-1)[picked]
        arrays = (batch.tokens, batch.token_types, batch.is_real, picked, labels, is_picked)
        *inputs, counted = to_device(device, *arrays)
        masked, order = model(*inputs, counted * loss_scales[0])
        (is_swapped,) = to_device(device, batch.is_swapped)
        wide = torch.promote_types(order.dtype, torch.float32)
        of_order = F.cross_entropy(order.to(wide), is_swapped, reduction="sum")
        return torch.stack([masked, of_order * loss_scales[1].to(wide)])


class RightAnswers:
    """Cross-entropy of each example's label; of a span the mean of those of its first and its last
    token, each over the tokens of the sequence alone."""

    terms = ("loss",)

    def denominators(self, batch: ExampleBatch) -> list[float]:
        return [float(batch.counted.sum())]

    def sums(
        self, model: Any, batch: ExampleBatch, device: torch.device, loss_scales: Tensor
    ) -> Tensor:
        logits = answer_scores(model, batch, device)
        labels, counted = to_device(device, batch.labels, batch.counted)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = F.cross_entropy(logits.to(wide), labels, reduction="none").mean(1)
        return (losses * counted).sum() * loss_scales.to(wide)


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


OBJECTIVES: dict[str, Objective] = {
    ModelConfig.kind: NextToken(),
    BertConfig.kind: MaskedTokensAndOrder(),
    FinetunedConfig.kind: RightAnswers(),
}
