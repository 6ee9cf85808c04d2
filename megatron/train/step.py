"""One optimizer step.

The loss of a micro-batch is summed over its counted tokens and divided by the *nominal* tokens of
the global batch, which every rank knows beforehand; the optimizer divides by the true count, which
is known only when all ranks have seen their data. So the gradient is that of the mean over all
counted tokens of the global batch, however they are spread over micro-batches and ranks, and one
scalar all-reduce a step is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megatron.data.gpt2 import Batch
from megatron.model.gpt2 import GPT2
from megatron.parallel.collectives import all_reduce
from megatron.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step saw: mean loss over the counted tokens of the global batch, global norm."""

    loss: float
    grad_norm: float
    tokens: int


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


def train_step(state: TrainState, micro_batches: Sequence[Batch], lr: float) -> StepResult:
    """One update of the weights, or in fp16 a smaller loss scale.

    micro_batches: this rank's, of equal size. Raises FloatingPointError where the gradient is not
    finite and no smaller loss scale can help.
    """
    state.model.train()
    totals = forward_backward(state, micro_batches)
    loss, tokens = all_reduce(totals, state.mesh.data).tolist()
    if tokens == 0:
        raise ValueError(
            f"no token of step {state.step + 1} counts towards the loss: the batch holds nothing "
            "but end marks; leave out --eod-mask-loss or check --data-path"
        )
    unscale = nominal_tokens(state, micro_batches) / (tokens * state.scaler.scale)
    norm = state.optimizer.step(lr, unscale)
    state.step += 1
    state.samples += sum(len(batch.tokens) for batch in micro_batches) * state.mesh.data.size
    overflowed = not isfinite(norm)
    state.skipped += overflowed
    state.scaler.update(overflowed)
    return StepResult(loss=loss / tokens, grad_norm=norm, tokens=int(tokens))
