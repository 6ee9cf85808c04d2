"""Parameters and gradient buckets of a rank, and the rings of ranks over which it sends.

The model is built on meta with one layer, of which others are copies, and buckets follow from the
sizes of its parameters as GradientBuckets (megatron/parallel/buckets.py) divides them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from megatron.config.parallel import TrainingParallelConfig
from megatron.config.pretrain import PretrainConfig
from megatron.parallel.axes import INNER, OUTER, UNIONS
from megatron.parallel.bucket import ALIGNMENT
from megatron.parallel.buckets import BUCKET_BYTES, IN_FLIGHT
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan, consecutive
from megatron.parallel.sharding import sharding_specs
from tools.layouts.work import Call
from tools.plan.hardware import Ring
from tools.plan.layers import in_one_stage
from tools.plan.micro_batch import rank_on_meta

OF_STAGES = ("pipeline", "embedding_group")  # axes that join pipeline stages
WIDE = 4  # bytes of a gradient, master or moment, except in pure bf16
NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # of a layer, in the name of a parameter
THREE = PipelinePlan(3, layers=consecutive([1, 1, 1]))
ONE_RANK = {  # settings of a layer that is not cut
    "tensor_model_parallel_size": 1,
    "tensor_parallel_mode": "1d",
    "tensor_parallel_depth": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cp_comm_type": "a2a",
}


class Parameter(NamedTuple):
    """local: elements on this rank. own: those that count for it, without padding. partial: axes
    over which its gradient is summed."""

    name: str
    local: int
    own: int
    width: int  # bytes of an element
    partial: tuple[str, ...]
    is_trained: bool
    is_of_layer: bool


class PlannedBucket(NamedTuple):
    """The first fields are as in megatron.parallel.bucket. numbers: elements without padding."""

    size: int
    axes: Sequence[Axis]
    shared: Axis
    is_of_layer: bool
    numbers: int

    @property
    def own(self) -> int:
        """Elements of this rank's part, padding included."""
        return self.size // self.shared.size


@dataclass(frozen=True)
class Model:
    """One rank's part of the whole model.

    rings: by axis or union of axes. replicas: axis over which the gradients of all weights are
    summed. local: number of parameters of this rank. own: of all ranks of its pipeline stage
    together, without padding; tied ones count at the first stage that has them. buckets: each with
    the fraction of the last backward after which it is full. arrivals: in the order of the
    backward, each parameter with the number of its bucket. layers: buckets of each layer, in ZeRO
    stage 3. agreement: collectives once per step, of the denominators of the loss, its terms, and
    the gradient norm.
    """

    rings: Mapping[str, Ring]
    replicas: str
    local: int = 0
    own: int = 0
    buckets: Sequence[tuple[float, PlannedBucket]] = ()
    arrivals: Sequence[tuple[Copy, int]] = ()
    layers: Sequence[Sequence[PlannedBucket]] = ()
    agreement: Counter[Call] = field(default_factory=Counter)

    def whole_gradients(self, *, is_repeated: bool) -> Iterator[tuple[Copy | None, int, int]]:
        """(parameter; elements of whole gradients and of sums that arrive, while its gradient is
        added, and from then on) from ZeRO stage 2 on, as in GradientBuckets; first (None, elements
        before the head makes gradients in the forward, and from then on). is_repeated: whether
        another micro-batch came before, whose last sums nobody has waited for."""
        buckets, following = [each for _, each in self.buckets], 0
        missing = Counter(number for _, number in self.arrivals)
        reducing = deque(buckets[-IN_FLIGHT:] * is_repeated)
        whole = set[int]()  # numbers of buckets

        def held() -> int:
            sums = sum(each.size + each.own for each in reducing)
            return sums + sum(buckets[each].size for each in whole)

        before = held()
        whole |= {number for each, number in self.arrivals if each.is_head}
        yield None, before, held()
        for each, number in self.arrivals:
            whole.add(number)
            adding = held()
            missing[number] -= 1
            while following < len(buckets) and not missing[following]:
                if len(reducing) == IN_FLIGHT:
                    reducing.popleft()
                whole.remove(following)
                reducing.append(buckets[following])
                following += 1
            yield each, adding, held()


