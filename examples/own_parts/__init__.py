"""Parts of a user's own, one of each kind, for own_parts.toml. They are called with keywords;
docs/configuration.md lists those of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.api import (
    GPT2,
    Action,
    Callback,
    GPT2Batch,
    GPT2Config,
    Inputs,
    LayerNorm,
    OptimizerConfig,
    PretrainGPT2Config,
    StepResult,
    all_reduce,
    find_kind,
)


def connect(rank: int, world_size: int, **settings: Any) -> None:
    """Process group: says how many processes are connected."""
    dist.init_process_group(rank=rank, world_size=world_size, **settings)
    if rank == 0:
        print(f"connected {world_size} processes")


class ClampedNorm(LayerNorm):
    """Layer: a LayerNorm without outliers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-2, 2)


class ScaledGPT2(GPT2):
    """Model: embeddings are multiplied by the root of their width (arXiv 1706.03762, 3.4)."""

    def embed(self, batch: GPT2Batch) -> Tensor:
        return super().embed(batch) * self.transformer.hidden_size**0.5


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(GPT2Config):
    kind: ClassVar[str] = "own_parts:KIND"


@dataclass(frozen=True, kw_only=True)
class PretrainScaledConfig(PretrainGPT2Config):
    model: ScaledConfig


KIND = replace(
    find_kind("gpt2"),
    config="own_parts:ScaledConfig",
    model="own_parts:ScaledGPT2",
    program="own_parts:PretrainScaledConfig",
    conversion=None,
)


class Sums:
    """Sequences in which each token is the sum of the two before it, modulo the vocabulary. The
    second token grows with the sample's number."""

    vocabulary, samples_per_epoch = 64, 1024

    def __init__(self, length: int) -> None:
        self.length = length

    def batch(self, numbers: Sequence[int]) -> GPT2Batch:
        """tokens, labels, positions int64 [b, s]; loss_mask float32 [b, s], 1 where it counts."""
        rows = np.zeros((len(numbers), self.length + 1), np.int64)
        rows[:, 1] = (1 + np.array(numbers) // 16) % self.vocabulary
        for place in range(2, self.length + 1):
            rows[:, place] = (rows[:, place - 1] + rows[:, place - 2]) % self.vocabulary
        shape = len(numbers), self.length
        return GPT2Batch(
            tokens=rows[:, :-1],
            labels=rows[:, 1:],
            positions=np.tile(np.arange(self.length), (len(numbers), 1)),
            loss_mask=np.ones(shape, np.float32),
        )


def open_sums(config: PretrainGPT2Config) -> Inputs:
    """Data set."""
    samples = Sums(config.data.seq_length)
    return Inputs.of_samples(samples, samples.vocabulary, content="sums of two")


def twice(number: int, samples_per_epoch: int, seed: int) -> int:
    """Sampler: reads each sample twice, one after the other."""
    return number // 2


class Lion(torch.optim.Optimizer):
    """Steps of one size, along the sign of a mean (Chen et al., arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (one, two), lr = group["betas"], group["lr"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - one).sign_(), alpha=-lr)
                mean.lerp_(p.grad, 1 - two)


def lion(params: list[dict[str, Any]], config: OptimizerConfig) -> Lion:
    """Optimizer; params are groups of parameters, as torch's optimizers take them."""
    return Lion(params, config.lr, (config.adam_beta1, config.adam_beta2))


def halved(config: OptimizerConfig, update: int, warmup: int, end: int) -> float:
    """Learning rate: halved after each quarter of the run."""
    return max(config.min_lr, config.lr * 0.5 ** (4 * (update - 1) // end))


def in_bf16(x: Tensor, axis: Any) -> Tensor:
    """Gradient reduction: half of the bytes are sent, and the sum is rounded."""
    return all_reduce(x.bfloat16(), axis).to(x.dtype)


def last_first(ranks: int, micro_batches: int, virtual: int) -> list[list[Action]]:
    """Pipeline schedule: all forwards, then the backwards from the last micro-batch on."""
    return [
        [Action("forward", rank, n) for n in range(micro_batches)]
        + [Action("backward", rank, n) for n in reversed(range(micro_batches))]
        for rank in range(ranks)
    ]


class Accuracy(Callback):
    """Callback: adds the share of labels whose logit is the largest, and ends the run above 0.9."""

    wants_outputs = True

    def post_step(self, result: StepResult) -> None:
        assert result.outputs is not None
        hits = result.outputs.logits.argmax(-1) == result.outputs.labels
        accuracy = hits.double().mean().item()
        self.training.add(accuracy=accuracy)
        if accuracy > 0.9:
            self.training.stop("accuracy above 0.9")
