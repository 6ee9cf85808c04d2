"""What a training step takes on one rank, derived from the model itself.

A rank of ranks that are not there runs a micro-batch, forward and backward, on meta tensors, which
have shapes and no memory, under a meter (tools/layouts/work.py): of a model of one layer and of
one of two. What the second layer adds, each further one adds too. So of L layers, exactly for
matmuls, collectives, bytes moved and bytes kept for the backward,

    x = x of one layer + (L - 1) (x of two layers - x of one)

Peaks of memory are those of two layers, above what is kept. What happens once a step comes from the
gradient buckets of the whole model.

Of a pipeline a rank of the first, of a middle or of the last place runs its own stages, each of one
layer, on inputs that nobody sends; the schedule's lists say how many micro-batches it keeps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from megatron.config.pretrain import PretrainConfig
from megatron.models.build import build_on_meta
from megatron.models.registry import find_kind
from megatron.parallel.buckets import BUCKET_BYTES, Deferred, GradientBuckets
from megatron.parallel.mesh import Mesh, absent_mesh
from megatron.parallel.pipeline import UNCUT, PipelinePlan
from megatron.parallel.schedules import Action, Facts, Lists, check, schedule
from megatron.parallel.sharding import materialize, sharding_specs
from megatron.train.executor import SENDS, Executor, Tensors, as_tuple, has_gradient
from megatron.train.inputs import vocabulary_of
from megatron.train.pipelining import plan_of_run
from megatron.train.state import DTYPES
from tools.layouts.work import Call, Matmul, Meter, Work, on_meta
from tools.planning.hardware import Hardware, Ring

META = torch.device("meta")
PHASES = ("forward", "recomputation", "backward")
WIDE = 4  # bytes of a gradient, master or moment
# Passes of the optimizer over this rank's parameters: in fp32 norm 1, AdamW 8 with the scaled
# gradient, rounding 1; in the weights' own width rounding 1.
WIDE_PASSES, NARROW_PASSES = 10, 1


@dataclass(frozen=True)
class Trace:
    """A micro-batch on one rank. Bytes do not count what lasts, parameters and gradients."""

    work: Mapping[str, Work]  # by phase
    kept_by_stage: tuple[int, ...]  # from forward to backward, of each virtual stage of the rank
    owed_by_stage: tuple[int, ...]  # from backward_input to backward_weight
    logits: int  # most above what is kept, in the forward
    one_layer: int  # and in the backward
    message: int  # the largest between stages

    @property
    def kept(self) -> int:
        """From forward to backward."""
        return sum(self.kept_by_stage)


@cache
def trace(
    config: PretrainConfig,
    precision: str,
    device: str,
    is_trimmed: bool = False,
    pipeline: PipelinePlan = UNCUT,
    rank: int = 0,
) -> Trace:
    """device: "cpu" or "cuda", whose kernels are meant. is_trimmed: without what fills up a
    batch. rank: along the pipeline axis."""
    mesh, model = _on_meta(config, precision, config.parallel.sizes, device, pipeline, rank)
    gradients = _Unreduced(model, sets_grad=False)
    meter = Meter(mesh, [*model.parameters(), *(each.flat for each in gradients.buckets)])
    meter.phase = "forward"
    numbers = np.arange(config.training.micro_batch_size)
    samples = resolve_name(find_kind(config.model.kind).samples)(config)
    batch = samples.batch(range(len(numbers))).numbered(numbers)
    batch = batch.trimmed() if is_trimmed else batch
    own = range(rank, pipeline.stages, pipeline.ranks)
    held, peaks = list[int](), list[int]()  # at the begin of each action

    def enter(action: Action) -> None:
        """Pass on what other ranks send."""
        direction, stage, _ = action
        executor.messages.ready.clear()  # sent
        held.append(meter.live)
        if direction != "forward" and meter.phase == "forward":
            peaks.append(meter.peak)
            meter.peak = meter.live
        meter.phase = "forward" if direction == "forward" else "backward"
        if direction == "forward" and stage > 0:
            executor.messages.put("forward", stage, 0, entering(stage))
        elif direction in ("backward", "backward_input") and stage < pipeline.stages - 1:
            like = (each for each in entering(stage + 1) if has_gradient(each))
            executor.messages.put("backward", stage, 0, like)

    def entering(stage: int) -> Tensors:
        return as_tuple(model.stream(batch, pipeline.layers[stage].start))

    executor = Executor(
        model=model.train(),
        objective=model,
        mesh=replace(mesh, device=META),
        pipeline=pipeline,
        batches=[batch],
        loss_scales=torch.ones(len(model.terms), dtype=torch.float64, device=META),
        gradients=gradients,
        before=enter,
    )
    actions = [Action("forward", stage, 0) for stage in own]
    actions += [Action(each, stage, 0) for stage in own[::-1] for each in _backward(pipeline)]
    gradients.start()
    with on_meta(meter, device):
        executor.run(tuple(actions))
    peaks.append(meter.peak)
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
    forward_peak, peak = (each - sum(kept) for each in peaks)
    return Trace(work, tuple(kept), tuple(owed), forward_peak, peak, message)


def trace_of_depth(
    config: PretrainConfig,
    precision: str,
    device: str,
    is_trimmed: bool = False,
    pipeline: PipelinePlan = UNCUT,
    rank: int = 0,
) -> Trace:
    """As `trace`, of stages of any depth."""
    depths = [len(each) for each in pipeline.layers[rank :: pipeline.ranks]]
    depths = depths or [config.model.num_layers]
    ranks = min(pipeline.ranks, 3)  # of which one is first, one last, and one between them
    place = 0 if rank == 0 else ranks - 1 if rank == pipeline.ranks - 1 else 1

    def traced(first: int) -> Trace:
        """Of one layer in each stage, but for the first one of the rank."""
        sizes = [1] * (ranks * pipeline.virtual)
        sizes[place] = first
        model = replace(config.model, num_layers=sum(sizes))
        plan = UNCUT
        if pipeline.stages > 1:
            layers = tuple(range(*each) for each in pairwise(accumulate(sizes, initial=0)))
            kind = "zb-h1" if len(_backward(pipeline)) > 1 else "1f1b"
            plan = PipelinePlan(ranks, pipeline.virtual, kind, layers)
        found = replace(config, model=model)
        return trace(found, precision, device, is_trimmed, plan, place)

    one, two = traced(1), traced(min(2, max(depths)))
    more = sum(depths) - len(depths)
    work = {
        phase: first.plus(two.work[phase].plus(first, -1), more)
        for phase, first in one.work.items()
    }

    def of_depths(ones: Sequence[int], twos: Sequence[int]) -> tuple[int, ...]:
        layer = twos[0] - ones[0]
        pairs = zip(ones, depths, strict=True)
        return tuple(size + (depth - 1) * layer for size, depth in pairs)

    kept = of_depths(one.kept_by_stage, two.kept_by_stage)
    owed = of_depths(one.owed_by_stage, two.owed_by_stage)
    return replace(two, work=work, kept_by_stage=kept, owed_by_stage=owed)


def _backward(pipeline: PipelinePlan) -> tuple[str, ...]:
    """The actions of a backward, in the schedule of the pipeline."""
    own = pipeline.own[0] if pipeline.own else ()
    if pipeline.kind == "zb-h1" or any(each.direction == "backward_weight" for each in own):
        return "backward_input", "backward_weight"
    return ("backward",)


def _on_meta(
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
        sequence_parallel=config.parallel.cuts_stream,
        stage=rank,
    )
    model = build_on_meta(config.model, mesh, vocabulary_of(config), pipeline=pipeline)
    return mesh, materialize(model, device=META, dtype=DTYPES[precision], seed=None)


class _Unreduced(GradientBuckets):
    """Leaves reduction to the whole model's."""

    def backward(
        self, *, is_last: bool, stage: int | None = None, is_deferred: bool = False
    ) -> AbstractContextManager[list[Deferred]]:
        return super().backward(is_last=False, stage=stage, is_deferred=is_deferred)

    def add_deferred(
        self, deferred: Sequence[Deferred], *, is_last: bool, stage: int | None = None
    ) -> None:
        super().add_deferred(deferred, is_last=False, stage=stage)


