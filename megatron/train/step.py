"""One optimizer step.

The loss is a sum of terms, each a mean over the global batch (objectives.py). Its denominators are
added up over all ranks before the first forward pass, from what the batches say of themselves; so
every micro-batch adds its share of the gradient of the true mean, whatever is masked and however
the batch is spread over micro-batches and ranks.
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


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    lr: float,
    wants_stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """One update of the weights, or in fp16 perhaps a smaller loss scale.

    micro_batches: this rank's, of equal size. wants_stop: asked once, when the gradients are
    there; the step is finished all the same. A step whose loss or gradient is not finite on any
    rank is skipped on all: it changes no weight, moment or learning rate, and its samples are not
    read again. Raises NonFiniteError on every rank where that may not be, or not once more.
    """
    note("train step", state.step)
    mesh, scaler, k = state.mesh, state.scaler, len(state.objective.terms)
    state.model.train()
    counts = count(state, micro_batches)
    totals = forward_backward(state, micro_batches, counts)

    # All ranks agree by two small all-reduces, along data and then within the model, and one copy
    # to the host.
    stop = totals.new_full((1,), float(wants_stop()))
    reduced = all_reduce(torch.cat([totals, stop]), mesh.data)
    is_bad = ~reduced[:k].isfinite().all()
    agreed = torch.stack([state.gradients.squares(mesh.model), reduced[k], is_bad])
    agreed = all_reduce(agreed, mesh.model)
    tokens, *numbers = torch.cat([counts, reduced[:k], agreed]).tolist()
    denominators, sums, (squares, stops, bad_losses) = numbers[:k], numbers[k:-3], numbers[-3:]
    means = {}
    for term, total, number in zip(state.objective.terms, sums, denominators, strict=True):
        if not number:
            raise ValueError(
                f"nothing in step {state.step + 1} counts towards its {term}: with --eod-mask-loss "
                "a batch of end marks alone does not; leave that out or check --data-path"
            )
        means[term] = total / number
    norm = sqrt(squares) / scaler.scale

    overflowed = bad_losses > 0 or not isfinite(norm)
    if overflowed and not scaler.may_skip():
        what = "loss" if bad_losses else "gradient"
        replay = partial(forward_backward, state, micro_batches, counts)
        raise non_finite(state, micro_batches, what, replay)
    if not overflowed:
        state.optimizer.step(lr, 1.0 / scaler.scale, norm)
    state.step += 1
    state.samples += sum(len(batch.tokens) for batch in micro_batches) * mesh.data.size
    state.skipped += overflowed
    scaler.update(overflowed)
    return StepResult(
        loss=sum(means.values()),
        terms=means,
        grad_norm=norm,
        tokens=int(tokens),
        skipped=overflowed,
        stop=stops > 0,
    )


def count(state: TrainState, micro_batches: Sequence[Batch]) -> Tensor:
    """Returns fp64 [1 + k]: tokens read, then the k loss denominators, of the global batch. The
    host does not wait for it."""
    own = [[each.num_tokens, *state.objective.denominators(each)] for each in micro_batches]
    (sums,) = to_device(state.mesh.device, np.array(own, dtype=np.float64).sum(axis=0))
    return all_reduce(sums, state.mesh.data)


def forward_backward(state: TrainState, micro_batches: Sequence[Batch], counts: Tensor) -> Tensor:
    """Fill the gradient buffers; return this rank's sum of each term, fp64 [k].

    The only caller of the model in training. counts: of `count`. Gradients are those of the loss x
    loss scale, reduced over the axes on which they are partial.
    """
    # A term whose denominator is zero is reported after the step.
    loss_scales = state.scaler.scale / counts[1:].clamp(min=1)
    totals = torch.zeros_like(loss_scales)
    state.gradients.start()
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        with state.streams.at(state.step, number), state.gradients.accumulate(is_last=is_last):
            sums = state.objective.sums(state.model, batch, state.mesh.device, loss_scales)
            sums.sum().backward()
        totals += sums.detach() / loss_scales.to(sums.dtype)
    return totals
