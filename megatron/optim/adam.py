"""The kernels that AdamW runs on, by the name that --optimizer-impl gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from megatron.config.optimizer import OptimizerConfig

Groups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Adam:
    """AdamW with the moments of parameter p in state[p]["exp_avg"] and state[p]["exp_avg_sq"]."""

    make: Callable[[Groups, OptimizerConfig], Optimizer]
    set_updates: Callable[[Optimizer, int], None]  # how many updates the moments have behind them


def _make_torch(groups: Groups, section: OptimizerConfig) -> Optimizer:
    return torch.optim.AdamW(groups, **_settings(section), fused=True)


def _make_apex(groups: Groups, section: OptimizerConfig) -> Optimizer:
    fused_adam = import_module("apex.optimizers").FusedAdam  # only where it is asked for
    optimizer: Optimizer = fused_adam(groups, **_settings(section), adam_w_mode=True)
    return optimizer


def _settings(section: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": section.lr,
        "betas": (section.adam_beta1, section.adam_beta2),
        "eps": section.adam_eps,
    }


def _set_torch(optimizer: Optimizer, updates: int) -> None:
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        optimizer.state[parameter]["step"] = torch.tensor(float(updates), device=parameter.device)


def _set_apex(optimizer: Optimizer, updates: int) -> None:
    for group in optimizer.param_groups:
        group["step"] = updates


ADAMS = {
    "torch": Adam(make=_make_torch, set_updates=_set_torch),
    "apex": Adam(make=_make_apex, set_updates=_set_apex),
}
