"""How long a step takes: what its kernels and its collectives take, one after another.

    matmuls             max(FLOPs / peak, bytes / memory bandwidth) of each, where the last wave of
                        tiles does not fill the device
    other kernels       bytes / memory bandwidth
    tensor parallelism  collectives, which hide behind the matmuls between their start and the wait
    data parallelism    all-reduces of gradients, which may hide behind the backward

Peak and memory bandwidth are those of the datasheet times `attained_share`. A collective takes
what its ring takes (hardware.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tools.layouts.work import Matmul, Work
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

    @property
    def total(self) -> float:
        parallel = self.tensor_parallel_exposed + self.data_parallel_exposed
        return self.matrix_products + self.other_kernels + parallel


def predict(step: Step, hardware: Hardware) -> Seconds:
    bandwidth = hardware.memory_bandwidth * hardware.attained_share
    matmuls = exposed = hidden = backward = 0.0
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
        if phase != "forward":
            backward += (computing + moving + waiting) / step.micro_batches
    for _, axis, size in step.reductions:
        if axis != "data":  # of what every rank of a model has
            exposed += step.model.rings[axis].seconds(size, hardware)
    return Seconds(matmuls, other, exposed, hidden, *_reductions(step, hardware, backward))


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
        ring = step.model.rings[call.axis]
        taken = ring.seconds(call.bytes, hardware, call.passes)
        beside = sum(matmul_seconds(each, hardware, step.precision) for each in call.beside)
        if covered := min(taken, beside):
            hidden += times * covered
            exposed += times * ring.slowed(covered * ring.bandwidth(hardware), hardware)
        exposed += times * (taken - covered)
    return exposed, hidden


def _reductions(step: Step, hardware: Hardware, window: float) -> tuple[float, float]:
    """(exposed, hidden) of the data-parallel all-reduces; window: seconds of the last backward,
    whose memory bandwidth the hidden ones share."""
    ring = step.model.rings["data"]
    ready = [(share * window, size) for share, axis, size in step.reductions if axis == "data"]
    end = busy = moved = 0.0
    for start, size in sorted(ready):
        taken = ring.seconds(size, hardware)
        end, busy, moved = max(start, end) + taken, busy + taken, moved + size
    exposed = max(0.0, end - window)
    if exposed >= busy:
        return exposed, 0.0
    hidden, sent = busy - exposed, 2 * (ring.ranks - 1) / ring.ranks * moved
    return exposed + ring.slowed(sent * hidden / busy, hardware), hidden
