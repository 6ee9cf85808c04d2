"""What a model is trained for: sums over a batch, and what their means are over.

A loss is a sum of terms, each the mean of something over the global batch: over its counted tokens,
masked tokens, samples. An objective gives the sums of one micro-batch and, before the model has
seen it, the denominators: step.py adds up both over micro-batches and ranks, and divides. Every
model is its own objective; `WholeLogitsLoss` is one for a loss of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.parallel.mesh import Mesh
from megatron.parallel.regions import gather_with_gradient


class Objective(Protocol):
    """What is minimised: a sum of k terms, each a mean over the global batch."""

    @property
    def terms(self) -> Sequence[str]:
        """What the record calls the k terms of the loss."""
        ...

    def denominators(self, batch: Any) -> list[float]:
        """What the mean of each term is over, in this batch of arrays: k numbers."""
        ...

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        """The sum of each term over this batch x its loss scale, [k], fp32 or wider: the last stage
        of the model.

        x: [n, h], what the layers return. batch: of tensors. loss_scales: fp64 [k].
        """
        ...


class WholeLogitsLoss:
    """A loss of one's own, on whole logits.

    Every rank gathers all columns: of n tokens and a vocabulary of v, 4 n v bytes and more, where a
    model's own loss holds n v / t at most.
    """

    terms = ("loss",)

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        function: Callable[[Tensor, Any], Tensor],
        denominator: Callable[[Any], float],
    ) -> None:
        """model: one with `logits`, as GPT2. function: of the logits [n, vocabulary], fp32 or
        wider, and the batch, to the sum of the loss, a scalar. denominator: of a batch, what the
        mean is over."""
        self.model, self.mesh, self.function, self.denominator = model, mesh, function, denominator

    def denominators(self, batch: Any) -> list[float]:
        return [self.denominator(batch)]

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        logits = gather_with_gradient(self.model.logits(x), -1, self.mesh.vocabulary)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = self.function(logits[:, : self.model.vocab_size], batch)
        return (total * loss_scales.to(total.dtype)).view(1)
