"""One optimizer step:

    count               tokens and denominators of the loss of all ranks: 1 all-reduce
    forward_backward    the executor (executor.py) takes each micro-batch through the model's
                        stages; gradients add up in buckets (parallel/buckets.py), which as a
                        rule are reduced over ranks while the last backward runs
    agree               sums of the loss, norm, overflow, stop: 2 all-reduces, 3 under ZeRO,
                        1 copy to the host (adamw)
    optimizer.step      clip, update and publish the weights (optim/adam.py), or skip the step; a
                        GPU decides which, and starts before the host has read the copy

The loss is a sum of terms, each a mean over the global batch (objectives.py). Its denominators are
known before the first forward, so every micro-batch adds its share of the gradient of the true
mean, whatever is masked and however the batch is split into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite, nan

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.data.files import DataError
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import local_tokens
from megatron.parallel.initialize import seed_kernels
from megatron.parallel.kernels import rounded_sqrt
from megatron.parallel.schedules import Action
from megatron.train.diagnose import non_finite
from megatron.train.evaluate import Outputs, gather_outputs, require_outputs
from megatron.train.executor import Executor, start_read, to_device
from megatron.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of a step, the same on every rank.

    loss: the sum of the terms' means. grad_norm: the norm of its gradient before clipping. In a
    skipped step either may be infinite or NaN. terms: the mean of each term, by name. tokens: read
    in the step, without padding.
    """

    loss: float
    terms: Mapping[str, float]
    grad_norm: float
    tokens: int
    skipped: bool
    stop: bool  # some rank wants this step to be the last
    outputs: Outputs | None = None


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    lr: float,
    wants_stop: Callable[[], bool] = lambda: False,
    *,
    return_outputs: bool = False,
) -> StepResult:
    """One update of the weights; in fp16 possibly only of the loss scale.

    micro_batches: this rank's along the batch axis, of whole samples, and of the same number and
    size on every rank. wants_stop: called once, after the backward; the step is finished in any
    case. return_outputs: fill `outputs`, with the weights before the update and with dropout; every
    rank has to ask for it, and then holds all logits of the global batch. In fp16 a step whose loss
    or gradient is not finite on any rank is skipped on all: it changes no weight, moment or
    learning rate, and its samples are not read again. Raises, on every rank, NonFiniteError in
    other dtypes or if fp16 may skip no more, and DataError if no token counts.
    """
    mesh, scaler, k = state.mesh, state.scaler, len(state.objective.terms)
    if return_outputs:
        require_outputs(state.model, micro_batches)
    if not state.model.training:
        state.model.train()  # visits each module
    whole, micro_batches = micro_batches, [local_tokens(each, mesh) for each in micro_batches]
    counts = count(state, micro_batches)
    hidden_states = dict[int, Tensor]() if return_outputs else None
    run = forward_backward if state.graph is None else partial(state.graph, forward_backward)
    state.mark("" if state.graph is None else "forward and backward")
    totals = run(state, micro_batches, counts, hidden_states)
    state.mark("")
    outputs = None
    if hidden_states is not None:
        outputs = gather_outputs(state.model, mesh, whole, hidden_states)

    # The first sum is over all data and all pipeline stages, the second over one copy of the model:
    # together they reach every rank, so votes pass both. The host waits only once, for one copy.
    vote = totals.new_full((1,), float(wants_stop()))
    reduced = all_reduce(torch.cat([totals, vote]), mesh.loss_sums)
    is_bad = ~reduced[:k].isfinite().all()
    verdict = torch.stack([state.gradients.squares(), reduced[k], is_bad])
    squares, stop_votes, bad = all_reduce(verdict, mesh.model_parallel).unbind()
    # By a tensor, as a GPU multiplies by the rounded inverse of a number.
    norm = rounded_sqrt(squares) / torch.full_like(squares, scaler.scale)
    # NaN leaves the weights as they are, also where no token counts.
    checked = norm.where(counts[1:].all() & (bad == 0), nan)
    # [tokens, k denominators, k sums, ...]; both sums are over the stages, so a vote counts once
    # for each of them.
    last = [norm, stop_votes, bad, checked]
    read = cache(start_read(torch.cat([counts, reduced[:k], torch.stack(last)])))
    state.mark("optimizer")
    # The update is queued before the host waits for the copy, which precedes it.
    state.optimizer.step(lr, 1.0 / scaler.scale, checked, lambda: isfinite(read()[-1]))
    state.mark("")
    tokens, *numbers = read()
    denominators, sums, (grad_norm, votes, bad_losses, _) = numbers[:k], numbers[k:-4], numbers[-4:]
    means = {}
    for term, total, number in zip(state.objective.terms, sums, denominators, strict=True):
        if not number:
            raise DataError(
                f"nothing in step {state.step + 1} counts towards its {term}: --data-path has "
                "documents of which nothing is learned (of one token, or all masked); a larger "
                "--global-batch-size mixes them with others"
            )
        means[term] = total / number

    overflowed = bad_losses > 0 or not isfinite(grad_norm)
    if overflowed and not scaler.may_skip():
        what = "loss" if bad_losses else "gradient"
        replay = partial(forward_backward, state, micro_batches, counts)
        del run
        state.graph = None  # it keeps the memory of a step, which the diagnosis repeats
        raise non_finite(state, micro_batches, what, replay)
    state.step += 1
    state.samples += sum(batch.num_samples for batch in micro_batches) * mesh.batch.size
    state.skipped += overflowed
    scaler.update(overflowed)
    return StepResult(
        loss=sum(means.values()),
        terms=means,
        grad_norm=grad_norm,
        tokens=int(tokens),
        skipped=overflowed,
        stop=votes > 0,
        outputs=outputs,
    )


