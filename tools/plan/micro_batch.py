"""Traces a micro-batch through one rank on tensors without memory.

One rank, of ranks that do not exist, runs the forward and backward of a micro-batch on meta
tensors, which have shapes and no memory, under a meter (tools/layouts/work.py): with a model of one
layer, and with one of two. Each further layer adds what the second one adds. So for L layers,
matmuls, collectives, bytes moved and bytes kept for the backward are exactly

    x = x of one layer + (L - 1) (x of two layers - x of one)

Peaks of memory above what is kept are those of two layers, or of one on the first and last rank of
a pipeline.

In a pipeline, the rank is in the first, a middle or the last position of three. A layer adds the
same in each, so that only the middle one is traced with two; a further virtual stage adds what a
middle rank does. Inputs are made, as nobody sends them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron.config.pretrain import PretrainConfig
from megatron.models.build import build_on_meta
from megatron.models.registry import find_kind
from megatron.parallel.bucket import Bucket, Deferred, GradientView, nothing
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.context import local_tokens
from megatron.parallel.initialize import materialize
from megatron.parallel.mesh import Mesh
from megatron.parallel.schedules import WHOLE_MODEL, Action, PipelinePlan, consecutive
from megatron.parallel.stages import as_tuple
from megatron.train.executor import Executor, Tensors, has_gradient
from megatron.train.inputs import vocabulary_of
from megatron.train.state import DTYPES
from tools.layouts.work import Call, Meter, Work, on_meta
from tools.plan.absent import absent_mesh
from tools.plan.layers import in_one_stage

META = torch.device("meta")
PHASES = ("forward", "recomputation", "backward")
ADDS = ("add", "add_matmul", "add_rows")  # of a GradientView
MIDDLE, LAST = 1, 2  # places in a pipeline of three ranks


Part = tuple[str, bool]
"""A parameter; False while its gradient is added, True from then until the next one. START: from
the start of the backward."""
START, FORWARD, HEAD = ("", True), ("forward", True), ("head", True)


@dataclass(frozen=True)
class Trace:
    """A micro-batch on one rank. Bytes leave out parameters and gradients, which last."""

    work: Mapping[str, Work]  # by phase
    kept_by_stage: tuple[int, ...]  # from forward to backward, by virtual stage of the rank
    owed_by_stage: tuple[int, ...]  # from backward_input to backward_weight
    logits: int  # peak of the forward, above what is kept
    head: int  # the same from the head's first gradient on: the forward of the loss makes it
    one_layer: int  # peak of the backward, above what is kept
    message: int  # the largest between stages
    by_gradient: Mapping[Part, int] = field(default_factory=dict)  # peaks of the backward's parts
    kept_of_layer: int = 0  # that a further layer adds to `kept`

    @property
    def kept(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(self.kept_by_stage)

    @property
    def owed(self) -> int:
        return sum(self.owed_by_stage)


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch of one rank. device: "cpu" or "cuda", whose kernels are meant. is_trimmed:
    without the padding of a batch (Batch.trimmed). rank: along the pipeline axis."""

    config: PretrainConfig
    precision: str
    device: str
    is_trimmed: bool = False
    pipeline: PipelinePlan = WHOLE_MODEL
    rank: int = 0