def axes_of(
    parallel: TrainingParallelConfig, copies: int, stages: int
) -> tuple[dict[str, Ring], dict[str, str]]:
    """({name of an axis or union: its ring}, {axis or union: its name}). A union has the name of
    the first one of the same ranks, as in build_mesh. copies: data-parallel size."""
    mode, sizes = parallel.tensor_parallel_mode, parallel.sizes
    sizes = {name: sizes.get(name, 1) for name in (*OUTER, *INNER[mode])}
    sizes |= {"data": copies, "pipeline": stages}
    strides = {name: prod([*sizes.values()][n + 1 :]) for n, name in enumerate(sizes)}
    names, known = {name: name for name in sizes}, {(name,): name for name in sizes}
    rings = {name: Ring(size, strides[name]) for name, size in sizes.items()}
    stream = {"stream": ("tensor",) if parallel.cuts_stream else ()}
    for name, members in (UNIONS[mode] | stream).items():
        parts = tuple(each for each in members if sizes[each] > 1)
        names[name] = known.setdefault(parts, name) if parts else name
        # Parts that are not adjacent send little over their union.
        stride = min((strides[part] for part in parts), default=1)
        rings.setdefault(names[name], Ring(prod(sizes[part] for part in parts), stride))
    names["embedding_group"] = "pipeline"
    if stages > 2:
        each = strides["pipeline"]
        names["embedding_group"] = "embedding_group"
        rings["embedding_group"] = Ring(2, (stages - 1) * each, stages * each)
    return rings, names


@cache
def _names(config: PretrainConfig, depth: int) -> frozenset[str]:
    sizes = {**config.parallel.sizes, "data": 1}
    config = replace(config, model=config.model.with_num_layers(depth))
    _, model = rank_on_meta(config, "fp32", sizes, "meta", WHOLE_MODEL, 0)
    return frozenset(name for name, _ in model.named_parameters())


def _names_of_layers(config: PretrainConfig) -> set[str]:
    """Names of the parameters of layers, without the layer's number: a further layer adds them."""
    parallel = replace(in_one_stage(config.parallel), **ONE_RANK)  # type: ignore[arg-type]
    whole = replace(config, parallel=parallel)
    return {NUMBER.sub("", each, 1) for each in _names(whole, 2) - _names(whole, 1)}


@cache
def parameters_of(
    config: PretrainConfig, precision: str, place: int | None
) -> tuple[tuple[Parameter, ...], int]:
    """(parameters of a rank with one layer, on two data-parallel ranks; further terms of the loss).
    place: see micro_batch.py; None without a pipeline."""
    plan, of_layers = WHOLE_MODEL if place is None else THREE, _names_of_layers(config)
    config = replace(config, model=config.model.with_num_layers(plan.stages))
    sizes = {**config.parallel.sizes, "data": 2}
    _, model = rank_on_meta(config, precision, sizes, "meta", plan, place or 0)
    specs, found = sharding_specs(model), []
    for name, each in model.named_parameters():
        spec = specs[name]
        numbers = each.numel(), spec.is_owner() * prod(spec.shape), each.itemsize
        partial = tuple(axis.name for axis in spec.partial if axis.size > 1)
        is_of_layer = NUMBER.sub("", name, 1) in of_layers
        found.append(Parameter(name, *numbers, partial, each.requires_grad, is_of_layer))
    return tuple(found), len(model.terms)


class Copy(NamedTuple):
    """A parameter of the rank. layer: its layer, counted from the rank's first one; None outside of
    layers. ready: the fraction of the last backward after which its gradient is complete. is_head:
    whether the forward makes a gradient of it."""

    parameter: Parameter
    layer: int | None
    ready: float
    is_head: bool = False


def _copied(listed: Sequence[Parameter], layers: int) -> Iterator[Copy]:
    """The parameters of so many layers, from those of one layer."""
    ready = 1.0
    outside = [each for each in listed if each.is_trained and not each.is_of_layer]
    head = max(outside[::-1], key=lambda each: each.local, default=None)
    for is_of_layer, group in groupby(listed, key=lambda each: each.is_of_layer):
        own = [*group]
        for layer in range(layers) if is_of_layer else [None]:
            when = ready if layer is None else 1 - layer / layers
            yield from (Copy(each, layer, when, each is head) for each in own)
        ready = 0.0 if is_of_layer else ready


