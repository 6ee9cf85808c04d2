"""Time of a step: the times of its kernels and its collectives, one after another.

    matmuls             max(FLOPs / peak, bytes / memory bandwidth) of each, where the last wave of
                        tiles may not fill the device
    other kernels       bytes / memory bandwidth
    tensor parallelism  collectives, which hide behind the matmuls between their start and the wait
    context parallelism the same. An all-to-all takes as long as a gather of as many bytes; messages
                        round a ring that travel beside the same matmuls share the link
    data parallelism    sums of gradients, which may hide behind the backward; in 2.5D also those
                        over its depth. Under ZeRO also gathers of weights: after the update nothing
                        hides them; in stage 3 those of a layer hide behind the previous layer,
                        except those of the first one
    offload             gradients arrive on the host, and weights leave it, beside its update of
                        others, and nothing else runs; in ZeRO stage 3 weights leave it as layers
                        need them, and hide behind nothing
    host                what a layer takes beyond its kernels: it cannot be faster than the host
                        starts them (layer_floor) unless a CUDA graph replays them, and has
                        overheads that were fitted. A measured layer takes as long as it did: the
                        host is the rest, beside derived kernels
    pipeline            the slowest rank's time of m micro-batches, with two messages for each
                        virtual stage; and the bubble, its wait for the first micro-batch and for
                        the last one: the schedule's idle share of the time of the other ranks

Peak and memory bandwidth are those of the datasheet times `attained_share`. The time of a
collective is that of its ring (hardware.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil, log2
from typing import Any

from megatron.parallel.schedules import DURATIONS, simulate
from tools.layouts.work import Call, Matmul, Work
from tools.plan.buckets import OF_STAGES
from tools.plan.hardware import Hardware, Ring
from tools.plan.layers import Layer
from tools.plan.trace import Step

# Rows of a matrix begin at multiples of 16 bytes, or tensor cores are slow (NVIDIA Matrix
# Multiplication Background User's Guide, section 3).
ALIGNED = 16


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step, by the keys of a plan's JSON. The total leaves out hidden ones."""

    matrix_products: float = 0.0
    other_kernels: float = 0.0
    tensor_parallel_exposed: float = 0.0
    tensor_parallel_hidden: float = 0.0
    data_parallel_exposed: float = 0.0
    data_parallel_hidden: float = 0.0
    pipeline_parallel_exposed: float = 0.0  # messages, and gradient sums of tied parameters
    pipeline_bubble: float = 0.0
    context_parallel_exposed: float = 0.0
    context_parallel_hidden: float = 0.0
    offload: float = 0.0  # copies to the host and back, and its update
    host: float = 0.0  # beyond kernels; below 0 where an anchor is faster than they are

    @property
    def total(self) -> float:
        return sum(value for part, value in vars(self).items() if "hidden" not in part)


def predict(step: Step, hardware: Hardware) -> Seconds:
    """Seconds of the slowest rank along the pipeline axis."""
    found = [_of_rank(each, hardware) for each in step.stages]
    seconds, busy = max(found, key=lambda each: each[1])
    if step.pipeline.ranks == 1:
        return seconds
    each_message = step.model.rings["pipeline"].message(step.message, hardware)
    messages = 2 * step.pipeline.virtual * step.micro_batches * each_message
    of_all = sum(time for _, time in found)
    bubble = step.idle_share * ((of_all - busy) / (len(found) - 1) + messages)
    if hardware.shares_cores(step.ranks):  # ranks with more work go on with the cores of others
        mean = of_all / len(found)
        bubble = mean - busy + idle_on_shared_cores(step, hardware) * (mean + messages)
    return replace(
        seconds,
        pipeline_parallel_exposed=seconds.pipeline_parallel_exposed + messages,
        pipeline_bubble=bubble,
    )


def idle_on_shared_cores(step: Step, hardware: Hardware) -> float:
    """`Step.idle_share` where N processes share c cores: others run faster while a rank waits. A
    moment in which n are busy lasts max(n, c) / N as long as one in which all are."""
    each = step.ranks // step.pipeline.ranks  # processes that do the same
    changes = Counter[int]()
    for starts, actions in zip(simulate(step.lists), step.lists, strict=True):
        for start, action in zip(starts, actions, strict=True):
            changes[start] += each
            changes[start + DURATIONS[action.direction]] -= each
    taken, busy = 0.0, 0
    for start, end in pairwise(sorted(changes)):
        busy += changes[start]
        taken += (end - start) * max(busy, hardware.concurrent_devices) / step.ranks
    return taken / sum(DURATIONS[action.direction] for action in step.lists[0]) - 1


