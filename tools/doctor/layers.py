"""Times of a layer, the edge, the optimizer and the rest of a step, for the planner.

The real model trains on real ranks at two depths, in turns. A layer takes the difference of their
forwards and backwards over that of their layers; the edge (embedding, logits and loss) the rest. A
model is on t of the ranks, and the others train copies of it side by side: they load the machine as
they do in a run, but gradients of copies are not added up. Steps have a learning rate of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.config.pretrain import PretrainConfig
from megatron.config.training import PrecisionConfig
from megatron.models.registry import find_kind
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis, Mesh, build_mesh, serial_mesh
from megatron.train.inputs import vocabulary_of
from megatron.train.launch import default_precision
from megatron.train.machine import choose_compile
from megatron.train.phases import Phases
from megatron.train.state import DTYPES, build_state
from megatron.train.step import train_step
from tools.doctor.links import seconds
from tools.plan.layers import SECONDS, Layer, Shape
from tools.plan.trace import Step

DEPTHS = (1, 3)  # layers of the two models
MICRO_BATCHES = 2  # of a step
WARM_UP, STEPS = 2, 8
TRIES = 3  # beside other work three layers may seem to take no longer than one
WHOLE = "forward and backward"  # the phase of a step that a graph replays


class Times(NamedTuple):
    """Seconds: forward and backward of a micro-batch, and the rest of the step."""

    forward: float
    backward: float
    rest: float


@dataclass(frozen=True)
class Timed:
    """updating: (bytes that the optimizer moves, seconds of a step beside forwards and backwards)
    of each step that was timed."""

    layers: list[Layer]
    updating: list[tuple[int, float]]

    @property
    def optimizer_bandwidth(self) -> float:
        """Bytes a second, by the difference between depths, or if that is lost in noise by all."""
        one, other = (self.updating[first::2] for first in range(2))
        moved, seconds = (
            sum(last[n] - first[n] for first, last in zip(one, other, strict=True)) for n in (0, 1)
        )
        if seconds <= 0:
            moved, seconds = (sum(each[n] for each in self.updating) for n in (0, 1))
        return moved / seconds

    @property
    def step_overhead(self) -> float:
        """Seconds of a step beside micro-batches and optimizer."""
        bandwidth = self.optimizer_bandwidth
        return max(0.0, median(rest - moved / bandwidth for moved, rest in self.updating))


def measure(configs: Iterable[PretrainConfig], mesh: Mesh) -> Timed:
    """Every rank calls this. configs: of layers.variants, for all ranks of the mesh. Raises
    RuntimeError where a deeper model takes no longer."""
    timed = Timed([], [])
    for config in configs:
        precision = config.precision.name or default_precision(mesh.device)
        steps = [
            Step(
                replace(config, model=config.model.with_num_layers(depth)),
                mesh.size(),
                precision,
                mesh.device.type,
            )
            for depth in DEPTHS
        ]
        more = DEPTHS[1] - DEPTHS[0]
        for _ in range(TRIES):
            shallow, deep = _times(steps, mesh)
            layer = [(b - a) / more for a, b in zip(shallow[:2], deep[:2], strict=True)]
            if (seconds := sum(layer)) > 0:
                break
        else:
            each = f"{DEPTHS[1]} layers took no longer than {DEPTHS[0]}"
            raise RuntimeError(f"{each}: the machine is busy, or the layers are too small to time")
        rests = (shallow.rest, deep.rest)
        timed.updating.extend(zip((step.updated for step in steps), rests, strict=True))
        if min(layer) <= 0:  # noise
            layer = [seconds / 3, seconds * 2 / 3]
        edge = [max(0.0, a - DEPTHS[0] * each) for a, each in zip(shallow, layer, strict=False)]
        halves = dict(zip(SECONDS, (*layer, *edge), strict=True))
        timed.layers.append(Layer(shape=Shape.of(steps[0]), **halves))
    return timed


def _times(steps: Sequence[Step], mesh: Mesh) -> list[Times]:
    """Medians over the steps of the slowest rank of each."""
    config = steps[0].config
    parallel = config.parallel
    if mesh.size() > 1:
        own = build_mesh(
            parallel.sizes,
            mesh.device,
            control=mesh.control,
            tensor_parallel_mode=parallel.tensor_parallel_mode,
            sequence_parallel=parallel.cuts_stream,
            cp_comm_type=parallel.context_type,
        )
    else:
        own = serial_mesh(mesh.device)
    runs = [_Run(each, own) for each in steps]
    found: list[list[Times]] = [[] for _ in runs]
    for number in range(WARM_UP + STEPS):
        for place in (0, 1) if number % 2 else (1, 0):
            found[place].append(runs[place].step())
    medians = []
    for own_times in found:
        everyone = zip(*mesh.control.gather(own_times), strict=True)
        slowest = [_slowest(each) for each in everyone][WARM_UP:]
        medians.append(Times(*(median(each) for each in zip(*slowest, strict=True))))
    return medians


def _slowest(ranks: Sequence[Times]) -> Times:
    """Times of one step: forward and backward of the slowest rank, for which the others wait."""
    slowest = max(ranks, key=lambda each: each.forward + each.backward)
    whole = max(MICRO_BATCHES * (each.forward + each.backward) + each.rest for each in ranks)
    return slowest._replace(rest=whole - MICRO_BATCHES * (slowest.forward + slowest.backward))


class _Run:
    def __init__(self, step: Step, mesh: Mesh) -> None:
        config = step.config
        precision = config.precision
        if step.precision == "fp16":
            precision = PrecisionConfig(fp16=True, loss_scale=1.0)  # no step is skipped
        compiled, _ = choose_compile(config.training.compile, mesh)
        self.device = mesh.device
        self.state = build_state(
            config.model,
            mesh,
            vocabulary_of(config),
            seed=config.training.seed,
            dtype=DTYPES[step.precision],
            optimizer=config.optimizer,
            precision=precision,
            compiled=compiled,
            cuda_graph=config.training.cuda_graph,
            reduction=f"{__name__}:of_one_copy",
        )
        samples: Any = resolve_name(find_kind(config.model.kind).samples)(config)
        size = config.training.micro_batch_size
        numbers = np.arange(size) + size * mesh.batch.rank
        self.batches = [samples.batch(numbers.tolist()).numbered(numbers)] * MICRO_BATCHES

    def step(self) -> Times:
        phases = Phases(self.device)
        self.state.mark = phases.mark
        whole = seconds(partial(train_step, self.state, self.batches, 0.0), self.device)
        found = phases.seconds()
        both = found.get(WHOLE, 0.0)
        forward = (found.get("forward", 0.0) + both / 3) / MICRO_BATCHES
        backward = (found.get("backward", 0.0) + both * 2 / 3) / MICRO_BATCHES
        return Times(forward, backward, whole - MICRO_BATCHES * (forward + backward))


def of_one_copy(x: Tensor, axis: Axis) -> Tensor:
    """In place of the sum of gradients: over the ranks of one copy of the model alone."""
    return x if any(each.name == "data" for each in axis.parts) else all_reduce(x, axis)
