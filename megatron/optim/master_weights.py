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
from megatron.parallel.gradients import GradientBuffers, Slot


class MasterWeights:
    """The optimizer of a materialised model."""

    def __init__(self, gradients: GradientBuffers, section: OptimizerConfig) -> None:
        self.gradients = gradients
        self.section = section
        self.masters = [_flat_master(buffer.flat, buffer.slots) for buffer in gradients.buffers]
        decays = [section.weight_decay * buffer.decay for buffer in gradients.buffers]
        self.adam: Adam = ADAMS[section.optimizer_impl](self.masters, decays, section)

    def step(self, lr: float, unscale: float, norm: float) -> None:
        """Clip by the global norm and update.

        unscale: scalar that turns the buffers' sums into gradients of the mean loss.
        norm: finite, of all the model's gradients x `unscale`.
        """
        limit = self.section.clip_grad
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.adam.step(lr, unscale * clip)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the parameters that are kept in a narrower dtype."""
        for slot, master in self.slots():
            if slot.parameter.dtype != master.dtype:
                slot.parameter.copy_(slot.view(master))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """(kind, slot, this rank's part) of all that a checkpoint keeps of the optimizer."""
        rows = zip(self.gradients.buffers, self.masters, self.adam.moments, strict=True)
        for buffer, master, (exp_avg, exp_avg_sq) in rows:
            for slot in buffer.slots:
                yield "exp_avg", slot, slot.view(exp_avg)
                yield "exp_avg_sq", slot, slot.view(exp_avg_sq)
                if slot.parameter.dtype != master.dtype:
                    yield "master", slot, slot.view(master)

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Parameters, `tensors()` were filled from a checkpoint of a run with so many updates."""
        self.adam.set_updates(updates)
        self.publish()

    def slots(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """(slot, the flat master in which it lies) of every parameter."""
        for buffer, master in zip(self.gradients.buffers, self.masters, strict=True):
            for slot in buffer.slots:
                yield slot, master


def _flat_master(gradient: Tensor, slots: list[Slot]) -> nn.Parameter:
    master = nn.Parameter(torch.empty_like(gradient))
    master.grad = gradient
    with torch.no_grad():
        for slot in slots:
            view = slot.view(master.detach())
            view.copy_(slot.parameter)
            if slot.parameter.dtype == master.dtype:
                slot.parameter.data = view
    return master