def _kernels(step: Step, hardware: Hardware) -> tuple[dict[str, float], float, float]:
    """(seconds of a rank's kernels and of its collectives but those of gradients and weights, by
    the names in Seconds; those of a micro-batch's forward; and of its backward)"""
    found, forward, backward = defaultdict[str, float](float), 0.0, 0.0
    for phase, work in step.work.items():
        products = sum(
            times * matmul_seconds(each, hardware, step.precision)
            for each, times in work.matmuls.items()
        )
        passes, waiting = work.moved / hardware.moved_per_second, 0.0
        found["matrix_products"] += products
        found["other_kernels"] += passes
        for axis, waits, beside in _collectives(step, work, hardware):
            name = "context" if axis == "context" else "tensor"
            found[f"{name}_parallel_exposed"] += waits
            found[f"{name}_parallel_hidden"] += beside
            waiting += waits
        taken = (products + passes + waiting) / step.micro_batches
        if phase == "forward":
            forward += taken
        else:
            backward += taken
    return found, forward, backward


def _of_rank(step: Step, hardware: Hardware) -> tuple[Seconds, float]:
    """(seconds of one rank, without its waits along the pipeline axis; those of the micro-batches
    among them)."""
    found, forward, backward = _kernels(step, hardware)
    of_kernels = forward + backward
    if (measured := hardware.measured(step)) is None:
        host = host_seconds(step, hardware)
    else:
        edge, share = _edge(step, measured, hardware), 1 / 3
        if measured.edge:
            share = (measured.edge_forward or 0.0) / measured.edge
        forward = step.layers * measured.forward + share * edge
        backward = step.layers * measured.backward + (1 - share) * edge
        host = forward + backward - of_kernels
    for _, call in step.reductions:
        if call.axis != step.model.replicas:  # of parameters that stages or ranks of a model share
            name = "pipeline" if call.axis in OF_STAGES else "tensor"
            found[f"{name}_parallel_exposed"] += call_seconds(step, call, hardware)
    exposed, hidden = _data_parallel(step, hardware, forward, backward)
    found["other_kernels"] += step.updated / (
        hardware.optimizer_bandwidth or hardware.moved_per_second
    )
    seconds = Seconds(
        **found,
        data_parallel_exposed=exposed,
        data_parallel_hidden=hidden,
        offload=offload_seconds(step, hardware),
        host=step.micro_batches * host + hardware.step_overhead,
    )
    return seconds, step.micro_batches * (of_kernels + host)


def _edge(step: Step, measured: Layer, hardware: Hardware) -> float:
    """Seconds of a micro-batch outside the layers of this rank: the measured ones, of which the
    stages before the last have what is derived for their embedding."""

    def derived(rank: Step) -> float:
        _, forward, backward = _kernels(rank, hardware)
        return max(0.0, forward + backward - rank.layers * _of_layer(rank, hardware)[0])

    if measured.edge is None:
        return derived(step) + hardware.head_overhead * step.has_head
    if not step.has_head:
        return derived(step)
    others = (derived(each) for each in step.stages if each.rank != step.rank)
    return max(0.0, measured.edge - sum(others))


def host_seconds(step: Step, hardware: Hardware) -> float:
    """Seconds of a micro-batch that the kernels and collectives of a rank do not explain."""
    head = hardware.head_overhead * step.has_head
    if not any(_overheads(step, hardware)):
        return head
    return step.layers * _of_layer(step, hardware)[1] + head


def layer_seconds(step: Step, hardware: Hardware) -> float:
    """Derived seconds of a micro-batch in a layer, forward and backward."""
    return sum(_of_layer(step, hardware))


def _of_layer(step: Step, hardware: Hardware) -> tuple[float, float]:
    """(seconds of the kernels and collectives of a layer; what the host adds). A layer takes at
    least as long as the host needs to start its kernels, and has an overhead of its own."""
    work, precision = step.layer, step.precision
    kernels = work.moved / hardware.moved_per_second
    kernels += sum(
        n * matmul_seconds(each, hardware, precision) for each, n in work.matmuls.items()
    )
    calls = sum(waits for _, waits, _ in _collectives(step, work, hardware))
    overhead, floor = _overheads(step, hardware)
    return kernels + calls, max(overhead, floor - kernels)


def offload_seconds(step: Step, hardware: Hardware) -> float:
    """Seconds of a step in which the optimizer on the host works, or is waited for."""
    if not step.is_offloaded:
        return 0.0
    there, moved, back = step.offloaded
    sent, returned = there / hardware.host_bandwidth, back / hardware.host_bandwidth
    update = max(sent, moved / hardware.host_memory_bandwidth)
    return update + returned if step.stage == 3 else max(update, returned)


def _overheads(step: Step, hardware: Hardware) -> tuple[float, float]:
    """(overhead of a layer, time that the host needs to start its kernels)"""
    overhead = hardware.layer_overhead + hardware.tensor_overhead * log2(step.tensor)
    floor = hardware.layer_floor + hardware.unfused_floor * (not step.is_softmax_fused)
    return overhead, floor * (not step.is_replayed)


def call_seconds(step: Step, call: Call, hardware: Hardware, kind: str = "all_gather") -> float:
    """Seconds of a collective with nothing beside it. kind: see Ring.seconds."""
    ring, hardware = _ring_of(step, call.axis, hardware)
    if not call.passes:
        return ring.shift(call.bytes, hardware)
    options: Any = {"is_rooted": call.is_rooted, "kind": kind}
    return ring.seconds(call.bytes, hardware, call.passes, **options)