@cache
def trace(traced: MicroBatch) -> Trace:
    config, device, pipeline, rank = traced.config, traced.device, traced.pipeline, traced.rank
    sizes = config.parallel.sizes
    mesh, model = rank_on_meta(config, traced.precision, sizes, device, pipeline, rank)
    gradients = _Unreduced.for_master_weights(model)
    meter = Meter(mesh, [*model.parameters(), *(each.gradients for each in gradients.buckets)])
    meter.phase = "forward"
    numbers = np.arange(config.training.micro_batch_size)
    samples = resolve_name(find_kind(config.model.kind).samples)(config)
    batch = samples.batch(range(len(numbers))).numbered(numbers)
    batch = local_tokens(batch.trimmed() if traced.is_trimmed else batch, mesh)
    own = range(rank, pipeline.stages, pipeline.ranks)
    held = list[int]()  # at the start of each action
    peaks, part = defaultdict[Part, int](int), FORWARD

    def begin(following: Part) -> None:
        nonlocal part
        peaks[part] = max(peaks[part], meter.peak)
        meter.peak, part = meter.live, following

    def enter(action: Action) -> None:
        """Provides what other ranks would send."""
        direction, stage, _ = action
        executor.messages.ready.clear()  # sent
        held.append(meter.live)
        if direction != "forward" and meter.phase == "forward":
            begin(START)
        meter.phase = "forward" if direction == "forward" else "backward"
        if direction == "forward" and stage > 0:
            executor.messages.put("forward", stage, 0, entering(stage))
        elif direction in ("backward", "backward_input") and stage < pipeline.stages - 1:
            like = (each for each in entering(stage + 1) if has_gradient(each))
            executor.messages.put("backward", stage, 0, like)

    def entering(stage: int) -> Tensors:
        return as_tuple(model.stream(batch, pipeline.layers[stage].start))

    def on_gradient(view: GradientView, is_added: bool) -> None:
        if meter.phase != "forward":
            begin((view.name, is_added))
        elif part == FORWARD:
            begin(HEAD)

    gradients.on_collected = on_gradient
    executor = Executor(
        model=model.train(),
        objective=model,
        mesh=replace(mesh, device=META),
        pipeline=pipeline,
        batches=[batch],
        loss_scales=torch.ones(len(model.terms), dtype=torch.float64, device=META),
        gradients=gradients,
        on_action=enter,
    )
    halves = ["backward_input", "backward_weight"] if pipeline.is_halved else ["backward"]
    actions = [Action("forward", stage, 0) for stage in own]
    actions += [Action(each, stage, 0) for stage in own[::-1] for each in halves]
    gradients.start()
    with on_meta(meter, device), _usual_inputs(), _before_gradients(on_gradient):
        executor.run(tuple(actions))
    begin(START)
    work = {phase: meter.work[phase] for phase in PHASES}
    message = 0
    for phase, stage in [("forward", each + 1) for each in own] + [("backward", e) for e in own]:
        if 0 < stage < pipeline.stages:
            tensors = [x for x in entering(stage) if phase == "forward" or has_gradient(x)]
            work[phase].calls.update(Call("pipeline", each.nbytes, 0) for each in tensors)
            message = max(message, sum(each.nbytes for each in tensors))
    changes = [end - start for start, end in pairwise([*held, 0])]
    kept, owed = changes[: len(own)], [0] * len(own)
    if len(changes) == 3 * len(own):
        owed = [size + each for size, each in zip(kept, changes[-2::-2], strict=False)]
    above = {own: peak - sum(kept) for own, peak in peaks.items()}
    forward, head = above.pop(FORWARD), above.pop(HEAD, 0)
    logits, backward = max(forward, head), max(above.values())
    return Trace(work, tuple(kept), tuple(owed), logits, head, backward, message, above)


def trace_of_depth(asked: MicroBatch) -> Trace:
    """As `trace`, for stages of any depth."""
    pipeline, place = asked.pipeline, 0
    if pipeline.stages > 1 and asked.rank > 0:
        place = LAST if asked.rank == pipeline.ranks - 1 else MIDDLE
    depths = [len(each) for each in pipeline.layers[asked.rank :: pipeline.ranks]]
    depths = depths or [asked.config.model.num_layers]
    first, (one, two) = trace_at(asked, place, 1), _one_and_two(asked)
    more = sum(depths) - len(depths)
    work = {
        phase: own.plus(one.work[phase], len(depths) - 1 - more).plus(two.work[phase], more)
        for phase, own in first.work.items()
    }
    stages = [one] * len(depths)
    stages[0 if place == 0 else -1] = first
    pairs = [*zip(stages, depths, strict=True)]
    kept = tuple(each.kept + (depth - 1) * (two.kept - one.kept) for each, depth in pairs)
    owed = tuple(each.owed + (depth - 1) * (two.owed - one.owed) for each, depth in pairs)
    peaks, further = two if first is one else first, two.kept - one.kept
    return replace(peaks, work=work, kept_by_stage=kept, owed_by_stage=owed, kept_of_layer=further)


