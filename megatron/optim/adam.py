"""AdamW on flat fp32 master weights, one flat tensor for each gradient buffer.

The masters lie in memory exactly as the gradients do, so that scaling, norm and AdamW are a few
passes over a few long tensors. Parameters that have the masters' dtype are views of them; those of
a narrower dtype are rounded from them after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron.config.training import OptimizerConfig
from megatron.parallel.gradients import GradientBuffers
from megatron.parallel.sharding import GradientView


class TorchAdam:
    """AdamW of flat weights, whose `grad` is set, by torch's fused kernel.

    moments: (exp_avg, exp_avg_sq) of each weight. The kernel is called as a function: torch's
    optimizer object imports a compiler's front end in the first step, for 1.8 s, and takes a factor
    only from its own GradScaler.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], decays: Sequence[float], config: OptimizerConfig
    ) -> None:
        self.weights, self.decays, self.config = weights, decays, config
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        """Set how many updates the moments have behind them."""
        self.updates = [torch.tensor(float(updates), device=each.device) for each in self.weights]

    @torch.no_grad()
    def step(self, lr: float, factor: float) -> None:
        """Update by the gradients x factor; what is left in the gradients is undefined."""
        config = self.config
        rows = zip(self.weights, self.decays, self.moments, self.updates, strict=True)
        for weight, decay, (exp_avg, exp_avg_sq), updates in rows:
            assert weight.grad is not None
            divisor = None
            if weight.dtype == torch.float64:  # the kernel's divisor is fp32
                weight.grad.mul_(factor)
            elif factor != 1.0:
                divisor = torch.full((), 1.0 / factor, device=weight.device)  # nothing is copied
            adamw(
                [weight],
                [weight.grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [updates],
                fused=True,
                grad_scale=divisor,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=lr,
                weight_decay=decay,
                eps=config.adam_eps,
                maximize=False,
            )


class ApexAdam:
    """The same by NVIDIA apex's FusedAdam, imported only where it is asked for."""

    def __init__(
        self, weights: Sequence[nn.Parameter], decays: Sequence[float], config: OptimizerConfig
    ) -> None:
        self.weights = weights
        self.optimizer: Any = import_module("apex.optimizers").FusedAdam(
            [
                {"params": [weight], "weight_decay": decay}
                for weight, decay in zip(weights, decays, strict=True)
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            adam_w_mode=True,
        )
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
        for weight, (exp_avg, exp_avg_sq) in zip(weights, self.moments, strict=True):
            self.optimizer.state[weight] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        for group in self.optimizer.param_groups:
            group["step"] = updates

    def step(self, lr: float, factor: float) -> None:
        for weight in self.weights:
            assert weight.grad is not None
            weight.grad.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


ADAMS: dict[str, type[TorchAdam] | type[ApexAdam]] = {"torch": TorchAdam, "apex": ApexAdam}
"""By the name that --optimizer-impl gives them."""


class MasterWeights:
    """The optimizer of a materialised model."""

    def __init__(self, gradients: GradientBuffers, config: OptimizerConfig) -> None:
        self.gradients = gradients
        self.config = config
        self.masters = [_flat_master(buffer.flat, buffer.views) for buffer in gradients.buffers]
        decays = [config.weight_decay * buffer.decay for buffer in gradients.buffers]
        self.adam = ADAMS[config.optimizer_impl](self.masters, decays, config)

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
        for view, master in self.views():
            if view.parameter.dtype != master.dtype:
                view.parameter.copy_(view.view(master))

    def views(self) -> Iterator[tuple[GradientView, nn.Parameter]]:
        """(view, the flat master of which it is one) of every parameter."""
        for buffer, master in zip(self.gradients.buffers, self.masters, strict=True):
            for view in buffer.views:
                yield view, master

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
        """Parameters and `tensors()` were filled from a checkpoint behind so many updates."""
        self.adam.set_updates(updates)
        self.publish()


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
