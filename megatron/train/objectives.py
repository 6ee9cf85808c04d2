"""Training objectives: sums of loss terms over a batch, and the denominators of their means.

A loss is a sum of terms. Each term is a mean over the global batch: over its counted tokens, masked
tokens or samples. An objective gives the sums of one micro-batch and, before the model runs on it,
the denominators; step.py adds up both over micro-batches and ranks, and divides. Every model is its
own objective; `WholeLogitsLoss` is the objective for a user's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.parallel.mesh import Mesh
from megatron.parallel.regions import gather_with_gradient


class Objective(Protocol):
    """The loss to be minimised: a sum of k terms, each a mean over the global batch.

    Under context parallelism a batch has this rank's tokens of its samples (`token_order`), and
    sums and denominators are added over these ranks, too.
    """

    @property
    def terms(self) -> Sequence[str]:
        """The names of the k terms of the loss in the metrics."""
        ...

    def denominators(self, batch: Any) -> list[float]:
        """The denominator of each term in this batch of arrays: k numbers."""
        ...

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        """The last part of the model: the sum of each term over this batch x its loss scale, [k],
        fp32 or wider.

        x: [n, h], the output of the layers. batch: of tensors. loss_scales: fp64 [k].
        """
        ...


class WholeLogitsLoss:
    """A user's own loss, on whole logits.

    Every rank gathers all columns: 4 n v bytes or more for n tokens and a vocabulary of v. A
    model's own loss holds n v / t at most.
    """

    terms = ("loss",)

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        function: Callable[[Tensor, Any], Tensor],
        denominator: Callable[[Any], float] | None = None,
    ) -> None:
        """model: one with `logits`, such as GPT2. function: takes the logits [n, vocabulary], fp32
        or wider, and the batch; returns the sum of the loss, a scalar. denominator: takes a batch;
        returns the denominator of the mean, by default the model's. Under context parallelism a
        batch has this rank's tokens, and both are added over the ranks, too."""
        self.model, self.mesh, self.function, self.denominator = model, mesh, function, denominator

    def denominators(self, batch: Any) -> list[float]:
        own = self.denominator
        return self.model.denominators(batch) if own is None else [own(batch)]

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        logits = gather_with_gradient(self.model.logits(x), -1, self.mesh.vocabulary)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = self.function(logits[:, : self.model.vocab_size], batch)
        return (total * loss_scales.to(total.dtype)).view(1)
