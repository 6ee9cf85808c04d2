"""How long a step takes: what its kernels and its all-reduces take, one after another.

    matrix products     max(FLOPs / peak, bytes / memory bandwidth) of each, where the last wave of
                        tiles does not fill the device
    other kernels       bytes / memory bandwidth
    tensor parallelism  all-reduces of [n, h]; f's may hide behind the weight gradient beside it
    data parallelism    all-reduces of gradients, which may hide behind the backward

Peak and memory bandwidth are those of the datasheet times `attained_share`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from tools.planning import communication, products
from tools.planning.hardware import Hardware
from tools.planning.links import RING_PASSES, data_ring, tensor_ring
from tools.planning.parameters import Parameter, buckets, table
from tools.planning.products import Product
from tools.planning.shape import Shape
from tools.planning.software import Software


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a step. What is hidden is not part of the total."""

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


def predict(shape: Shape, software: Software, hardware: Hardware, precision: str) -> Seconds:
    peak = hardware.peak(precision)
    phases = _phases(shape, software)
    bandwidth = hardware.memory_bandwidth * hardware.attained_share
    matrix = {
        phase: sum(_product_seconds(each, shape, hardware, peak) for each in found)
        for phase, (found, _) in phases.items()
    }
    other = {phase: moved / bandwidth for phase, (_, moved) in phases.items()}
    tensor = {phase: _tensor_seconds(shape, software, hardware, phase) for phase in phases}
    hidden_f = _hidden_f(shape, hardware, peak) if software.overlaps_f else 0.0
    slowed = _slowed(hidden_f * tensor_ring(shape).bandwidth(hardware), shape.tensor, bandwidth)
    tensor["backward"] += slowed - hidden_f
    behind = ("recomputation", "backward")
    window = sum(matrix[p] + other[p] + tensor[p] for p in behind) / shape.micro_batches
    exposed, hidden = _data_seconds(shape, software, hardware, window)
    return Seconds(
        matrix_products=sum(matrix.values()),
        other_kernels=sum(other.values()) + software.parameter_bytes(shape) / bandwidth,
        tensor_parallel_exposed=sum(tensor.values()),
        tensor_parallel_hidden=hidden_f,
        data_parallel_exposed=exposed,
        data_parallel_hidden=hidden,
    )


def _phases(shape: Shape, software: Software) -> dict[str, tuple[list[Product], float]]:
    """(matrix products, bytes of the other kernels) of a step's micro-batches, by phase."""
    m = shape.micro_batches
    weights = [*products.linear(shape), *products.heads(shape)]
    core = list(products.attention(shape))
    again = products.forward_again(shape) if software.keeps_scores else []
    if software.keeps_scores:
        forward = [*weights, *core]
        backward = [each for product in forward for each in products.backward(product)]
    else:
        forward = [*weights, *_fused(core, shape, 1)]
        backward = [each for product in weights for each in products.backward(product)]
        backward += _fused(core, shape, 2.5)  # the scores are computed once more
        again = _fused_again(shape, core)
    layers, repeats = software.forward_bytes(shape), shape.recompute == "full"
    outside = software.outside_bytes(shape)
    return {
        "forward": (forward, m * (layers + outside / 2)),
        "recomputation": (again, m * layers * repeats),
        "backward": (backward, m * (software.backward_bytes(shape) + outside / 2)),
    }


def _fused(core: Iterable[Product], shape: Shape, times: float) -> list[Product]:
    """Attention's products in one kernel, which reads and writes what the traffic counts."""
    causal = 0.5 if shape.kind == "gpt2" else 1.0
    return [
        Product(f"{each.name}{FUSED}", each.batch, each.m, each.k, each.n,
                each.times * times * causal)
        for each in core
    ]  # fmt: skip


FUSED = ", fused"


def _fused_again(shape: Shape, core: list[Product]) -> list[Product]:
    weights = list(products.linear(shape)) if shape.recompute == "full" else []
    return [] if shape.recompute == "none" else [*weights, *_fused(core, shape, 1)]


