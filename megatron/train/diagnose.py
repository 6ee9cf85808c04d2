"""Finds the first non-finite number of a step: runs it again with a hook on every module.

The weights are still those from before the step, and dropout is a function of the samples or is
drawn from the step's seed, so the second run computes the same as the first. All ranks run it,
since it contains collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data.batch import Batch, micro_batch_numbers
from megatron.parallel.agree import AgreedError
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.zero3 import tensors_of
from megatron.train.state import TrainState

OUTPUT, OUTPUT_GRADIENT, GRADIENT = "output", "gradient of output", "gradient"
PHRASES = {
    OUTPUT: "the output of",
    OUTPUT_GRADIENT: "the gradient at",
    GRADIENT: "the gradient of the weight",
}


@dataclass(frozen=True, order=True)
class Finding:
    """The first non-finite number on one rank.

    The ranks of a pipeline stage run the same modules in the same order, and a micro-batch passes
    through the stages one by one, forward and backward. So the findings of all ranks have an order.
    """

    micro_batch: int  # -1 for a weight that was not finite before the step
    stage_index: int  # see TrainState.stage_index
    order: int  # number of this tensor among those checked on the rank
    rank: int
    what: str
    data_rank: int
    coordinates: str  # of the rank, as text


class NonFiniteError(AgreedError, FloatingPointError):
    """Ends a run whose loss or gradient is not finite; the message says where it began.

    what: "loss" or "gradient". found: see `find_first`.
    """

    what: str
    found: Finding | None


def non_finite(
    state: TrainState, batches: Sequence[Batch], what: str, replay: Callable[[], object]
) -> NonFiniteError:
    """The error for a non-finite step that may not be skipped; the same on every rank.

    state: the state before the step. what: "loss" or "gradient". replay: see `find_first`.
    """
    mesh, scaler, finding = state.mesh, state.scaler, find_first(state, replay)
    size = batches[0].num_samples
    global_size = size * len(batches) * mesh.batch.size
    step = f"samples {state.samples} to {state.samples + global_size - 1}"
    if finding is None:
        where = (
            f"Run again, every output and gradient of a module is finite on {step}: "
            "only the sum over micro-batches and ranks, or its norm, is not"
        )
    else:
        where = f"First seen in {finding.what}, on the rank at {finding.coordinates}, "
        if finding.micro_batch < 0:
            where += f"before {step} were read"
        else:
            # In 3D the parallel region moves samples between ranks: those of all are named.
            readers = mesh.input.size
            numbers = micro_batch_numbers(
                state.samples,
                global_batch_size=global_size,
                micro_batch_size=size * readers,
                data_rank=finding.data_rank // readers,
                data_size=mesh.batch.size // readers,
            )[finding.micro_batch]
            where += f"in samples {numbers[0]} to {numbers[-1]} (the step reads {step})"
    scale, cures = "", "a lower --lr, a longer --lr-warmup-iters"
    if scaler.is_scaling:
        scale = f" at loss scale {scaler.scale:g}, overflow {scaler.skips + 1} in a row"
        flags = "--initial-loss-scale, more --max-consecutive-skips"
        cures += f", --bf16, a smaller {'--loss-scale' if scaler.window is None else flags}"
    error = NonFiniteError(
        f"step {state.step + 1}: the {what} is not finite{scale}. {where}. May help: {cures}"
    )
    error.what, error.found = what, finding
    return error


def find_first(state: TrainState, replay: Callable[[], object]) -> Finding | None:
    """The first non-finite number of the step over all ranks; every rank calls this.

    replay: runs the step's forward and backward again, on all ranks. Returns None if everything in
    them is finite; then only the sum over micro-batches and ranks is not.
    """
    mesh, order = state.mesh, 0
    local: Finding | None = None  # the first one of this rank

    def look(what: str, value: Tensor, *, is_sum: bool = False, is_weight: bool = False) -> None:
        """is_sum: the value is a sum over micro-batches; an earlier one may be the cause."""
        nonlocal order, local
        order += 1
        if (local is not None and is_sum) or value.detach().isfinite().all():
            return
        finding = Finding(
            # Weights come before all micro-batches, in order of pipeline stages.
            micro_batch=-1 if is_weight else state.micro_batch,
            stage_index=mesh.pipeline.rank if is_weight else state.stage_index,
            order=order,
            rank=mesh.control.rank,
            what=what,
            data_rank=mesh.batch.rank,
            coordinates=mesh.describe_rank(),
        )
        # A pipeline may run a later micro-batch first.
        local = finding if local is None else min(finding, local)

    def first_of_all() -> Finding | None:
        return min((each for each in mesh.control.gather(local) if each), default=None)

    for each in state.weights():
        name = each.key.removeprefix("model.")
        look(f"the weight {name} itself", each.local, is_weight=True)
    if finding := first_of_all():
        return finding

    def see(what: str, name: str, value: Tensor) -> None:
        look(f"{PHRASES[what]} {name}", value, is_sum=what == GRADIENT)

    with observed(state.model, state.gradients, see):
        replay()
    return first_of_all()


@contextmanager
def observed(
    model: nn.Module, gradients: GradientBuckets, see: Callable[[str, str, Tensor], object]
) -> Iterator[None]:
    """Inside the `with`, `see` is called with (OUTPUT, name, tensor) for each output of a module,
    with OUTPUT_GRADIENT for the gradient at it, and with GRADIENT for that of each weight, in the
    order in which they are known. A recomputed layer gives its outputs twice."""

    def see_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for value in tensors_of(output):
            see(OUTPUT, name, value)
            if value.requires_grad:
                value.register_hook(partial(see, OUTPUT_GRADIENT, name))

    hooks = [
        module.register_forward_hook(partial(see_output, name))
        for name, module in model.named_modules()
        if name  # the model's own output is that of its last module
    ]
    before = gradients.on_gradient
    gradients.on_gradient = lambda view: see(GRADIENT, view.name, view.gradient)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
            yield
    finally:
        gradients.on_gradient = before
        for hook in hooks:
            hook.remove()
