"""Where a step that was not finite went wrong: the step is run again, and every module watched.

The weights are those the step began with and the random numbers are derived from its number, so the
second run computes what the first did. All ranks run it, since the collectives are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data.batch import Batch, micro_batches
from megatron.optim.schedule import LossScaler
from megatron.parallel.sharding import GradientView
from megatron.train.state import TrainState


@dataclass(frozen=True, order=True)
class Finding:
    """The first number that is not finite, as one rank met it.

    Every rank runs the same modules in the same order, so findings of all ranks can be ordered.
    """

    micro_batch: int  # -1 for a weight, which was not finite before
    order: int  # how many tensors were looked at before
    rank: int
    what: str
    data_rank: int
    place: str  # the rank's coordinates in words


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite ends the run; the message says where it began.

    what: "loss" or "gradient". found: as of `find_first`.
    """

    what: str
    found: Finding | None


def find_first(state: TrainState, replay: Callable[[], object]) -> Finding | None:
    """The first number of the step that is not finite, on whichever rank; every rank calls this.

    replay: runs the step's forward and backward passes again, on all ranks. None where all is
    finite in them, so that only the sum over micro-batches and ranks is not.
    """
    mesh, looked, own = state.mesh, 0, list[Finding]()
    place = ", ".join(f"{axis} {rank}" for axis, rank in mesh.coordinates.items())

    def look(what: str, value: Tensor, micro_batch: int | None = None) -> None:
        nonlocal looked
        looked += 1
        if not own and not value.detach().isfinite().all():
            now = state.streams.position[1] if micro_batch is None else micro_batch
            own.append(Finding(now, looked, mesh.control.rank, what, mesh.data.rank, place))

    def first() -> Finding | None:
        return min((each for found in mesh.control.gather(own) for each in found), default=None)

    for name, parameter in state.model.named_parameters():
        look(f"the weight {name} itself", parameter, -1)
    if (found := first()) is None:
        # What is compiled calls no hooks.
        with _watched(state, look), torch.compiler.set_stance("force_eager"):
            replay()
        found = first()
    return found


@contextmanager
def _watched(state: TrainState, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls look(what, value) with all modules' outputs, innermost first, with their gradients and
    with the weights' gradients; no hook stays behind."""

    def watch_output(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        # A layer that is recomputed passes here twice; its output was looked at the first time.
        look(f"the output of {name}", output)
        if output.requires_grad:
            output.register_hook(lambda each: look(f"the gradient at {name}", each))

    def watch_gradient(view: GradientView) -> None:
        look(f"the gradient of the weight {view.name}", view.gradient)

    hooks = [
        module.register_forward_hook(partial(watch_output, name))
        for name, module in state.model.named_modules()
        if name  # the model's own output is that of its last module
    ]
    before, state.gradients.watch = state.gradients.watch, watch_gradient
    try:
        yield
    finally:
        state.gradients.watch = before
        for hook in hooks:
            hook.remove()


def non_finite(
    state: TrainState, batches: Sequence[Batch], what: str, replay: Callable[[], object]
) -> NonFiniteError:
    """The error, the same on every rank, of a step that is not finite and may not be skipped.

    state: as it was before the step. what: "loss" or "gradient".
    """
    found = find_first(state, replay)
    error = NonFiniteError(
        f"step {state.step + 1}: the {what} is not finite{_scaling(state.scaler)}. "
        f"{_where(state, batches, found)}. {_cures(state.scaler)}"
    )
    error.what, error.found = what, found
    return error


def _scaling(scaler: LossScaler) -> str:
    if not scaler.is_scaling:
        return ""
    lowest = " (the lowest: --min-loss-scale)" if scaler.scale <= scaler.smallest else ""
    power = log2(scaler.scale)
    scale = f"2**{power:.0f}" if power.is_integer() else f"{scaler.scale:g}"
    return (
        f" at loss scale {scale}{lowest}, overflow {scaler.skips + 1} in a row "
        f"(--max-consecutive-skips {scaler.most_skips})"
    )


def _where(state: TrainState, batches: Sequence[Batch], found: Finding | None) -> str:
    size = len(batches[0].tokens)
    total = size * len(batches) * state.mesh.data.size
    step = f"samples {state.samples} to {state.samples + total - 1}"
    if found is None:
        return (
            f"Run again, every output and gradient of a module is finite on {step}: "
            "only the sum over micro-batches and ranks, or its norm, is not"
        )
    seen = f"First seen in {found.what}, on the rank at {found.place}"
    if found.micro_batch < 0:
        return f"{seen}, before {step} of this step were read"
    own = micro_batches(
        state.samples,
        global_batch_size=total,
        micro_batch_size=size,
        data_rank=found.data_rank,
        data_size=state.mesh.data.size,
    )[found.micro_batch]
    return f"{seen}, in samples {own[0]} to {own[-1]} (the step reads {step})"


def _cures(scaler: LossScaler) -> str:
    if not scaler.is_scaling:
        return "A lower --lr or a longer --lr-warmup-iters may help"
    if scaler.window is None:
        return "A smaller --loss-scale, or none, which lets it find its own, may help"
    if scaler.scale > scaler.smallest:
        return (
            "If the scale was still falling, a smaller --initial-loss-scale or more "
            "--max-consecutive-skips helps; else a lower --lr, a longer --lr-warmup-iters or --bf16"
        )
    return "A lower --lr, a longer --lr-warmup-iters or --bf16 may help"
