"""Parts of a run's ranks on which one configuration after another is trained.

Every configuration has the first of the ranks; the others wait for it in gloo, which sleeps. A
model is built when its turn comes and is gone when that is over, so that what fits alone is
measured however many there are.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.own import draw_there
from benchmarks.scaling_configurations import Configuration
from benchmarks.turns import OUT_OF_MEMORY, Stopwatch
from megatron.parallel.mesh import ControlGroup, Mesh, build_mesh, serial_mesh
from megatron.train.state import DTYPES, TrainState, build_state
from megatron.train.step import train_step

Work = Callable[[Mesh, Stopwatch], Any]  # of a rank that takes part, to what it has to say
# The CPU's allocator says it in other words than a GPU's.
FULL = re.compile(f"{OUT_OF_MEMORY}|can't allocate memory")


@dataclass(frozen=True)
class Failed:
    """Why a configuration has no figures."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Worlds:
    """All ranks of a run, and of each layout that was asked for those that it takes."""

    whole: Mesh
    precision: str
    compiled: bool
    warm_up: int  # steps of a turn before anything is measured
    known: dict[tuple[int, int], Mesh | None] = field(default_factory=dict)

    def part(self, configuration: Configuration) -> Mesh | None:
        """This rank's mesh, None on a rank that does not take part; every rank calls this."""
        layout = configuration.copies, configuration.tensor
        if layout not in self.known:
            self.known[layout] = first_ranks(self.whole, *layout)
        return self.known[layout]

    def turn(self, configuration: Configuration, work: Work) -> list[Any] | Failed:
        """What every rank that takes part has to say, the same on all ranks; all call this."""
        said: Any = None
        mesh = self.part(configuration)
        if mesh is not None:
            said = self._work(mesh, configuration, work)
        answers = self.whole.control.gather(said)
        failures = [each for each in answers if isinstance(each, Failed)]
        return failures[0] if failures else answers[: configuration.ranks]

    def _work(self, mesh: Mesh, configuration: Configuration, work: Work) -> Any:
        try:
            return work(mesh, self._warm(mesh, configuration))
        except RuntimeError as error:
            if not FULL.search(str(error)):
                raise
            failed = Failed(f"out of memory: {str(error).splitlines()[0]}")
        finally:  # the error is gone by now, and with it what its frames held
            release(mesh.device, compiled=self.compiled)
        # A rank that alone has run out leaves the others waiting in the step: the log tells why.
        print(f"{configuration.name}, rank {mesh.control.rank}: {failed.reason}", file=sys.stderr)
        return failed

    def _warm(self, mesh: Mesh, configuration: Configuration) -> Stopwatch:
        state = self._build(mesh, configuration)
        step = steps(state, configuration)
        watch = Stopwatch(step, waiting(mesh))
        while watch.next < self.warm_up or state.scaler.skips:  # fp16 looks for its loss scale
            watch.losses(1)
        return watch

    def _build(self, mesh: Mesh, configuration: Configuration) -> TrainState:
        config, shape = configuration.config, configuration.shape(self.precision)
        state = build_state(
            config.model,
            config.optimizer,
            config.precision,
            mesh,
            shape.vocabulary,
            seed=None,
            dtype=DTYPES[self.precision],
            compiled=self.compiled,
        )
        draw_there(state)
        return state


def first_ranks(whole: Mesh, copies: int, tensor: int) -> Mesh | None:
    """The mesh of the first copies x tensor ranks, None on the others; every rank calls this."""
    ranks = copies * tensor
    if ranks == 1:
        return serial_mesh(whole.device) if whole.is_first else None
    timeout = whole.control.timeout
    group = dist.new_group(range(ranks), backend="gloo", timeout=timeout)
    control = ControlGroup(ranks, whole.control.rank, group, timeout)
    mesh = build_mesh({"tensor": tensor}, whole.device, timeout, control)
    return mesh if whole.control.rank < ranks else None


def steps(state: TrainState, configuration: Configuration) -> Callable[[int], float]:
    """Of a step's number, to its loss; each data-parallel rank reads samples of its own."""
    data, lr = state.mesh.data, configuration.config.optimizer.lr

    def step(number: int) -> float:
        batch = configuration.batch(number * data.size + data.rank)
        return train_step(state, [batch], lr).loss

    return step


def waiting(mesh: Mesh) -> Callable[[], None]:
    """What waits until all that was started is done on all ranks that take part."""

    def wait() -> None:
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        if mesh.size > 1:
            dist.barrier(group=mesh.control.group)

    return wait


def release(device: torch.device, *, compiled: bool) -> None:
    """Give back what a turn has left."""
    gc.collect()
    if compiled:  # else the next model's sizes would be compiled as variables
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
