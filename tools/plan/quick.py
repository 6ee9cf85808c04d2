"""Steps of many layouts, quickly: what layouts have in common is found once.

Parameters are those of a rank with one layer, of which others are copies, and buckets follow from
their sizes. The peak of activations is that of the first micro-batches of a schedule, and the idle
share that of the formulas in schedules.py. All else is as in trace.py, on the same traces.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import groupby
from math import prod
from typing import NamedTuple

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.axes import INNER, OUTER, UNIONS
from megatron.parallel.bucket import ALIGNMENT
from megatron.parallel.buckets import BUCKET_BYTES
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.schedules import KINDS, WHOLE_MODEL, PipelinePlan, consecutive
from megatron.parallel.sharding import sharding_specs
from megatron.train.inputs import vocabulary_of
from megatron.train.pipelining import plan_of_run
from tools.layouts.work import Matmul, Work
from tools.plan.hardware import Ring
from tools.plan.micro_batch import (
    LAST,
    MIDDLE,
    MicroBatch,
    Trace,
    in_one_stage,
    rank_on_meta,
    trace_at,
    trace_of_depth,
)
from tools.plan.trace import WIDE, Step

ENOUGH = 3  # micro-batches for each rank of a pipeline, which fill it, run in it and leave it
OF_LAYER = re.compile(r"(^|\.)\d+\.")  # the name of a parameter, by the number of the layer
THREE = PipelinePlan(3, layers=consecutive([1, 1, 1]))

_pipeline = cache(plan_of_run)
_trace = cache(trace_of_depth)


def idle_share(kind: str, ranks: int, micro_batches: int, virtual: int = 1) -> float:
    """Facts.idle_share of a schedule of KINDS."""
    idle, missing = ranks - 1, max(0, ranks - micro_batches)
    if kind == "zb-h1":
        return (idle + missing) / (3 * micro_batches)
    return (idle + (virtual - 1) * missing) / (virtual * micro_batches)


class Parameter(NamedTuple):
    """local: elements on this rank. own: those that count for it, without padding. partial: axes
    over which its gradient is summed."""

    name: str
    local: int
    own: int
    width: int  # bytes of an element
    partial: tuple[str, ...]
    is_trained: bool

    @property
    def is_of_layer(self) -> bool:
        return OF_LAYER.search(self.name) is not None


class QuickBucket(NamedTuple):
    """Fields as in megatron.parallel.bucket."""

    size: int
    axes: Sequence[Axis]
    shared: Axis
    is_of_layer: bool

    @property
    def part(self) -> slice:
        return slice(0, self.size // self.shared.size)


@dataclass(frozen=True)
class QuickModel:
    """Fields as in trace.Model. An axis has the name that it has where all have several ranks."""

    rings: Mapping[str, Ring]
    replicas: str
    of_stages: frozenset[str] = frozenset({"pipeline", "embedding_group"})
    local: int = 0
    own: int = 0
    buckets: Sequence[tuple[float, QuickBucket]] = ()
    layers: Sequence[Sequence[QuickBucket]] = ()


def rings_of(config: PretrainConfig, copies: int, stages: int) -> dict[str, Ring]:
    """By axis and union of axes."""
    parallel = config.parallel
    mode, sizes = parallel.tensor_parallel_mode, parallel.sizes
    sizes = {name: sizes.get(name, 1) for name in (*OUTER, *INNER[mode])}
    sizes |= {"data": copies, "pipeline": stages}
    strides = {name: prod([*sizes.values()][n + 1 :]) for n, name in enumerate(sizes)}
    unions = {name: (name,) for name in sizes} | UNIONS[mode]
    unions["stream"] = ("tensor",) if parallel.cuts_stream else ()
    rings = dict[str, Ring]()
    for name, parts in unions.items():
        cut = [part for part in parts if part in sizes]
        stride = min((strides[part] for part in cut), default=1)
        rings[name] = Ring(prod(sizes[part] for part in cut), stride)
    each = strides["pipeline"]
    span = stages * each if stages > 2 else None
    rings["embedding_group"] = Ring(min(stages, 2), (stages - 1) * each, span)
    return rings


@cache
def parameters_of(
    config: PretrainConfig, precision: str, place: int | None
) -> tuple[Parameter, ...]:
    """Parameters of a rank with one layer, on two data-parallel ranks. place: see micro_batch.py;
    None without a pipeline."""
    plan = WHOLE_MODEL if place is None else THREE
    config = replace(config, model=config.model.of_depth(plan.stages))
    sizes = {**config.parallel.sizes, "data": 2}
    _, model = rank_on_meta(config, precision, sizes, "meta", plan, place or 0)
    specs, found = sharding_specs(model), []
    for name, each in model.named_parameters():
        spec = specs[name]
        numbers = each.numel(), spec.is_owner() * prod(spec.shape), each.itemsize
        partial = tuple(axis.name for axis in spec.partial if axis.size > 1)
        found.append(Parameter(name, *numbers, partial, each.requires_grad))
    return tuple(found)


class Copy(NamedTuple):
    """A parameter of the rank. layer: its layer, counted from the rank's first one; None outside of
    layers. ready: when its gradient is complete, as in trace.Model."""

    parameter: Parameter
    layer: int | None
    ready: float


def _copied(listed: Sequence[Parameter], layers: int) -> Iterator[Copy]:
    """The parameters of so many layers, from those of one layer."""
    ready = 1.0
    for is_of_layer, group in groupby(listed, key=lambda each: each.is_of_layer):
        own = [*group]
        for layer in range(layers) if is_of_layer else [None]:
            when = ready if layer is None else 1 - layer / layers
            yield from (Copy(each, layer, when) for each in own)
        ready = 0.0 if is_of_layer else ready


Key = tuple[int | None, int, tuple[str, ...]]
"""Unit of ZeRO stage 3, as in zero3.Units.of_parameters; bytes of an element; axes of the sum."""


def _divided(
    copies: Sequence[Copy], stage: int, wide: int, rings: Mapping[str, Ring]
) -> list[tuple[Key, list[Copy]]]:
    """The parameters of each bucket, as in GradientBuckets. stage: of ZeRO. wide: bytes of a
    gradient at least."""
    found, latest = list[tuple[Key, list[Copy]]](), dict[Key, list[Copy]]()
    free, cut = defaultdict[Key, int](int), {name for name, each in rings.items() if each.ranks > 1}
    names = {each.parameter.partial for each in copies}
    summed = {each: tuple(name for name in each if name in cut) for each in names}
    for each in reversed(copies):
        own, unit = each.parameter, None
        if stage == 3:  # units of the root by whether they come before or after the layers
            unit = -1 - (each.ready == 0) if each.layer is None else each.layer
        key, size = (unit, own.width, summed[own.partial]), own.local * max(wide, own.width)
        if not own.is_trained:
            continue
        if free[key] < size:
            latest[key], free[key] = [], BUCKET_BYTES
            found.append((key, latest[key]))
        latest[key].append(each)
        free[key] -= size
    return found


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cache
def _model(
    config: PretrainConfig, stage: int, copies: int, precision: str, plan: PipelinePlan, rank: int
) -> QuickModel:
    """config: without a pipeline. stage: of ZeRO."""
    place, numbers = None, plan.numbers(rank)
    if plan.ranks > 1:
        place = 0 if rank == 0 else LAST if rank == plan.ranks - 1 else MIDDLE
    depth = config.model.num_layers if numbers is None else len(numbers)
    rings, mode = rings_of(config, copies, plan.ranks), config.parallel.tensor_parallel_mode
    # A union of one axis has its name; its sizes are those of parameters_of.
    several = {"data", *(name for name, size in config.parallel.sizes.items() if size > 1)}
    cut = [part for part in UNIONS[mode]["replicas"] if part in several]
    replicas = "replicas" if len(cut) > 1 else "data"
    parameters = [*_copied(parameters_of(config, precision, place), depth)]
    axes = {name: Axis(name, ring.ranks) for name, ring in rings.items()}
    wide = 0 if config.precision.pure_bf16 else WIDE
    buckets = list[tuple[float, QuickBucket]]()
    layers: list[list[QuickBucket]] = [[] for _ in range(depth if stage == 3 else 0)]
    for (unit, _, names), own in _divided(parameters, stage, wide, rings):
        shared = axes[replicas] if stage and replicas in names else ALONE
        summed = sorted((axes[name] for name in names), key=lambda axis: axis is not shared)
        size = sum(_round_up(each.parameter.local, ALIGNMENT) for each in own)
        size = _round_up(size, ALIGNMENT * prod(axis.size for axis in summed))
        bucket = QuickBucket(size, summed, shared, unit is not None and unit >= 0)
        buckets.append((max(each.ready for each in own), bucket))
        if bucket.is_of_layer:
            layers[unit or 0].append(bucket)
    local, owned = (sum(each.parameter[n] for each in parameters) for n in (1, 2))
    return QuickModel(rings, replicas, local=local, own=owned, buckets=buckets, layers=layers)


@dataclass(frozen=True)
class QuickStep(Step):
    """A step of a model whose layers are alike."""

    @cached_property
    def pipeline(self) -> PipelinePlan:
        if self.config.parallel.pipeline_model_parallel_size == 1:
            return WHOLE_MODEL
        return _pipeline(self.config, vocabulary_of(self.config), self.ranks)

    @cached_property
    def stages(self) -> list[Step]:
        return self._by_rank

    @cached_property
    def _by_rank(self) -> list[Step]:
        """Ranks between the ends with as many layers are one object: the first of them, which keeps
        most."""
        plan, found, kinds = self.pipeline, list[Step](), dict[object, Step]()
        for rank in range(plan.ranks):
            is_end = rank in (0, plan.ranks - 1)
            kind = rank if is_end else tuple(map(len, plan.layers[rank :: plan.ranks]))
            if kind not in kinds:
                kinds[kind] = replace(self, rank=rank)
            found.append(kinds[kind])
        return found

    @cached_property
    def model(self) -> QuickModel:  # type: ignore[override]
        config = self._micro_batch.config
        model = replace(config.model, recompute_granularity="none")
        training = replace(config.training, micro_batch_size=1, global_batch_size=None)
        config = replace(config, model=model, training=training)
        plan = replace(self.pipeline, kind="1f1b", custom_schedule=None)
        return _model(config, self.stage, self.copies, self.precision, plan, self.rank)

    @cached_property
    def trace(self) -> Trace:
        return _trace(self._micro_batch)

    @property
    def _micro_batch(self) -> MicroBatch:
        found = super()._micro_batch
        config = replace(found.config, parallel=in_one_stage(found.config.parallel))
        return replace(found, config=config)

    @property
    def idle_share(self) -> float:
        plan = self.pipeline
        if plan.kind not in KINDS:
            return super().idle_share
        return idle_share(plan.kind, plan.ranks, self.micro_batches, plan.virtual)

    @property
    def activations(self) -> int:
        plan, m = self.pipeline, self.micro_batches
        enough = ENOUGH * plan.ranks
        if plan.kind not in KINDS or m <= enough or m % plan.ranks:
            return super().activations
        batch = self.config.global_batch_size(self.ranks) // m * enough
        training = replace(self.config.training, global_batch_size=batch)
        return replace(self, config=replace(self.config, training=training)).activations

    @property
    def unlike(self) -> list[Step]:
        """Each of `stages` once."""
        return [*{id(each): each for each in self._by_rank}.values()]

    def lacks(self, limit: float) -> float:
        """Bytes that the fullest rank has too few, at most 0 if the layout fits; without those that
        need a trace if the others do not fit."""
        lasting = max(sum(each.lasting.values()) for each in self.unlike)
        if lasting <= limit:
            lasting = max(each.memory["total"] for each in self.unlike)
        return lasting - limit


@dataclass(frozen=True)
class LayersStep(QuickStep):
    """A step without what is outside of layers: the whole one takes no less time and memory. layer:
    trace of a layer at the step's micro-batch."""

    layer_trace: Trace = field(kw_only=True, compare=False)

    @cached_property
    def stages(self) -> list[Step]:
        """Stages alike count once, so that the bubble is not quite that of the mean stage."""
        return self.unlike

    @cached_property
    def trace(self) -> Trace:
        own, layers = self.layer_trace, self.layers
        work = {phase: Work().plus(each, layers) for phase, each in own.work.items()}
        depths = [*map(len, self.pipeline.layers[self.rank :: self.pipeline.ranks])] or [layers]
        kept = tuple(depth * own.kept for depth in depths)
        return replace(own, work=work, kept_by_stage=kept, owed_by_stage=kept)

    @cached_property
    def layer(self) -> Work:  # type: ignore[override]
        return reduce(Work.plus, self.layer_trace.work.values())