def _arriving(copies: Sequence[Copy]) -> Iterator[Copy]:
    """In the order of the backward: the last module first, its weight before its bias."""

    def module(each: Copy) -> tuple[int | None, str]:
        return each.layer, each.parameter.name.rpartition(".")[0]

    for _, group in groupby(reversed(copies), module):
        yield from reversed([*group])


Key = tuple[int | None, int, tuple[str, ...]]
"""Unit of ZeRO stage 3, as in zero3.Units.of_parameters; bytes of an element; axes of the sum."""


def _divided(
    copies: Sequence[Copy], stage: int, wide: int, most: int, names: Mapping[str, str]
) -> list[tuple[Key, list[Copy]]]:
    """The parameters of each bucket, as in GradientBuckets. stage: of ZeRO. wide: bytes of a
    gradient at least. most: bytes of a bucket. names: of axes that have several ranks."""
    found, latest = list[tuple[Key, list[Copy]]](), dict[Key, list[Copy]]()
    free = defaultdict[Key, int](int)
    for each in reversed(copies):
        own, unit = each.parameter, None
        if stage == 3:  # units of the root by whether they come before or after the layers
            unit = -1 - (each.ready == 0) if each.layer is None else each.layer
        summed = tuple(names[name] for name in own.partial if name in names)
        key, size = (unit, own.width, summed), own.local * max(wide, own.width)
        if not own.is_trained:
            continue
        if free[key] < size:
            latest[key], free[key] = [], most
            found.append((key, latest[key]))
        latest[key].append(each)
        free[key] -= size
    order = {id(each): number for number, each in enumerate(reversed(copies))}
    return sorted(found, key=lambda bucket: order[id(bucket[1][-1])])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cache
def model_of(
    config: PretrainConfig,
    precision: str,
    *,
    zero_stage: int,
    copies: int,
    stages: int,
    place: int | None,
    layers: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Model:
    """config: of in_one_stage. copies: data-parallel size. stages: ranks along the pipeline axis.
    layers: of this rank."""
    rings, names = axes_of(config.parallel, copies, stages)
    replicas = names["replicas"]
    parameters, terms = parameters_of(config, precision, place)
    copied = [*_copied(parameters, layers)]
    axes = {name: Axis(name, ring.ranks) for name, ring in rings.items()}
    several = {name: own for name, own in names.items() if rings[own].ranks > 1}
    wide = 0 if config.precision.pure_bf16 else WIDE
    buckets = list[tuple[float, PlannedBucket]]()
    numbers_of = dict[int, int]()  # of buckets, by the id of their parameters
    of_layers: list[list[PlannedBucket]] = [[] for _ in range(layers if zero_stage == 3 else 0)]
    for (unit, _, summed), own in _divided(copied, zero_stage, wide, bucket_bytes, several):
        shared = axes[replicas] if zero_stage and replicas in summed else ALONE
        over = sorted((axes[name] for name in summed), key=lambda axis: axis is not shared)
        size = sum(_round_up(each.parameter.local, ALIGNMENT) for each in own)
        size = _round_up(size, ALIGNMENT * prod(axis.size for axis in over))
        numbers = sum(each.parameter.local for each in own)
        bucket = PlannedBucket(size, over, shared, unit is not None and unit >= 0, numbers)
        numbers_of |= dict.fromkeys(map(id, own), len(buckets))
        buckets.append((max(each.ready for each in own), bucket))
        if bucket.is_of_layer:
            of_layers[unit or 0].append(bucket)
    local, owned = (sum(each.parameter[n] for each in copied) for n in (1, 2))
    agreed = [("loss", 1 + terms), ("loss_sums", 1 + terms), ("model_parallel", 3)]
    agreed += [("replicas", 1)] * (zero_stage > 0)
    calls = (Call(several[name], 8 * number, 2) for name, number in agreed if name in several)
    return Model(
        rings,
        replicas,
        local=local,
        own=owned,
        buckets=buckets,
        arrivals=[(x, numbers_of[id(x)]) for x in _arriving(copied) if id(x) in numbers_of],
        layers=of_layers,
        agreement=Counter(calls),
    )