def layer_of(asked: MicroBatch) -> Work:
    """Work of one layer, forward and backward."""
    one, two = (reduce(Work.plus, each.work.values()) for each in _one_and_two(asked))
    return two.plus(one, -1)


def _one_and_two(asked: MicroBatch) -> tuple[Trace, Trace]:
    """Traces that differ by a layer."""
    place = MIDDLE if asked.pipeline.stages > 1 else 0
    return trace_at(asked, place, 1), trace_at(asked, place, 2)


def trace_at(asked: MicroBatch, place: int, layers: int) -> Trace:
    """Trace of a rank with so many layers: of the only one, or of one of three."""
    config, plan, sizes = asked.config, WHOLE_MODEL, [layers]
    if asked.pipeline.stages > 1:
        sizes = [layers if each == place else 1 for each in range(3)]
        kind = "zb-h1" if asked.pipeline.is_halved else "1f1b"
        plan = PipelinePlan(3, 1, kind, consecutive(sizes))
    model, parallel = config.model.with_num_layers(sum(sizes)), in_one_stage(config.parallel)
    found = replace(config, model=model, parallel=parallel)
    return trace(replace(asked, config=found, pipeline=plan, rank=place))


def rank_on_meta(
    config: PretrainConfig,
    precision: str,
    sizes: Mapping[str, int],
    device: str,
    pipeline: PipelinePlan,
    rank: int,
) -> tuple[Mesh, Any]:
    """The mesh and the model of a rank along the pipeline axis."""
    mesh = absent_mesh(
        {**sizes, "pipeline": pipeline.ranks},
        torch.device(device),
        tensor_parallel_mode=config.parallel.tensor_parallel_mode,
        sequence_parallel=config.parallel.cuts_stream,
        cp_comm_type=config.parallel.context_type,
        stage=rank,
    )
    model = build_on_meta(config.model, mesh, vocabulary_of(config), pipeline=pipeline)
    values = getattr(model, "initial_values", None)  # of a model that is not built of our layers
    dtype = DTYPES[precision]
    return mesh, materialize(model, device=META, dtype=dtype, seed=None, values=values)


@contextmanager
def _usual_inputs() -> Iterator[None]:
    """Answers True to what a transformers model asks of values that do not exist: whether positions
    are consecutive, whether nothing is masked."""
    original = torch.Tensor.__bool__
    with patch.object(torch.Tensor, "__bool__", lambda tensor: tensor.is_meta or original(tensor)):
        yield


@contextmanager
def _before_gradients(run: Callable[[GradientView, bool], None]) -> Iterator[None]:
    """Calls it with False before a layer adds a gradient."""

    def announced(add: Callable[..., None]) -> Callable[..., None]:
        def added(view: GradientView, *arguments: Any) -> None:
            run(view, False)
            add(view, *arguments)

        return added

    adds = {name: announced(getattr(GradientView, name)) for name in ADDS}
    with patch.multiple(GradientView, **adds):
        yield


class _Unreduced(GradientBuckets):
    """Leaves the reduction to the buckets of the whole model. on_collected: called with True after
    a parameter's gradient."""

    on_collected: Callable[[GradientView, bool], object] = nothing

    def _collect(self, bucket: Bucket, view: GradientView, *arguments: object) -> None:
        super()._collect(bucket, view, *arguments)
        self.on_collected(view, True)

    @contextmanager
    def backward(
        self, *, is_last: bool, stage: int | None = None, is_deferred: bool = False
    ) -> Iterator[list[Deferred]]:
        with super().backward(is_last=False, stage=stage, is_deferred=is_deferred) as deferred:
            yield deferred

    def add_deferred(
        self, deferred: Sequence[Deferred], *, is_last: bool, stage: int | None = None
    ) -> None:
        super().add_deferred(deferred, is_last=False, stage=stage)
