"""One optimizer step.

The loss of a micro-batch is summed over its counted tokens and divided by the *nominal* tokens of
the global batch, which every rank knows beforehand; the optimizer divides by the true count, which
is known only when all ranks have seen their data. So the gradient is that of the mean over all
counted tokens of the global batch, however they are spread over micro-batches and ranks, and one
scalar all-reduce a step is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt

import torch
from torch import Tensor

from megatron.data.gpt2 import Batch
from megatron.model.gpt2 import GPT2
from megatron.parallel.collectives import all_reduce
from megatron.train.diagnose import non_finite
from megatron.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step saw, the same on every rank.

    loss, grad_norm: mean over the counted tokens of the global batch, norm of its gradient before
    clipping; in a skipped step either may be infinite or no number.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    stop: bool  # some rank wants this step to be the last


def summed_loss(model: GPT2, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sum of the loss over counted tokens, number of counted tokens), scalars of this rank."""
    tokens, labels, positions, mask = (
        torch.from_numpy(array).to(device)
        for array in (batch.tokens, batch.labels, batch.positions, batch.loss_mask)
    )
    starts = batch.document_starts
    document_starts = None if starts is None else torch.from_numpy(starts).to(device)
    losses = model(tokens, positions, labels, document_starts)
    return (losses * mask.flatten()).sum(), mask.sum()


def forward_backward(state: TrainState, micro_batches: Sequence[Batch]) -> Tensor:
    """Fill the gradient buffers; return this rank's [sum of losses, counted tokens], fp64.

    The only caller of the model in training. Gradients are those of the summed loss x loss scale
    / nominal tokens, reduced over the axes on which they are partial.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
    factor = state.scaler.scale / nominal_tokens(state, micro_batches)
    state.gradients.start()
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        with state.streams.at(state.step, number), state.gradients.accumulate(is_last=is_last):
            loss, count = summed_loss(state.model, batch, state.mesh.device)
            (loss * factor).backward()
        totals += torch.stack([loss.detach(), count])
    return totals


def nominal_tokens(state: TrainState, micro_batches: Sequence[Batch]) -> int:
    """Tokens of the global batch if none were masked; the same on every rank."""
    return sum(batch.tokens.size for batch in micro_batches) * state.mesh.data.size


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
    state.model.train()
    sums = _agree(state, forward_backward(state, micro_batches), wants_stop)
    if sums.tokens == 0:
        raise ValueError(
            f"no token of step {state.step + 1} counts towards the loss: the batch holds nothing "
            "but end marks; leave out --eod-mask-loss or check --data-path"
        )
    unscale = nominal_tokens(state, micro_batches) / (sums.tokens * state.scaler.scale)
    norm = sqrt(sums.squares) * unscale
    overflowed = sums.bad_losses > 0 or not isfinite(norm)
    if overflowed and not state.scaler.may_skip():
        what = "loss" if sums.bad_losses else "gradient"
        replay = partial(forward_backward, state, micro_batches)
        raise non_finite(state, micro_batches, what, replay)
    if not overflowed:
        state.optimizer.step(lr, unscale, norm)
    state.step += 1
    state.samples += sum(len(batch.tokens) for batch in micro_batches) * state.mesh.data.size
    state.skipped += overflowed
    state.scaler.update(overflowed)
    return StepResult(
        loss=sums.loss / sums.tokens,
        grad_norm=norm,
        tokens=int(sums.tokens),
        skipped=overflowed,
        stop=sums.votes > 0,
    )


@dataclass(frozen=True)
class _Sums:
    """Of one step, over all ranks and the same on each."""

    loss: float
    tokens: float
    squares: float  # of the scaled gradients
    votes: float  # ranks that want to stop
    bad_losses: float  # ranks of one model whose loss is not finite


def _agree(state: TrainState, totals: Tensor, wants_stop: Callable[[], bool]) -> _Sums:
    """Two small all-reduces, along data and then within the model, and one copy to the host."""
    votes = totals.new_full((1,), float(wants_stop()))
    totals = all_reduce(torch.cat([totals, votes]), state.mesh.data)
    squares = state.gradients.squares(state.mesh.model)
    is_bad = ~totals[0].isfinite()
    agreed = all_reduce(torch.stack([squares, totals[2], is_bad]), state.mesh.model)
    return _Sums(*torch.cat([totals[:2], agreed]).tolist())