class Model:
    """All that one rank has of the whole model.

    local: parameters of this rank. own: those of all ranks of its pipeline stage, without padding;
    tied ones count at the first stage that has them. buckets: each with the fraction of the last
    backward after which it is full. rings: by axis. agreement: calls of a step: what the terms of
    the loss are means over, the terms, and the gradient norm.
    """

    def __init__(
        self,
        config: PretrainConfig,
        copies: int,
        precision: str,
        bucket_bytes: int,
        pipeline: PipelinePlan,
        rank: int,
    ) -> None:
        sizes = {**config.parallel.sizes, "data": copies}
        mesh, model = _on_meta(config, precision, sizes, "meta", pipeline, rank)
        specs = sharding_specs(model)
        self.own = sum(prod(spec.shape) for spec in specs.values() if spec.is_owner())
        self.local = sum(each.numel() for each in model.parameters())
        ready, buckets = _ready(specs), GradientBuckets(model, bucket_bytes).buckets
        self.buckets = [(max(ready[view.name] for view in each.views), each) for each in buckets]
        strides, stride = dict[str, int](), 1
        for axis in reversed(mesh.axes):
            strides[axis.name] = stride
            stride *= axis.size
        ends = (pipeline.ranks - 1) * strides["pipeline"]
        self.rings = {axis.name: Ring(axis.size, strides[axis.name]) for axis in mesh.axes}
        self.rings[mesh.embedding_group.name] = Ring(mesh.embedding_group.size, ends)
        for union in (mesh.loss, mesh.loss_sums, mesh.model_parallel):
            stride = min((strides[part.name] for part in union.parts if part.size > 1), default=1)
            self.rings[union.name] = Ring(union.size, stride)
        terms = 1 + len(model.terms)
        agreed = ((mesh.loss, terms), (mesh.loss_sums, terms), (mesh.model_parallel, 3))
        calls = (Call(axis.name, 8 * number, 2) for axis, number in agreed if axis.size > 1)
        self.agreement = Counter(calls)


