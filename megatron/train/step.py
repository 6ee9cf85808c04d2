"""One optimizer step.

The loss is a sum of terms, each a mean over the global batch (objectives.py). What each mean is
over is added up over all ranks before the first forward pass, from what the batches say of
themselves; so every micro-batch adds its share of the gradient of the true mean, whatever is masked
and however the batch is spread over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.parallel.collectives import all_reduce
from megatron.train.diagnose import non_finite
from megatron.train.loader import to_device
from megatron.train.state import TrainState
from megatron.train.watch import note


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step saw, the same on every rank.

    loss, grad_norm: the sum of the terms' means, norm of its gradient before clipping; in a skipped
    step either may be infinite or no number. terms: the mean of each by name. tokens: that were
    read, padding aside.
    """

    loss: float
    terms: Mapping[str, float]
    grad_norm: float
    tokens: int
    skipped: bool
    stop: bool  # some rank wants this step to be the last


def count(state: TrainState, micro_batches: Sequence[Batch]) -> Tensor:
    """Returns fp64 [1 + k]: tokens read, then the k loss denominators, of the global batch. The
    host does not wait for it."""
    own = [[batch.num_tokens, *state.objective.counts(batch)] for batch in micro_batches]
    (sums,) = to_device(state.mesh.device, np.array(own, dtype=np.float64).sum(axis=0))
    return all_reduce(sums, state.mesh.data)


def forward_backward(state: TrainState, micro_batches: Sequence[Batch], counts: Tensor) -> Tensor:
    """Fill the gradient buffers; return this rank's sum of each term, fp64 [k].

    The only caller of the model in training. counts: of `count`. Gradients are those of the loss x
    loss scale, reduced over the axes on which they are partial.
    """
    totals = torch.zeros_like(counts[1:])
    # A term whose denominator is zero is reported after the step.
    factors = state.scaler.scale / counts[1:].clamp(min=1)
    state.gradients.start()
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        with state.streams.at(state.step, number), state.gradients.accumulate(is_last=is_last):
            sums = state.objective.sums(state.model, batch, state.mesh.device, factors)
            sums.sum().backward()
        totals += sums.detach() / factors.to(sums.dtype)
    return totals


def never() -> bool:
    return False


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    lr: float,
    wants_stop: Callable[[], bool] = never,
) -> StepResult:
    """One update of the weights, or in fp16 perhaps a smaller loss scale.

    micro_batches: this rank's, of equal size. wants_stop: asked once, when the gradients are
    there; the step is finished all the same. A step whose loss or gradient is not finite on any
    rank is skipped on all: it changes no weight, moment or learning rate, and its samples are not
    read again. Raises NonFiniteError on every rank where that may not be, or not once more.
    """
    note("train step", state.step)
    state.model.train()
    counts = count(state, micro_batches)
    totals = forward_backward(state, micro_batches, counts)
    sums = _agree(state, totals, counts, wants_stop)
    norm = sqrt(sums.squares) / state.scaler.scale
    overflowed = sums.bad_losses > 0 or not isfinite(norm)
    if overflowed and not state.scaler.may_skip():
        what = "loss" if sums.bad_losses else "gradient"
        replay = partial(forward_backward, state, micro_batches, counts)
        raise non_finite(state, micro_batches, what, replay)
    if not overflowed:
        state.optimizer.step(lr, 1.0 / state.scaler.scale, norm)
    state.step += 1
    state.samples += sum(len(batch.tokens) for batch in micro_batches) * state.mesh.data.size
    state.skipped += overflowed
    state.scaler.update(overflowed)
    return StepResult(
        loss=sum(sums.means.values()),
        terms=sums.means,
        grad_norm=norm,
        tokens=int(sums.tokens),
        skipped=overflowed,
        stop=sums.votes > 0,
    )


@dataclass(frozen=True)
class _Sums:
    """Of one step, over all ranks and the same on each."""

    means: Mapping[str, float]
    tokens: float
    squares: float  # of the scaled gradients
    votes: float  # ranks that want to stop
    bad_losses: float  # ranks of one model whose loss is not finite


def _agree(
    state: TrainState, totals: Tensor, counts: Tensor, wants_stop: Callable[[], bool]
) -> _Sums:
    """Two small all-reduces, along data and then within the model, and one copy to the host."""
    k, votes = len(totals), totals.new_full((1,), float(wants_stop()))
    reduced = all_reduce(torch.cat([totals, votes]), state.mesh.data)
    squares = state.gradients.squares(state.mesh.model)
    is_bad = ~reduced[:k].isfinite().all()
    agreed = all_reduce(torch.stack([squares, reduced[k], is_bad]), state.mesh.model)
    tokens, *numbers = torch.cat([counts, reduced[:k], agreed]).tolist()
    return _Sums(_means(state, numbers[k : 2 * k], numbers[:k]), tokens, *numbers[2 * k :])


def _means(state: TrainState, sums: Sequence[float], over: Sequence[float]) -> dict[str, float]:
    """The mean of each term; ValueError where nothing counts towards one."""
    terms = state.objective.terms
    for term, number in zip(terms, over, strict=True):
        if not number:
            raise ValueError(
                f"nothing in step {state.step + 1} counts towards its {term}: with --eod-mask-loss "
                "a batch of end marks alone does not; leave that out or check --data-path"
            )
    return {term: total / n for term, total, n in zip(terms, sums, over, strict=True)}