def _ring_of(step: Step, axis: str, hardware: Hardware) -> tuple[Ring, Hardware]:
    """The ring of an axis, and the hardware with the share of the network that its calls attain."""
    ring, share = step.model.rings[axis], hardware.tensor_network_share
    if axis == "tensor" and share is not None and ring.inside(hardware) < ring.ranks:
        hardware = replace(hardware, network_share=share)
    return ring, hardware


def matmul_seconds(matmul: Matmul, hardware: Hardware, precision: str) -> float:
    """precision: of the step; its matmuls in fp32 use the peak of fp32."""
    peak = hardware.peak("fp32" if matmul.width >= 4 else precision)
    if matmul.fused:  # the reads and writes of such a kernel count with the other kernels
        return matmul.flops * matmul.share / (peak * hardware.attained_share)
    share = hardware.attained_share
    if hardware.unaligned_share is not None and any(
        each * matmul.width % ALIGNED for each in (matmul.m, matmul.k, matmul.n)
    ):
        share = hardware.unaligned_share
    computing = matmul.flops / (peak * share * filled(matmul, hardware))
    return max(computing, matmul.bytes / hardware.moved_per_second)


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


def _collectives(step: Step, work: Work, hardware: Hardware) -> Iterator[tuple[str, float, float]]:
    """(axis, exposed, hidden seconds) of the calls of a phase. A hidden one takes memory bandwidth
    from the matmuls beside it; that time is exposed."""
    # Messages beside the same matmuls share the link, and so the time in which they are hidden.
    together = defaultdict[tuple[Any, ...], list[tuple[int, float]]](list)
    for call, times in work.calls.items():
        if call.axis in OF_STAGES:
            continue  # a message between stages: see predict
        collective, seconds = call if call.passes else None, call_seconds(step, call, hardware)
        together[call.axis, call.beside, collective].append((times, seconds))
    for (axis, beside, _), calls in together.items():
        ring, attained = _ring_of(step, axis, hardware)
        window = sum(matmul_seconds(each, hardware, step.precision) for each in beside)
        taken = sum(times * seconds for times, seconds in calls)
        hidden = min(taken, window * max(times for times, _ in calls))
        slowed = ring.slowed(hidden * ring.bandwidth(attained), hardware) if hidden else 0.0
        yield axis, taken - hidden + slowed, hidden


def _data_parallel(
    step: Step, hardware: Hardware, forward: float, backward: float
) -> tuple[float, float]:
    """(exposed, hidden) seconds of gradients and weights over the replicas of the model. forward,
    backward: seconds of one micro-batch."""
    layers, (_, once), replicas = step.layer_gathers, step.gathers, step.model.replicas
    depth, (first, *others) = max(1, len(layers["forward"])), layers["forward"] or [[]]
    alone = [*once, *step.micro_batches * first]
    seconds: Timed = cache(lambda *call: call_seconds(step, call[0], hardware, *call[1:]))
    ring = step.model.rings[replicas]

    def ahead(layers: Iterable[Iterable[Call]], each: float) -> Iterator[Started]:
        """Each starts when the previous layer begins; a layer takes `each` seconds."""
        for place, calls in enumerate(layers):
            yield from ((place * each, call, "all_gather") for call in calls)

    window = forward * (depth - 1) / depth  # the last layer has no gather beside it
    there = _beside(ring, hardware, seconds, window, ahead(others, forward / depth))
    sums = [
        (share * backward, call, "reduce_scatter")
        for share, call in step.reductions
        if call.axis == replicas
    ]
    back = [*sums, *ahead(layers["backward"], backward / depth)]
    last = _beside(ring, hardware, seconds, backward, back)
    exposed, hidden = sum(map(seconds, alone)), 0.0
    for times, found in ((step.micro_batches, there), (step.backwards, last)):
        exposed, hidden = exposed + times * found[0], hidden + times * found[1]
    return exposed, hidden


Started = tuple[float, Call, str]
"""When a collective starts, and its kind."""
Timed = Callable[..., float]
"""`call_seconds` of a call and its kind: many of a step are equal."""


def _beside(
    ring: Ring, hardware: Hardware, seconds: Timed, window: float, started: Iterable[Started]
) -> tuple[float, float]:
    """(exposed, hidden) seconds of calls over the replicas, started at these seconds of a
    computation that takes `window` seconds; hidden calls share its memory bandwidth. Calls run one
    after another; a wait for a call in between is not modelled by itself. On a CPU they take the
    cores that compute, so that nothing hides."""
    end = busy = sent = 0.0
    for start, call, kind in sorted(started):
        taken = seconds(call, kind)
        end, busy = max(start, end) + taken, busy + taken
        sent += call.passes * (ring.ranks - 1) / ring.ranks * call.bytes
    exposed = busy if hardware.is_cpu else max(0.0, end - window)
    if exposed >= busy:
        return exposed, 0.0
    hidden = busy - exposed
    return exposed + ring.slowed(sent * hidden / busy, hardware), hidden
