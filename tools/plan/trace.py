"""Work, memory and communication of a training step on one rank, derived from the model itself.

Matmuls, communication and activations are those of a micro-batch (micro_batch.py). Work that is
done once per step comes from the gradient buckets (buckets.py). The number of micro-batches in
flight comes from the lists of the pipeline's schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import Any

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.buckets import BUCKET_BYTES
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.schedules import KINDS, WHOLE_MODEL, Facts, Lists, PipelinePlan, check
from megatron.train.compiled import choose_graph
from megatron.train.executor import SENDS
from megatron.train.inputs import vocabulary_of
from megatron.train.pipelining import plan_of_run
from megatron.train.state import DTYPES
from tools.layouts.work import Call, Matmul, Work
from tools.plan.buckets import NUMBER, ONE_RANK, WIDE, Model, PlannedBucket, model_of
from tools.plan.hardware import Hardware
from tools.plan.layers import in_one_stage
from tools.plan.micro_batch import (
    LAST,
    MIDDLE,
    START,
    MicroBatch,
    Trace,
    layer_of,
    trace_of_depth,
)

# Passes of the optimizer over this rank's parameters. In fp32: norm 1, AdamW 8 with the scaled
# gradient, rounding 1. In the weights' own dtype: rounding 1.
WIDE_PASSES, NARROW_PASSES = 10, 1
_pipeline = cache(plan_of_run)
_trace = cache(trace_of_depth)
_facts = cache(check)


def idle_share(kind: str, ranks: int, micro_batches: int, virtual: int = 1) -> float:
    """Facts.idle_share of a schedule of KINDS."""
    idle, missing = ranks - 1, max(0, ranks - micro_batches)
    if kind == "zb-h1":
        return (idle + missing) / (3 * micro_batches)
    return (idle + (virtual - 1) * missing) / (virtual * micro_batches)


@dataclass(frozen=True)
class Step:
    """A step on one rank, and all that is derived from it. config: one that `check(ranks)` accepts.
    device: "cpu" or "cuda", whose kernels are meant. rank: along the pipeline axis."""

    config: PretrainConfig
    ranks: int
    precision: str
    device: str = "cuda"
    rank: int = 0
    is_softmax_fused = True

    @cached_property
    def pipeline(self) -> PipelinePlan:
        if self.config.parallel.sizes.get("pipeline", 1) == 1:
            return WHOLE_MODEL
        return _pipeline(self.config, vocabulary_of(self.config), self.ranks)

    @cached_property
    def stages(self) -> list[Step]:
        """The same step on each rank along the pipeline axis."""
        ranks = range(self.pipeline.ranks)
        return [self if rank == self.rank else replace(self, rank=rank) for rank in ranks]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(each.model.own for each in self.stages)

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        return self.flops / (seconds * self.ranks * hardware.peak(self.precision))

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPES[self.precision].itemsize

    @cached_property
    def wide(self) -> int:
        """Bytes of a gradient, master or moment."""
        return self.width if self.config.precision.pure_bf16 else WIDE

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.config.parallel.stage_of_zero

    @cached_property
    def copies(self) -> int:
        """Data-parallel size."""
        return self.config.data_parallel_size(self.ranks)

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def context(self) -> int:
        """Context-parallel size."""
        return self.config.parallel.context_parallel_size

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.config.parallel.batch_parallel_size(self.ranks)

    @cached_property
    def micro_batches(self) -> int:
        size = self.batch_ranks * self.config.training.micro_batch_size
        return self.config.global_batch_size(self.ranks) // size

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.config.global_batch_size(self.ranks) * self.config.seq_length

    def model_of(self, bucket_bytes: int) -> Model:
        config = self._micro_batch.config
        model = replace(config.model, recompute_granularity="none")
        training = replace(config.training, micro_batch_size=1, global_batch_size=None)
        config = replace(config, model=model, training=training)  # so more calls are equal
        stages, place = self.pipeline.ranks, None
        if stages > 1:
            place = 0 if self.rank == 0 else LAST if self.has_head else MIDDLE
        return model_of(
            config,
            self.precision,
            zero_stage=self.stage,
            copies=self.copies,
            stages=stages,
            place=place,
            layers=self.layers,
            bucket_bytes=bucket_bytes,
        )

    @cached_property
    def model(self) -> Model:
        return self.model_of(BUCKET_BYTES)

    @cached_property
    def trace(self) -> Trace:
        """Trace of a micro-batch."""
        return _trace(self._micro_batch)

    @cached_property
    def _micro_batch(self) -> MicroBatch:
        config = replace(self.config, parallel=in_one_stage(self.config.parallel))
        return MicroBatch(
            config, self.precision, self.device, pipeline=self.pipeline, rank=self.rank
        )

    @cached_property
    def layer(self) -> Work:
        """Work of a micro-batch in one layer, forward and backward."""
        return layer_of(self._micro_batch)

    @property
    def layers(self) -> int:
        """Layers on this rank."""
        numbers = self.pipeline.numbers(self.rank)
        return self.config.model.num_layers if numbers is None else len(numbers)

    @property
    def has_head(self) -> bool:
        return self.rank == self.pipeline.ranks - 1

    @property
    def is_replayed(self) -> bool:
        """Whether a CUDA graph replays forwards and backwards, so that the host starts none."""
        if self.ranks > 1:
            return False
        settings = self.config.training.cuda_graph, self.config.model
        return choose_graph(*settings, serial_mesh(self.device), DTYPES[self.precision])

    @property
    def message(self) -> int:
        """Bytes of a message between stages."""
        return self.trace.message

    @property
    def idle_share(self) -> float:
        """Time in which a rank waits, over the time of its micro-batches."""
        plan = self.pipeline
        if plan.kind not in KINDS:
            return self.facts.idle_share
        return idle_share(plan.kind, plan.ranks, self.micro_batches, plan.virtual)

    @cached_property
    def facts(self) -> Facts:
        """Properties that are proved of the pipeline's schedule."""
        return _facts(self.lists, self.pipeline.virtual)

    @property
    def lists(self) -> Lists:
        return self.pipeline.lists(self.micro_batches)

    @property
    def activations(self) -> int:
        """Peak bytes of the activations of the micro-batches in flight."""
        found, ranks = self.trace, self.pipeline.ranks
        if ranks == 1:
            return found.kept
        pairs = zip(found.kept_by_stage, found.owed_by_stage, strict=True)
        changes = [
            {"forward": kept, "backward": -kept}
            | {"backward_input": owed - kept, "backward_weight": -owed}
            for kept, owed in pairs
        ]
        actions = self.lists[self.rank]
        return max(accumulate(changes[each.stage // ranks][each.direction] for each in actions))

    @property
    def messages(self) -> int:
        """Bytes of messages that are sent and may not be freed yet."""
        plan = self.pipeline
        own = range(self.rank, plan.stages, plan.ranks)
        near = {each for stage in own for each in (stage - 1, stage + 1)} & {*range(plan.stages)}
        peers = {stage % plan.ranks for stage in near} - {self.rank}
        return SENDS * len(peers) * self.trace.message

    @cached_property
    def work(self) -> Mapping[str, Work]:
        """Work of the micro-batches of a step, by phase."""
        found = self.trace.work.items()
        return {phase: Work().plus(each, self.micro_batches) for phase, each in found}

    @cached_property
    def reductions(self) -> list[tuple[float, Call]]:
        """(fraction as in Model.buckets, call) of each sum of gradients: all-reduces; under ZeRO a
        reduce-scatter over the ranks that share the bucket, and all-reduces of this rank's part."""
        return [
            (ready, Call(axis.name, bucket.size * self.wide, 1))
            if axis is bucket.shared
            else (ready, Call(axis.name, bucket.own * self.wide, 2))
            for ready, bucket in self.model.buckets
            for axis in bucket.axes
        ]

    @property
    def backwards(self) -> int:
        """Backwards of a step that reduce-scatter, or all-reduce over the data axis, gradients."""
        return self.micro_batches if self.stage >= 2 else 1

    @property
    def layer_gathers(self) -> dict[str, list[list[Call]]]:
        """Gathers of each layer's weights in ZeRO stage 3, in the order in which a micro-batch uses
        them, by phase. The last layer's weights stay for the backward."""
        layers = [[*self._gathers(each)] for each in self.model.layers]
        return {"forward": layers, "backward": layers[-2::-1]}

    @property
    def gathers(self) -> tuple[str, list[Call]]:
        """(phase, calls) of the gathers of weights once per step: before stage 3 of all weights,
        after the update; in stage 3 of those outside layers, before the first forward."""
        rest = (bucket for _, bucket in self.model.buckets if not bucket.is_of_layer)
        return "forward" if self.stage == 3 else "update", [*self._gathers(rest)]

    def _gathers(self, buckets: Iterable[PlannedBucket]) -> Iterator[Call]:
        for bucket in buckets:
            if bucket.shared.size > 1:
                yield Call(bucket.shared.name, bucket.size * self.width, 1)

    @property
    def is_offloaded(self) -> bool:
        """Whether masters and moments are on the host."""
        return self.config.optimizer.optimizer_cpu_offload

    @property
    def updated(self) -> int:
        """Bytes that norm and optimizer move on the device."""
        numbers = self.part if self.stage else self.model.local
        if self.is_offloaded:
            return numbers * self.wide
        return numbers * (WIDE_PASSES * self.wide + NARROW_PASSES * self.width)

    @property
    def offloaded(self) -> tuple[int, int, int]:
        """With the optimizer on the host, bytes of a step: of gradients that go there; that the
        update moves there; of weights that come back, in ZeRO stage 3 whenever they are gathered.
        """
        if not self.is_offloaded:
            return 0, 0, 0
        numbers = back = self.part
        if self.stage == 3:
            layers = [sum(bucket.own for bucket in each) for each in self.model.layers]
            back += self.micro_batches * (2 * sum(layers) - layers[-1]) - sum(layers)
        moved = (WIDE_PASSES - 1) * self.wide + NARROW_PASSES * self.width
        return numbers * self.wide, numbers * moved, back * self.width

    @property
    def on_host(self) -> int:
        """Bytes on the host: masters, moments, a copy of the gradients, and rounded weights."""
        each = (2 + self.moments) * self.wide + self.width * (self.width < self.wide)
        return self.part * each * self.is_offloaded

    @property
    def calls(self) -> dict[str, Counter[Call]]:
        """All collectives of a step, by phase."""
        found = {phase: Counter(each.calls) for phase, each in self.work.items()}
        for _, call in self.reductions:
            found["backward"][call] += self.backwards if call.axis == self.model.replicas else 1
        for phase, layers in self.layer_gathers.items():
            for call in chain(*layers):
                found[phase][call] += self.micro_batches
        phase, once = self.gathers
        if once:
            found.setdefault(phase, Counter()).update(once)
        return {**found, "agreement": self.model.agreement}

    def sent(self, axis: str) -> int:
        """Bytes that a rank sends along the axis in a step."""
        calls = sum(self.calls.values(), Counter[Call]())
        ranks = self.model.rings[axis].ranks
        return sum(n * call.sent(ranks) for call, n in calls.items() if call.axis == axis)

    @cached_property
    def part(self) -> int:
        """Number of elements of the buckets that this rank updates, padding included."""
        return sum(bucket.own for _, bucket in self.model.buckets)

    @cached_property
    def lasting(self) -> dict[str, int]:
        """Bytes that are allocated throughout, by kind."""
        stage, buckets = self.stage, [bucket for _, bucket in self.model.buckets]
        part = self.wide * self.part
        state = 0 if self.is_offloaded else part
        return {
            "weights": 0 if stage == 3 else self.width * self.model.local,
            "gradients": part if stage >= 2 else self.wide * sum(each.size for each in buckets),
            "masters": state if stage == 3 or self.width < self.wide else 0,
            "moments": self.moments * state,
        }

    @property
    def moments(self) -> int:
        """Numbers of the optimizer's state for each one that it updates; an optimizer of one's own,
        or one that keeps fewer for a matrix, counts as AdamW."""
        optimizer = self.config.optimizer
        if optimizer.optimizer == "sgd":
            return int(optimizer.sgd_momentum > 0)
        return 1 if optimizer.optimizer in ("adagrad", "rmsprop") else 2

    @property
    def in_flight(self) -> int:
        """Bytes that ZeRO's buckets add to the peak, from stage 2 on: whole gradients with the sums
        that arrive; in stage 3 also weights of the layers that run, and those outside layers."""
        if self.stage < 2:
            return 0
        found, layer, rest = self.trace, 0, 0
        if self.stage == 3:
            layers = self.width * sum(bucket.size for each in self.model.layers for bucket in each)
            rest = self.width * sum(bucket.size for _, bucket in self.model.buckets) - layers
            layer = layers // max(1, len(self.model.layers))
        is_repeated, wide = self.micro_batches > 1, self.wide
        (_, before, begun), *gradients = self.model.whole_gradients(is_repeated=is_repeated)
        peaks = [layer + found.logits + wide * before, layer + found.head + wide * begun]
        peaks.append(2 * layer + found.by_gradient[START] + wide * begun)
        for each, *whole in gradients:
            # The trace has two layers: at the first one the last one is over.
            name, freed = each.parameter.name, (self.layers - 2) * (each.ready > 0)
            if each.layer:
                name, freed = NUMBER.sub("1", name, 1), self.layers - 1 - each.layer
            held = 2 * layer * (each.layer is not None or not each.ready)
            held -= freed * found.kept_of_layer
            for is_added, size in enumerate(whole):
                if (peak := found.by_gradient.get((name, bool(is_added)))) is not None:
                    peaks.append(held + peak + wide * size)
        return rest + max(peaks) - max(found.logits, found.one_layer)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, and their peak as "total"."""
        found, kept = self.trace, {**self.lasting, "activations": self.activations}
        if self.pipeline.stages > 1:
            kept["messages"] = self.messages
        if self.stage >= 2:
            kept["in_flight"] = self.in_flight
        total = sum(kept.values()) + max(found.logits, found.one_layer)
        return {**kept, "logits": found.logits, "one_layer": found.one_layer, "total": total}

    @cached_property
    def flops(self) -> int:
        """FLOPs of a step on all ranks, as MFU counts them: without recomputation and padding, with
        all of attention."""
        return self._flops(is_executed=False)

    @cached_property
    def executed_flops(self) -> int:
        """The same with recomputation and padding, as the authors count TFLOP/s."""
        return self._flops(is_executed=True)

    def _flops(self, *, is_executed: bool) -> int:
        """Counts a whole model on one rank, which does the work of all ranks of a micro-batch."""
        model, parallel = self.config.model, self.config.parallel
        changes: dict[str, Any] = {} if is_executed else {"recompute_granularity": "none"}
        if not is_executed and model.attends_by_flex("cuda"):
            changes["attention_dropout_rng"] = "kernel"  # which calls attention once
        if (multiple := getattr(model, "make_vocab_size_divisible_by", None)) is not None:
            shards = self.tensor // parallel.tensor_parallel_depth  # of the word embedding
            padded = multiple * shards if is_executed else 1
            changes["make_vocab_size_divisible_by"] = padded
        config = replace(
            self.config,
            model=replace(model, **changes),
            parallel=replace(parallel, **ONE_RANK),  # type: ignore[arg-type]
        )
        found = trace_of_depth(MicroBatch(config, self.precision, "cuda", not is_executed))
        matmuls = sum((work.matmuls for work in found.work.values()), Counter[Matmul]())
        of_group = sum(times * each.flops for each, times in matmuls.items() if not each.again)
        return of_group * self.micro_batches * self.batch_ranks
