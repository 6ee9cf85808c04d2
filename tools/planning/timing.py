"""How long a step takes: what its kernels and its collectives take, one after another.

    matmuls             max(FLOPs / peak, bytes / memory bandwidth) of each, where the last wave of
                        tiles does not fill the device
    other kernels       bytes / memory bandwidth
    tensor parallelism  collectives, which hide behind the matmuls between their start and the wait
    data parallelism    sums of gradients, which may hide behind the backward; in 2.5D those over
                        its depth, too. Under ZeRO gathers of weights too: behind the update
                        nothing hides them; in stage 3 those of a layer hide behind the layer
                        before, but for the first one
    pipeline            the slowest rank's time of m micro-batches, with two messages each way and
                        virtual stage; and the bubble, while it waits for the first micro-batch and
                        for the last one: the schedule's idle share of what other ranks take

Peak and memory bandwidth are those of the datasheet times `attained_share`. A collective takes
what its ring takes (hardware.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from tools.layouts.work import Call, Matmul, Work
from tools.planning.hardware import Hardware
from tools.planning.trace import Step


@dataclass(frozen=True)
class Seconds:
    """Of a step, by the keys of a plan's JSON. What is hidden is not part of the total."""

    matrix_products: float
    other_kernels: float
    tensor_parallel_exposed: float
    tensor_parallel_hidden: float
    data_parallel_exposed: float
    data_parallel_hidden: float
    pipeline_parallel_exposed: float = 0.0  # messages, and the sum of what stages have in common
    pipeline_bubble: float = 0.0

    @property
    def total(self) -> float:
        parallel = self.tensor_parallel_exposed + self.data_parallel_exposed
        pipeline = self.pipeline_parallel_exposed + self.pipeline_bubble
        return self.matrix_products + self.other_kernels + parallel + pipeline


def predict(step: Step, hardware: Hardware) -> Seconds:
    """Of the slowest rank along the pipeline axis."""
    found = [_of_rank(each, hardware) for each in step.stages]
    seconds, busy = max(found, key=lambda each: each[1])
    if step.pipeline.ranks == 1:
        return seconds
    each_message = step.model.rings["pipeline"].message(step.trace.message, hardware)
    messages = 2 * step.pipeline.virtual * step.micro_batches * each_message
    others = (sum(time for _, time in found) - busy) / (len(found) - 1)
    return replace(
        seconds,
        pipeline_parallel_exposed=seconds.pipeline_parallel_exposed + messages,
        pipeline_bubble=step.facts.idle_share * (others + messages),
    )


def _of_rank(step: Step, hardware: Hardware) -> tuple[Seconds, float]:
    """(of one rank, without what it waits for along the pipeline axis; seconds of the micro-batches
    in it)."""
    bandwidth = hardware.memory_bandwidth * hardware.attained_share
    matmuls = exposed = hidden = forward = backward = busy = 0.0
    other = step.updated / bandwidth
    for phase, work in step.work.items():
        computing = sum(
            times * matmul_seconds(each, hardware, step.precision)
            for each, times in work.matmuls.items()
        )
        moving = work.moved / bandwidth
        waiting, beside = _collectives(step, work, hardware)
        matmuls, other = matmuls + computing, other + moving
        exposed, hidden = exposed + waiting, hidden + beside
        busy += computing + moving + waiting
        if phase == "forward":
            forward = (computing + moving + waiting) / step.micro_batches
        else:
            backward += (computing + moving + waiting) / step.micro_batches
    sums = dict.fromkeys(("tensor", "stages"), 0.0)
    for _, call in step.reductions:
        if call.axis != step.model.replicas:  # of what every rank of a model has, or several stages
            name = "stages" if call.axis in step.model.of_stages else "tensor"
            sums[name] += call_seconds(step, call, hardware)
    found = matmuls, other, exposed + sums["tensor"], hidden
    data = _data_parallel(step, hardware, forward, backward)
    return Seconds(*found, *data, pipeline_parallel_exposed=sums["stages"]), busy


def call_seconds(step: Step, call: Call, hardware: Hardware) -> float:
    """Of a collective with nothing beside it."""
    ring = step.model.rings[call.axis]
    return ring.seconds(call.bytes, hardware, call.passes, is_rooted=call.is_rooted)