def _product_seconds(product: Product, shape: Shape, hardware: Hardware, peak: float) -> float:
    share = hardware.attained_share
    if product.name.endswith(FUSED):
        return product.flops / (peak * share)
    moved = product.numbers * product.times * shape.width
    computing = product.flops / (peak * filled(product, hardware))
    return max(computing, moved / hardware.memory_bandwidth) / share


def filled(product: Product, hardware: Hardware) -> float:
    """Share of the multiprocessors' time that computes the result: its tiles, of which those at the
    edges reach beyond it, come in waves, of which the last one leaves multiprocessors idle."""
    if not hardware.multiprocessors:
        return 1.0
    return max(_filled(product, hardware.multiprocessors, *hardware.tile[::turn])
               for turn in (1, -1))  # fmt: skip


def _filled(product: Product, multiprocessors: int, rows: int, columns: int) -> float:
    tiles = product.batch * ceil(product.m / rows) * ceil(product.n / columns)
    waves = ceil(tiles / multiprocessors)
    return product.batch * product.m * product.n / (waves * multiprocessors * rows * columns)


def _tensor_seconds(shape: Shape, software: Software, hardware: Hardware, phase: str) -> float:
    ring = tensor_ring(shape)
    return sum(
        call.times * ring.seconds(call.bytes, hardware)
        for call in communication.tensor_calls(shape, software)
        if call.phase == phase
    )


def _hidden_f(shape: Shape, hardware: Hardware, peak: float) -> float:
    """Seconds of f's all-reduces in the layers' backward that hide behind weight gradients."""
    call = tensor_ring(shape).seconds(shape.tokens * shape.hidden * shape.width, hardware)
    weights = (
        gradient
        for product in products.linear(shape)
        if product.name in ("qkv", "up")
        for gradient in products.backward(product)
        if gradient.name.endswith("weight")
    )
    return sum(
        min(call * each.times, _product_seconds(each, shape, hardware, peak)) for each in weights
    )


def _slowed(sent: float, ranks: int, bandwidth: float) -> float:
    """Seconds that hidden all-reduces, which sent so many bytes, keep memory from the kernels."""
    return RING_PASSES * sent * ranks / (2 * (ranks - 1)) / bandwidth if ranks > 1 else 0.0


def _data_seconds(
    shape: Shape, software: Software, hardware: Hardware, window: float
) -> tuple[float, float]:
    """(exposed, hidden) of the gradients' all-reduces; window: seconds of the last backward.

    What is hidden still takes memory bandwidth from the backward, which is exposed.
    """
    ring, width = data_ring(shape), software.gradient_bytes
    found = buckets(table(shape), software.bucket_bytes // width)
    end, busy, moved = 0.0 if software.overlaps else window, 0.0, 0.0
    for ready, size in sorted(_ready(found, shape, window, width)):
        taken = ring.seconds(size, hardware)
        end, busy, moved = max(ready, end) + taken, busy + taken, moved + size
    exposed = max(0.0, end - window)
    if exposed >= busy:
        return exposed, 0.0
    hidden, sent = busy - exposed, 2 * (ring.ranks - 1) / ring.ranks * moved
    bandwidth = hardware.memory_bandwidth * hardware.attained_share
    return exposed + _slowed(sent * hidden / busy, ring.ranks, bandwidth), hidden


def _ready(
    found: list[list[Parameter]], shape: Shape, window: float, width: int
) -> Iterator[tuple[float, int]]:
    """(second of the backward at which its last gradient is there, bytes) of each bucket."""
    for bucket in found:
        ready = max(_reached(each, shape.layers) for each in bucket)
        yield ready * window, sum(each.local for each in bucket) * width


def _reached(parameter: Parameter, layers: int) -> float:
    """Share of the backward after which a parameter's gradient is there."""
    if layer := re.search(r"layers\.(\d+)\.", parameter.name):
        return 1 - int(layer[1]) / layers
    return 1.0 if "_embedding" in parameter.name else 0.0
