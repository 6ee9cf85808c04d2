"""The kernels that AdamW runs on, by the name that --optimizer-impl gives them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron.config.training import OptimizerConfig


class Adam(Protocol):
    """AdamW of flat weights, whose `grad` is set; moments: of each (exp_avg, exp_avg_sq)."""

    moments: list[tuple[Tensor, Tensor]]

    def set_updates(self, updates: int) -> None:
        """Say how many updates the moments have behind them."""
        ...

    def step(self, lr: float, factor: float) -> None:
        """Update by the gradients x factor, which are left as anything."""
        ...


class TorchAdam:
    """torch's fused kernel, by its function.

    Its optimizer object imports a compiler's front end in the first step, for 1.8 s, and takes a
    factor only from its own GradScaler.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], decays: Sequence[float], config: OptimizerConfig
    ) -> None:
        self.weights, self.decays, self.config = weights, decays, config
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        self.updates = [torch.tensor(float(updates), device=each.device) for each in self.weights]

    @torch.no_grad()
    def step(self, lr: float, factor: float) -> None:
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
    """NVIDIA apex's FusedAdam, imported only where it is asked for."""

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