def matmul_seconds(matmul: Matmul, hardware: Hardware, precision: str) -> float:
    """precision: of the step; what it multiplies in fp32 is of fp32's peak."""
    peak = hardware.peak("fp32" if matmul.width >= 4 else precision)
    if matmul.fused:  # what such a kernel reads and writes is counted with the other kernels
        return matmul.flops * matmul.share / (peak * hardware.attained_share)
    computing = matmul.flops / (peak * filled(matmul, hardware))
    return max(computing, matmul.bytes / hardware.memory_bandwidth) / hardware.attained_share


def filled(matmul: Matmul, hardware: Hardware) -> float:
    """Share of the multiprocessors' time that computes the result. Tiles at the edges reach beyond
    it, and the last wave of tiles leaves some multiprocessors idle."""
    count, (height, width) = hardware.multiprocessors, hardware.tile
    if not count:
        return 1.0
    shares = []
    for rows, columns in ((height, width), (width, height)):
        tiles = matmul.batch * ceil(matmul.m / rows) * ceil(matmul.n / columns)
        computed = ceil(tiles / count) * count * rows * columns
        shares.append(matmul.batch * matmul.m * matmul.n / computed)
    return max(shares)


def _collectives(step: Step, work: Work, hardware: Hardware) -> tuple[float, float]:
    """(exposed, hidden) of a phase. What is hidden takes memory bandwidth from the matmuls beside
    it, which is exposed."""
    exposed = hidden = 0.0
    for call, times in work.calls.items():
        if not call.passes:
            continue  # a message: see predict
        ring, taken = step.model.rings[call.axis], call_seconds(step, call, hardware)
        beside = sum(matmul_seconds(each, hardware, step.precision) for each in call.beside)
        if covered := min(taken, beside):
            hidden += times * covered
            exposed += times * ring.slowed(covered * ring.bandwidth(hardware), hardware)
        exposed += times * (taken - covered)
    return exposed, hidden


def _data_parallel(
    step: Step, hardware: Hardware, forward: float, backward: float
) -> tuple[float, float]:
    """(exposed, hidden) of gradients and weights over the replicas of the model; forward, backward:
    seconds of one micro-batch."""
    layers, (_, once), replicas = step.layer_gathers, step.gathers, step.model.replicas
    depth, (first, *others) = max(1, len(layers["forward"])), layers["forward"] or [[]]
    alone = [*once, *step.micro_batches * first]

    def ahead(layers: Iterable[Iterable[Call]], each: float) -> Iterator[tuple[float, Call]]:
        """Each starts when the one before begins, which takes `each` seconds."""
        return ((place * each, call) for place, calls in enumerate(layers) for call in calls)

    window = forward * (depth - 1) / depth  # the last layer has no gather beside it
    there = _beside(step, hardware, window, ahead(others, forward / depth))
    sums = [(share * backward, call) for share, call in step.reductions if call.axis == replicas]
    back = [*sums, *ahead(layers["backward"], backward / depth)]
    last = _beside(step, hardware, backward, back)
    exposed, hidden = sum(call_seconds(step, each, hardware) for each in alone), 0.0
    for times, found in ((step.micro_batches, there), (step.backwards, last)):
        exposed, hidden = exposed + times * found[0], hidden + times * found[1]
    return exposed, hidden


def _beside(
    step: Step, hardware: Hardware, window: float, started: Iterable[tuple[float, Call]]
) -> tuple[float, float]:
    """(exposed, hidden) of calls over the replicas, which start at these seconds of what computes
    for `window` seconds, and whose memory bandwidth the hidden ones share. One follows another; who
    waits for one in between is not seen by itself."""
    ring = step.model.rings[step.model.replicas]
    end = busy = sent = 0.0
    for start, call in sorted(started):
        taken = call_seconds(step, call, hardware)
        end, busy = max(start, end) + taken, busy + taken
        sent += call.passes * (ring.ranks - 1) / ring.ranks * call.bytes
    exposed = max(0.0, end - window)
    if exposed >= busy:
        return exposed, 0.0
    hidden = busy - exposed
    return exposed + ring.slowed(sent * hidden / busy, hardware), hidden
