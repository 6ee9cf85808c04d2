"""The learning rate of each update (paper, section 4.2)."""

from __future__ import annotations

from math import cos, pi

from megatron.config.training import OptimizerConfig

DECAY = {
    "cosine": lambda progress: 0.5 * (1.0 + cos(pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


def learning_rate(config: OptimizerConfig, update: int, decay_iters: int) -> float:
    """Learning rate of an update of the weights, counted from 1: linear warm-up, then decay to a
    floor, which holds from update `decay_iters` on.

    With lr_warmup_init the first update has that rate, and every other rate, the floor too, comes
    one update later. These are the rates of torch's SequentialLR of LinearLR and CosineAnnealingLR,
    stepped after each update, and of Megatron-LM's scheduler.
    """
    warmup, first = config.warmup_iters(decay_iters), config.lr_warmup_init
    if first is not None:
        update -= 1
    if update <= warmup:
        first = first or 0.0
        return first + (config.lr - first) * update / warmup
    progress = min(1.0, (update - warmup) / max(1, decay_iters - warmup))
    return config.min_lr + (config.lr - config.min_lr) * DECAY[config.lr_decay_style](progress)
