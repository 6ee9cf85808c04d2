"""The learning rate of each update (paper, section 4.2)."""

from __future__ import annotations

from math import cos, pi, sqrt

from megatron.config.parts import PARTS
from megatron.config.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, decay_iters: int) -> float:
    """Learning rate of an update of the weights, counted from 1: linear warm-up, then the part of
    --lr-decay-style, which ends at update `decay_iters`.

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
    style = PARTS["lr_decay_style"].find(config.lr_decay_style)
    return float(style(config=config, update=update, warmup=warmup, end=decay_iters))


def cosine(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    return _between(config, 0.5 * (1.0 + cos(pi * _progress(update, warmup, end))))


def linear(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    return _between(config, 1.0 - _progress(update, warmup, end))


def constant(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    return config.lr


def inverse_sqrt(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    """Vaswani et al., arXiv 1706.03762, 5.3; never below the lowest rate. `end` has no effect."""
    return max(config.min_lr, config.lr * sqrt(max(1, warmup) / update))


def wsd(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    """Warm-up, stable, decay: Hu et al., arXiv 2404.06395, 4; the decay is linear."""
    decay = config.lr_wsd_decay_iters or max(1, round(0.1 * end))
    return _between(config, 1.0 - _progress(update, max(warmup, end - decay), end))


def _progress(update: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (update - start) / max(1, end - start)))


def _between(config: OptimizerConfig, share: float) -> float:
    """The rate at a share of the way from the lowest to the highest."""
    return config.min_lr + (config.lr - config.min_lr) * share
