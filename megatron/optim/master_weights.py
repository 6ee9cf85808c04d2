"""AdamW on flat fp32 master weights, one flat tensor for each gradient buffer.

The masters lie in memory exactly as the gradients do, so that scaling, norm and AdamW are a few
passes over a few long tensors. Parameters that have the masters' dtype are views of them; those of
a narrower dtype are rounded from them after each step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.config.training import OptimizerConfig
from megatron.optim.adam import ADAMS, Adam
from megatron.parallel.gradients import GradientBuffers
from megatron.parallel.sharding import GradientView


class MasterWeights:
    """The optimizer of a materialised model."""

    def __init__(self, gradients: GradientBuffers, config: OptimizerConfig) -> None:
        self.gradients = gradients
        self.config = config
        self.masters = [_flat_master(buffer.flat, buffer.views) for buffer in gradients.buffers]
        decays = [config.weight_decay * buffer.decay for buffer in gradients.buffers]
        self.adam: Adam = ADAMS[config.optimizer_impl](self.masters, decays, config)

    def step(self, lr: float, unscale: float, norm: float) -> None:
        """Clip by the global norm and update.

        unscale: scalar that turns the buffers' sums into gradients of the mean loss.
        norm: finite, of all the model's gradients x `unscale`.
        """
        limit = self.config.clip_grad
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.adam.step(lr, unscale * clip)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the parameters that are kept in a narrower dtype."""
        for view, master in self.slots():
            if view.parameter.dtype != master.dtype:
                view.parameter.copy_(view.view(master))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, GradientView, Tensor]]:
        """(kind, view, this rank's shard) of all that a checkpoint keeps of the optimizer."""
        rows = zip(self.gradients.buffers, self.masters, self.adam.moments, strict=True)
        for buffer, master, (exp_avg, exp_avg_sq) in rows:
            for view in buffer.views:
                yield "exp_avg", view, view.view(exp_avg)
                yield "exp_avg_sq", view, view.view(exp_avg_sq)
                if view.parameter.dtype != master.dtype:
                    yield "master", view, view.view(master)

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Parameters, `tensors()` were filled from a checkpoint of a run with so many updates."""
        self.adam.set_updates(updates)
        self.publish()

    def slots(self) -> Iterator[tuple[GradientView, nn.Parameter]]:
        """(view, the flat master in which it lies) of every parameter."""
        for buffer, master in zip(self.gradients.buffers, self.masters, strict=True):
            for view in buffer.views:
                yield view, master


def _flat_master(gradient: Tensor, views: list[GradientView]) -> nn.Parameter:
    master = nn.Parameter(torch.empty_like(gradient))
    master.grad = gradient
    with torch.no_grad():
        for each in views:
            own = each.view(master.detach())
            own.copy_(each.parameter)
            if each.parameter.dtype == master.dtype:
                each.parameter.data = own
    return master