def count(state: TrainState, micro_batches: Sequence[Batch]) -> Tensor:
    """Tokens read and k denominators of the global batch, fp64 [1 + k]; the host does not wait."""
    mesh, counts = state.mesh, []
    for each in micro_batches:
        # Samples that are whole are the same ones on all context ranks.
        is_counted = each.token_order is not None or mesh.context.rank == 0
        units = each.num_tokens if is_counted else 0
        counts.append([units, *state.objective.denominators(each)])
    (sums,) = to_device(mesh.device, np.array(counts, dtype=np.float64).sum(axis=0))
    return all_reduce(sums, mesh.loss)


def forward_backward(
    state: TrainState,
    micro_batches: Sequence[Batch],
    counts: Tensor,
    hidden_states: dict[int, Tensor] | None = None,
) -> Tensor:
    """Fill the gradient buckets; return this rank's sum of each term, fp64 [k].

    counts: see `count`. hidden_states: receives the output of the layers, by micro-batch.
    Gradients are those of the loss x loss scale, summed over the axes on which they are partial.
    """
    # Each term's scale is loss scale / denominator; a denominator of 0 is reported after the step.
    loss_scales = state.scaler.scale / counts[1:].where(counts[1:] > 0, 1)
    pipeline, mesh = state.pipeline, state.mesh

    def on_action(action: Action) -> None:
        is_forward, stage = action.direction == "forward", action.stage
        state.micro_batch = action.micro_batch
        state.stage_index = stage if is_forward else 2 * pipeline.stages - 1 - stage  # F, then B
        if is_forward and state.kernel_seed is not None:
            virtual_stage = (stage,) if pipeline.virtual > 1 else ()
            seed_kernels(state.kernel_seed, mesh, state.step, action.micro_batch, *virtual_stage)

    executor = Executor(
        model=state.model,
        objective=state.objective,
        mesh=mesh,
        pipeline=pipeline,
        batches=micro_batches,
        loss_scales=loss_scales,
        gradients=state.gradients,
        on_action=on_action,
        mark=state.mark,
        hidden_states=hidden_states,
    )
    return executor.step()
