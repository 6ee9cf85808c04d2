"""Adam by a kernel of NVIDIA's apex, which must be installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megatron.config.training import OptimizerConfig
from megatron.libraries import load


class ApexAdam:
    """Like TorchAdam, but by apex's FusedAdam. segments: FlatWeights of adam.py."""

    def __init__(self, segments: Sequence[Any], config: OptimizerConfig) -> None:
        self.segments = segments
        weights = [nn.Parameter(each.weight) for each in segments]
        pairs = [*zip(weights, segments, strict=True)]
        for weight, each in pairs:
            weight.grad = each.gradient
        self.optimizer: Any = load("apex.optimizers", "--optimizer-impl torch").FusedAdam(
            [{"params": [weight], "weight_decay": each.decay} for weight, each in pairs],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            adam_w_mode=config.decoupled_weight_decay,
        )
        for weight, each in pairs:
            moments = {"exp_avg": each.exp_avg, "exp_avg_sq": each.exp_avg_sq}
            self.optimizer.state[weight] = moments
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        for group in self.optimizer.param_groups:
            group["step"] = updates

    def step(self, lr: float, factor: Tensor) -> None:
        if not factor.item():  # waits for the GPU
            return
        for each in self.segments:
            each.gradient.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
