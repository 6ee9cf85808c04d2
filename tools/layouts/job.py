"""What a comparison trains at each layout, and on which samples; needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from megatron.config.pretrain import PretrainConfig
from megatron.config.training import BertDataConfig
from megatron.data.batch import Batch, Samples
from megatron.data.bert import BertBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.registry import find_kind
from tools.planning.shape import GPT2_VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Job:
    """config: of pretraining, cut as the layout says. folder: of gradients and weights that the
    reference writes and the others read."""

    config: PretrainConfig
    ranks: int
    precision: str
    steps: int
    folder: Path
    is_reference: bool


@dataclass(frozen=True, kw_only=True)
class RandomSamples:
    """Random tokens, each sample a function of its number."""

    vocabulary: int
    length: int
    seed: int
    mask_prob: float | None  # of BERT's samples
    samples_per_epoch: int = sys.maxsize

    def batch(self, numbers: Sequence[int]) -> Batch:
        drawn = [np.random.default_rng([self.seed, number]) for number in numbers]
        ids = np.stack([each.integers(self.vocabulary, size=self.length + 1) for each in drawn])
        tokens, shape = ids[:, :-1], (len(numbers), self.length)
        if self.mask_prob is None:
            return GPT2Batch(
                tokens=tokens,
                labels=ids[:, 1:],
                loss_mask=np.ones(shape, np.float32),
                positions=np.broadcast_to(np.arange(self.length), shape).copy(),
            )
        is_masked = np.stack([each.random(self.length) < self.mask_prob for each in drawn])
        is_masked[:, 0] = True  # that there is one
        return BertBatch(
            tokens=np.where(is_masked, 0, tokens),
            token_types=np.broadcast_to(np.arange(self.length) >= self.length // 2, shape).astype(
                np.int64
            ),
            is_real=np.ones(shape, np.bool_),
            labels=tokens,
            loss_mask=is_masked.astype(np.float32),
            is_swapped=np.array([each.integers(2) for each in drawn]),
        )


def open_samples(config: PretrainConfig) -> tuple[Samples, int]:
    """(the samples that a training of this config reads, size of their vocabulary)."""
    if config.data.data_path:
        inputs = resolve_name(str(find_kind(config.model.kind).inputs))(config)
        return inputs.train, inputs.corpus.vocab_size
    vocabulary = getattr(config.model, "vocab_size", None) or GPT2_VOCABULARY
    mask_prob = config.data.mask_prob if isinstance(config.data, BertDataConfig) else None
    samples: Samples = RandomSamples(
        vocabulary=vocabulary,
        length=config.data.seq_length,
        seed=config.training.seed,
        mask_prob=mask_prob,
    )
    return samples, vocabulary
