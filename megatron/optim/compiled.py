"""Adam by one compiled kernel, which also rounds the weights: --optimizer-impl compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig

if TYPE_CHECKING:
    from megatron.optim.adam import FlatWeights


class CompiledAdam:
    """As TorchAdam. For each fp32 master of a bf16 weight it reads and writes 32 bytes; torch's
    kernel and the copy of the weights 34 or, where gradients are scaled, 38."""

    def __init__(self, segments: Sequence[FlatWeights], config: OptimizerConfig) -> None:
        self.is_decoupled, betas = config.decoupled_weight_decay, [config.adam_beta1]
        betas.append(config.adam_beta2)
        where: Any = segments[0].weight.device if segments else None
        self.betas = torch.tensor(betas, dtype=torch.float64, device=where)
        self.segments: list[tuple[float, torch.dtype, list[Tensor | None]]] = []
        self.constants: dict[float, Tensor] = {}
        for each in segments:
            constants = [each.decay, config.adam_eps, *betas, *(1 - beta for beta in betas)]
            self.constants[each.decay] = self.betas.new_tensor(constants)
            tensors = (each.weight, each.gradient, each.exp_avg, each.exp_avg_sq, each.half)
            # Rows of 64, so that one kernel is for all lengths and yet loads 16 bytes at a time.
            rows = [None if x is None else x.view(-1, 64) for x in tensors]
            for x in rows:
                if x is not None:
                    torch._dynamo.maybe_mark_dynamic(x, 0)
            wide = torch.promote_types(each.weight.dtype, torch.float32)
            self.segments.append((each.decay, wide, rows))
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the moments have had."""
        self.updates = torch.full_like(self.betas[0], updates)

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor) -> None:
        """As TorchAdam's; also rounds the weights."""
        if not self.segments:
            return
        self.updates += factor != 0
        first, second = (1 - self.betas**self.updates).unbind()
        rate = torch.full_like(first, lr)
        numbers = torch.stack([factor, rate, rate / first, second.sqrt()])
        given = {
            (decay, wide): torch.cat([numbers, self.constants[decay]]).to(wide)
            for decay, wide in {each[:2] for each in self.segments}
        }
        for decay, wide, rows in self.segments:
            compiled_update()(*rows, given[decay, wide], self.is_decoupled)


@cache
def compiled_update() -> Callable[..., None]:
    return torch.compile(update, fullgraph=True)


def update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    half: Tensor | None,
    numbers: Tensor,
    is_decoupled: bool,
) -> None:
    """Adam's formula in the order of torch's kernel, in the dtype of the numbers. half: None, or
    receives the rounded weights."""
    factor, lr, step_size, root, decay, eps, beta1, beta2, rest1, rest2 = numbers.unbind()
    w, g = weight.to(numbers.dtype), gradient.to(numbers.dtype) * factor
    if is_decoupled:
        w = w - lr * decay * w
    else:
        g = g + decay * w
    m = beta1 * exp_avg.to(numbers.dtype) + rest1 * g
    v = beta2 * exp_avg_sq.to(numbers.dtype) + rest2 * g * g
    w = w - step_size * m / (v.sqrt() / root + eps)
    # With a factor of 0 some of these are not finite.
    for old, new in ((weight, w), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(factor != 0, new.to(old.dtype), old))
    if half is not None:
        half.copy_(torch.where(factor != 0, weight.to(half.dtype), half))
