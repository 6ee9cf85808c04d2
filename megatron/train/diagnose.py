"""Where a step that was not finite went wrong: the step is run again, and every module watched.

The weights are those the step began with and the random streams are derived from its number, so
the second run computes what the first did. All ranks run it, since the collectives are in it.
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

from megatron.data.batch import Batch
from megatron.data.sampler import micro_batches
from megatron.optim.loss_scaler import LossScaler
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import GradientView
from megatron.train.state import TrainState


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite ends the run; the message says where it began, in the
    words of pretraining."""

    what: str
    """"loss" or "gradient"."""
    found: Finding | None
    """As of `find_first`."""


@dataclass(frozen=True, order=True)
class Finding:
    """The first number that is not finite, as one rank met it.

    Every rank runs the same modules in the same order, so findings of all ranks can be ordered.
    """

    micro_batch: int  # -1 for a weight, which was there before
    order: int  # what was looked at before, in this run
    rank: int
    what: str
    data_rank: int
    place: str  # the rank's coordinates in words


class Watch:
    """Looks at every output and gradient while a model runs, and keeps the first finding."""

    def __init__(self, state: TrainState) -> None:
        self.mesh = state.mesh
        self.streams = state.streams
        self.looked = 0
        self.finding: Finding | None = None

    def look(self, what: str, value: Tensor, micro_batch: int) -> None:
        """Keep `what` as the finding if it is the first that is not finite."""
        self.looked += 1
        if self.finding is None and not value.detach().isfinite().all():
            self.finding = Finding(
                micro_batch,
                self.looked,
                self.mesh.control.rank,
                what,
                self.mesh.data.rank,
                ", ".join(f"{axis} {rank}" for axis, rank in self.mesh.coordinates.items()),
            )

    def look_now(self, what: str, value: Tensor) -> None:
        self.look(what, value, self.streams.position[1])

    def watch_output(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Forward hook: look at the output now, and at its gradient when that is known.

        A layer that is run again for its activations passes here twice; what the second run
        returns was seen in the first.
        """
        self.look_now(f"the output of {name}", output)
        if output.requires_grad:
            output.register_hook(lambda each: self.look_now(f"the gradient at {name}", each))

    def watch_gradient(self, view: GradientView) -> None:
        self.look_now(f"the gradient of the weight {view.name}", view.gradient)

    @contextmanager
    def over(self, state: TrainState) -> Iterator[None]:
        """Watch all modules, innermost first, and all weights' gradients; no hook stays behind."""
        hooks: list[Any] = []
        for name, module in state.model.named_modules():
            if name:  # the model's own output is that of its last module
                hooks.append(module.register_forward_hook(partial(self.watch_output, name)))
        before, state.gradients.watch = state.gradients.watch, self.watch_gradient
        try:
            yield
        finally:
            state.gradients.watch = before
            for hook in hooks:
                hook.remove()


def find_first(state: TrainState, replay: Callable[[], object]) -> Finding | None:
    """The first number of the step that is not finite, on whichever rank; every rank calls this.

    replay: runs the step's forward and backward passes again, on all ranks. None where all is
    finite in them, so that only the sum over micro-batches and ranks is not.
    """
    watch = Watch(state)
    for name, parameter in state.model.named_parameters():
        watch.look(f"the weight {name} itself", parameter, -1)
    if (found := _first(watch, state.mesh)) is None:
        # What is compiled calls no hooks.
        with watch.over(state), torch.compiler.set_stance("force_eager"):
            replay()
        found = _first(watch, state.mesh)
    return found


def _first(watch: Watch, mesh: Mesh) -> Finding | None:
    findings = [each for each in mesh.control.gather(watch.finding) if each is not None]
    return min(findings, default=None)


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