def layer_trace(
    config: PretrainConfig, precision: str, device: str, *, is_staged: bool = True
) -> Trace:
    """Trace of one layer. is_staged: whether the model can have stages; then it is that of a middle
    rank with one layer, which moves 1 % more."""
    asked = MicroBatch(replace(config, parallel=in_one_stage(config.parallel)), precision, device)
    if is_staged:
        return trace_at(replace(asked, pipeline=THREE), MIDDLE, 1)
    one, two = (trace_at(asked, 0, layers) for layers in (1, 2))
    work = {phase: each.plus(one.work[phase], -1) for phase, each in two.work.items()}
    work = {name: Work(+each.matmuls, +each.calls, each.moved) for name, each in work.items()}
    return replace(two, work=work, kept_by_stage=(two.kept - one.kept,))


def at_samples(one: Trace, two: Trace, samples: int) -> Trace | None:
    """Trace of a micro-batch of so many samples, from those of one and of two: a layer's sizes grow
    by as much with each. None where the two do not do the same."""

    def at(a: int, b: int) -> int:
        return a + (samples - 1) * (b - a)

    def of_matmul(a: Matmul, b: Matmul) -> Matmul:
        sizes = (at(x, y) for x, y in zip(a[:4], b[:4], strict=True))
        return a._replace(**dict(zip(a._fields, sizes, strict=False)))

    work = dict[str, Work]()
    for phase, first in one.work.items():
        second, found = two.work[phase], Work(moved=at(first.moved, two.work[phase].moved))
        if [*first.matmuls.values(), *first.calls.values()] != [
            *second.matmuls.values(),
            *second.calls.values(),
        ]:
            return None
        for (a, number), b in zip(first.matmuls.items(), second.matmuls, strict=True):
            found.matmuls[of_matmul(a, b)] += number
        for (call, number), other in zip(first.calls.items(), second.calls, strict=True):
            if (call.axis, len(call.beside)) != (other.axis, len(other.beside)):
                return None
            beside = tuple(map(of_matmul, call.beside, other.beside))
            call = call._replace(bytes=at(call.bytes, other.bytes), beside=beside)
            found.calls[call] += number
        work[phase] = found
    kept, message = (at(one.kept, two.kept),), at(one.message, two.message)
    peaks = at(one.logits, two.logits), at(one.one_layer, two.one_layer)
    return Trace(work, kept, kept, *peaks, message)
