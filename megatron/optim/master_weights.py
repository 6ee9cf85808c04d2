"""AdamW on flat fp32 master weights, one flat tensor for each gradient buffer.

The masters lie in memory exactly as the gradients do, so that scaling, norm and AdamW are a few
passes over a few long tensors. Parameters that have the masters' dtype are views of them; those of
a narrower dtype are rounded from them after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.parallel.gradients import GradientBuffers, Slot
from megatron.parallel.mesh import Axis


class MasterWeights:
    """The optimizer of a materialised model."""

    def __init__(
        self, gradients: GradientBuffers, section: OptimizerConfig, model_axis: Axis
    ) -> None:
        """model_axis: the ranks that together hold one model and so agree on the norm."""
        self.gradients = gradients
        self.section = section
        self.model_axis = model_axis
        self.masters = [_flat_master(buffer.flat, buffer.slots) for buffer in gradients.buffers]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [master], "weight_decay": section.weight_decay * buffer.decay}
                for master, buffer in zip(self.masters, gradients.buffers, strict=True)
            ],
            betas=(section.adam_beta1, section.adam_beta2),
            eps=section.adam_eps,
            fused=True,
        )
        for master in self.masters:  # made here and not in the first step, to be loaded into
            self.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, lr: float, unscale: float) -> float:
        """Clip by the global norm and update; return that norm, of the gradients x `unscale`.

        unscale: scalar that turns the buffers' sums into gradients of the mean loss. Where the
        norm is not finite nothing is updated; since it is global, every rank agrees.
        """
        norm = self.gradients.norm(self.model_axis).item() * unscale
        if not isfinite(norm):
            return norm
        limit = self.section.clip_grad
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.gradients.scale_(unscale * clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the parameters that are kept in a narrower dtype."""
        for slot, master in self._slots():
            if slot.parameter.dtype != master.dtype:
                slot.parameter.copy_(slot.view(master))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """(kind, slot, this rank's part) of all that a checkpoint keeps of the optimizer."""
        for slot, master in self._slots():
            state = self.adamw.state[master]
            yield "exp_avg", slot, slot.view(state["exp_avg"])
            yield "exp_avg_sq", slot, slot.view(state["exp_avg_sq"])
            if slot.parameter.dtype != master.dtype:
                yield "master", slot, slot.view(master)

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Parameters, `tensors()` were filled from a checkpoint of a run with so many updates."""
        for master in self.masters:
            self.adamw.state[master]["step"].fill_(updates)
        self.publish()

    def _slots(self) -> Iterator[tuple[Slot, nn.Parameter]]:
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