_model = cache(Model)


def _ready(names: Iterable[str]) -> dict[str, float]:
    """The fraction of the backward after which each parameter's gradient is there. A number in a
    name is that of the layer; before the layers come embeddings, behind them heads."""
    matches = {name: re.search(r"(?:^|\.)(\d+)\.", name) for name in names}
    layers = {name: int(match[1]) for name, match in matches.items() if match}
    places = {number: place for place, number in enumerate(sorted({*layers.values()}))}
    depth, is_ahead, ready = max(1, len(places)), True, {}
    for name in matches:
        is_ahead = is_ahead and name not in layers
        place = places[layers[name]] if name in layers else 0
        ready[name] = 1 - place / depth if name in layers else float(is_ahead)
    return ready


_facts = cache(check)


@dataclass(frozen=True)
class Step:
    """All that is derived, on one rank. config: one that `check(ranks)` has let pass. device: "cpu"
    or "cuda", whose kernels are meant. rank: along the pipeline axis."""

    config: PretrainConfig
    ranks: int
    precision: str
    device: str = "cuda"
    rank: int = 0

    @cached_property
    def pipeline(self) -> PipelinePlan:
        if self.config.parallel.sizes.get("pipeline", 1) == 1:
            return UNCUT
        return plan_of_run(self.config, self.ranks, vocabulary_of(self.config))

    @property
    def stages(self) -> list[Step]:
        """The same step on each rank along the pipeline axis."""
        return [replace(self, rank=rank) for rank in range(self.pipeline.ranks)]

    @property
    def parameters(self) -> int:
        """Of the whole model, without padding."""
        return sum(each.model.own for each in self.stages)

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        return self.flops / (seconds * self.ranks * hardware.peak(self.precision))

    @property
    def width(self) -> int:
        """Bytes of a weight and of an activation."""
        return DTYPES[self.precision].itemsize

    @property
    def copies(self) -> int:
        """Data-parallel."""
        return self.config.data_parallel_size(self.ranks)

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def micro_batches(self) -> int:
        size = self.copies * self.config.training.micro_batch_size
        return self.config.global_batch_size(self.ranks) // size

    @property
    def tokens(self) -> int:
        """Of the global batch."""
        return self.config.global_batch_size(self.ranks) * self.config.data.seq_length

    def model_of(self, bucket_bytes: int) -> Model:
        model = replace(self.config.model, recompute_granularity="none")
        training = replace(self.config.training, micro_batch_size=1)
        config = replace(self.config, model=model, training=training)  # so more calls are alike
        return _model(config, self.copies, self.precision, bucket_bytes, self.pipeline, self.alike)

    @property
    def alike(self) -> int:
        """The first rank along the pipeline axis whose stages are as those of this one."""
        if self.rank in (0, self.pipeline.ranks - 1):
            return self.rank
        depths = [each.depths for each in self.stages]
        return depths.index(self.depths, 1)

    @property
    def depths(self) -> list[int]:
        """Layers of each virtual stage of this rank."""
        layers = self.pipeline.layers[self.rank :: self.pipeline.ranks]
        return [len(each) for each in layers] or [self.config.model.num_layers]

    @cached_property
    def model(self) -> Model:
        return self.model_of(BUCKET_BYTES)

    @cached_property
    def trace(self) -> Trace:
        """Of a micro-batch."""
        arguments = self.config, self.precision, self.device
        return trace_of_depth(*arguments, pipeline=self.pipeline, rank=self.rank)

    @cached_property
    def facts(self) -> Facts:
        """Proved of the schedule of the pipeline."""
        return _facts(self.lists, self.pipeline.virtual)

    @property
    def lists(self) -> Lists:
        plan = self.pipeline
        return plan.own or schedule(plan.kind, plan.ranks, self.micro_batches, plan.virtual)

    @property
    def activations(self) -> int:
        """Bytes of the micro-batches in flight, when they are most."""
        found, ranks = self.trace, self.pipeline.ranks

        def change(action: Action) -> int:
            place = action.stage // ranks
            kept, owed = found.kept_by_stage[place], found.owed_by_stage[place]
            changes = {"forward": kept, "backward": -kept}
            return {**changes, "backward_input": owed - kept, "backward_weight": -owed}[
                action.direction
            ]

        return max(accumulate(map(change, self.lists[self.rank])))

    @property
    def messages(self) -> int:
        """Bytes that are sent and may not be free yet."""
        plan = self.pipeline
        own = range(self.rank, plan.stages, plan.ranks)
        near = {each for stage in own for each in (stage - 1, stage + 1)} & {*range(plan.stages)}
        peers = {stage % plan.ranks for stage in near} - {self.rank}
        return SENDS * len(peers) * self.trace.message

    @cached_property
    def work(self) -> Mapping[str, Work]:
        """Of the micro-batches of a step, by phase."""
        found = self.trace.work.items()
        return {phase: Work().plus(each, self.micro_batches) for phase, each in found}

    @property
    def reductions(self) -> list[tuple[float, str, int]]:
        """(as in Model.buckets, axis, bytes) of each all-reduce of gradients."""
        found = [
            (ready, bucket, axis) for ready, bucket in self.model.buckets for axis in bucket.axes
        ]
        return [(ready, axis.name, bucket.flat.nbytes) for ready, bucket, axis in found]

    @property
    def updated(self) -> int:
        """Bytes that the optimizer moves."""
        return self.model.local * (WIDE_PASSES * WIDE + NARROW_PASSES * self.width)

    @property
    def calls(self) -> dict[str, Counter[Call]]:
        """All collectives of a step, by phase."""
        found = {phase: Counter(each.calls) for phase, each in self.work.items()}
        found["backward"].update(Call(axis, size, 2) for _, axis, size in self.reductions)
        return {**found, "agreement": self.model.agreement}

    def sent(self, axis: str) -> int:
        """Bytes of a step that a rank sends along the axis."""
        calls = sum(self.calls.values(), Counter[Call]())
        ranks = self.model.rings[axis].ranks
        return sum(n * call.sent(ranks) for call, n in calls.items() if call.axis == axis)

    @property
    def lasting(self) -> dict[str, int]:
        """Bytes that are there all the time, by kind."""
        weights = self.width * self.model.local
        flat = sum(bucket.flat.nbytes for _, bucket in self.model.buckets)
        masters = flat if self.width < WIDE else 0
        return {"weights": weights, "gradients": flat, "masters": masters, "moments": 2 * flat}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, and the most of them at a time as "total"."""
        found, kept = self.trace, {**self.lasting, "activations": self.activations}
        if self.pipeline.stages > 1:
            kept["messages"] = self.messages
        total = sum(kept.values()) + max(found.logits, found.one_layer)
        return {**kept, "logits": found.logits, "one_layer": found.one_layer, "total": total}

    @cached_property
    def flops(self) -> int:
        """Of a step on all ranks, as MFU counts them: without recomputation and padding, with all
        of attention."""
        return self._flops(is_executed=False)

    @cached_property
    def executed_flops(self) -> int:
        """The same with recomputation and padding, as the authors count TFLOP/s."""
        return self._flops(is_executed=True)

    def _flops(self, *, is_executed: bool) -> int:
        """Of a model on one rank, which computes what a tensor-parallel group does."""
        model, parallel = self.config.model, self.config.parallel
        changes: dict[str, Any] = {} if is_executed else {"recompute_granularity": "none"}
        if (multiple := getattr(model, "make_vocab_size_divisible_by", None)) is not None:
            padded = multiple * self.tensor if is_executed else 1
            changes["make_vocab_size_divisible_by"] = padded
        config = replace(
            self.config,
            model=replace(model, **changes),
            parallel=replace(parallel, tensor_model_parallel_size=1, sequence_parallel=False),
        )
        found = trace_of_depth(config, self.precision, "cuda", not is_executed)
        matmuls = sum((work.matmuls for work in found.work.values()), Counter[Matmul]())
        of_group = sum(times * each.flops for each, times in matmuls.items() if not each.again)
        return of_group * self.micro_batches * self.copies
