"""AdamW, its learning-rate schedule and gradient clipping."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.checks import UsageError, fraction, non_negative, optional_positive, positive


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1.5e-4
    """Highest learning rate, reached at the end of warm-up."""

    min_lr: float = 1e-5
    """Learning rate at and after the end of decay."""

    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Curve from the highest to the lowest learning rate."""

    lr_decay_iters: int | None = None
    """Iteration at which decay ends, warm-up included; --train-iters if not given."""

    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises linearly from 0."""

    weight_decay: float = 0.01
    """Decoupled weight decay; biases and LayerNorm are exempt."""

    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""

    optimizer_impl: Literal["torch", "apex"] = "torch"
    """AdamW: torch's own fused kernel, or NVIDIA apex's FusedAdam."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        positive(self, "lr", "adam_eps")
        non_negative(self, "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
        optional_positive(self, "lr_decay_iters")
        fraction(self, "adam_beta1", "adam_beta2")
        if self.min_lr > self.lr:
            raise UsageError(
                f"--min-lr {self.min_lr} is above --lr {self.lr}; --min-lr {self.lr} would work"
            )


@dataclass(frozen=True, kw_only=True)
class BertOptimizerConfig(OptimizerConfig):
    """With the defaults of the paper's BERT (section 4.2)."""

    lr: float = 1e-4
    """Highest learning rate, reached at the end of warm-up."""

    min_lr: float = 0.0
    """Learning rate at and after the end of decay."""

    lr_decay_style: Literal["cosine", "linear", "constant"] = "linear"
    """Curve from the highest to the lowest learning rate."""
