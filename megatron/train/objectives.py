"""What each kind of model is trained for: sums over a batch, and what their means are over.

A loss is a sum of terms, each the mean of something over the global batch: over its counted tokens,
masked tokens, samples. An objective gives the sums of one micro-batch and, before the model has
seen it, the counts: step.py adds up both over micro-batches and ranks, and divides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import BertConfig, FinetunedConfig, ModelConfig
from megatron.parallel.product import STEP
from megatron.train.finetuning_objectives import RightAnswers
from megatron.train.on_device import on_device

if TYPE_CHECKING:
    from megatron.data.bert import BertBatch
    from megatron.data.gpt2 import GPT2Batch


class Objective(Protocol):
    @property
    def terms(self) -> tuple[str, ...]:
        """What the record calls the k terms of the loss."""
        ...

    def counts(self, batch: Any) -> list[float]:
        """What the mean of each term is over, in this batch: k numbers."""
        ...

    def sums(self, model: Any, batch: Any, device: torch.device, factors: Tensor) -> Tensor:
        """The sum of each term over this batch x its factor, [k], fp32 or wider.

        factors: fp64 [k]. With gradient buffers, what is differentiated has to be the sum of the
        result and nothing else (linear_cross_entropy.py).
        """
        ...


class NextToken:
    """GPT-2's: cross-entropy of each counted token."""

    terms = ("loss",)

    def counts(self, batch: GPT2Batch) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def sums(self, model: Any, batch: GPT2Batch, device: torch.device, factors: Tensor) -> Tensor:
        arrays = (batch.tokens, batch.positions, batch.labels, batch.loss_mask)
        tokens, positions, labels, mask = on_device(device, *arrays)
        starts = batch.document_starts
        document_starts = None if starts is None else on_device(device, starts)[0]
        total: Tensor = model(tokens, positions, labels, document_starts, mask.double() * factors)
        return total[None]


class MaskedTokensAndOrder:
    """BERT's: cross-entropy of each masked token, and of the order of the segments of a sample."""

    terms = ("mlm_loss", "sop_loss")

    def counts(self, batch: BertBatch) -> list[float]:
        return [float(np.count_nonzero(batch.loss_mask)), float(len(batch.is_swapped))]

    def sums(self, model: Any, batch: BertBatch, device: torch.device, factors: Tensor) -> Tensor:
        picked = np.flatnonzero(batch.loss_mask)
        is_picked = np.arange(-(-len(picked) // STEP) * STEP) < len(picked)
        # Others count nothing, so that products of few sizes come again and again.
        picked = np.pad(picked, (0, len(is_picked) - len(picked)))
        labels = batch.labels.reshape(-1)[picked]
        arrays = (batch.tokens, batch.token_types, batch.is_real, picked, labels, is_picked)
        *inputs, counted = on_device(device, *arrays)
        masked, order = model(*inputs, counted * factors[0])
        (is_swapped,) = on_device(device, batch.is_swapped)
        wide = torch.promote_types(order.dtype, torch.float32)
        of_order = F.cross_entropy(order.to(wide), is_swapped, reduction="sum")
        return torch.stack([masked, of_order * factors[1].to(wide)])


OBJECTIVES: dict[str, Objective] = {
    ModelConfig.kind: NextToken(),
    BertConfig.kind: MaskedTokensAndOrder(),
    FinetunedConfig.kind: RightAnswers(),
}
