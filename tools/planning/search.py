"""Layouts of a model on so many devices: which can work, which fit, which is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2
from typing import Any

from megatron.config.checks import UsageError
from megatron.config.pretrain import PretrainConfig
from tools.planning.hardware import Hardware
from tools.planning.memory import GRANULARITIES, fits, memory
from tools.planning.products import model_flops
from tools.planning.shape import Shape, shape_of
from tools.planning.software import THIS_PROJECT
from tools.planning.timing import predict

MOST_SAMPLES = 64  # of a micro-batch that is tried


def check(config: PretrainConfig, gpus: int) -> None:
    """Raise UsageError, with the reason and the nearest layout that can, where this one cannot
    work on so many devices."""
    try:
        config.check(gpus)
    except UsageError as error:
        found = nearest(config, gpus)
        if found is None:
            if nearest(config, 1) is None:  # what is wrong has nothing to do with the layout
                raise
            fewer = next(each for each in range(gpus - 1, 0, -1) if nearest(config, each))
            allowed = f"a number of GPUs that some layout fits ({error})"
            raise UsageError("--gpus", gpus, allowed, works=("--gpus", str(fewer))) from error
        size, batch = found.parallel.tensor_model_parallel_size, found.training.micro_batch_size
        works = ("--tensor-model-parallel-size", str(size), "--micro-batch-size", str(batch))
        raise UsageError(
            error.flag, error.value, f"{error.allowed}; on {gpus} GPUs", works=works
        ) from error


def nearest(config: PretrainConfig, gpus: int) -> PretrainConfig | None:
    """The layout that can work with the fewest doublings of t, and then of the micro-batch."""
    size, batch = config.parallel.tensor_model_parallel_size, config.training.micro_batch_size

    def distance(found: PretrainConfig) -> tuple[float, float]:
        return (
            abs(log2(found.parallel.tensor_model_parallel_size / size)),
            abs(log2(found.training.micro_batch_size / batch)),
        )

    return min(layouts(config, gpus), key=distance, default=None)


def layouts(config: PretrainConfig, gpus: int) -> Iterator[PretrainConfig]:
    """The same training, cut in all ways that can work; the global batch stays what it is."""
    batches = {2**power for power in range(MOST_SAMPLES.bit_length())}
    for size in (each for each in range(1, gpus + 1) if gpus % each == 0):
        for batch in sorted(batches | {config.training.micro_batch_size}):
            found = replace(
                config,
                parallel=replace(config.parallel, tensor_model_parallel_size=size),
                training=replace(config.training, micro_batch_size=batch),
            )
            if _can_work(found, gpus):
                yield found


def _can_work(config: PretrainConfig, gpus: int) -> bool:
    try:
        config.check(gpus)
    except UsageError:
        return False
    return True


def search(
    config: PretrainConfig, gpus: int, hardware: Hardware, precision: str
) -> list[dict[str, Any]]:
    """The layouts that fit, the one with the most tokens a second first."""
    found = [
        _row(shape, hardware, precision)
        for shape in _shapes(config, gpus, precision)
        if fits(memory(shape, hardware)["total"], hardware)
    ]
    return sorted(found, key=lambda each: -each["tokens_per_second"])


def _shapes(config: PretrainConfig, gpus: int, precision: str) -> Iterator[Shape]:
    batch = config.global_batch_size(gpus)
    fixed = replace(config, training=replace(config.training, global_batch_size=batch))
    for found in layouts(fixed, gpus):
        shape = shape_of(found, gpus, precision)
        for granularity in GRANULARITIES:
            yield replace(shape, recompute=granularity)


def _row(shape: Shape, hardware: Hardware, precision: str) -> dict[str, Any]:
    seconds = predict(shape, THIS_PROJECT, hardware, precision).total
    return {
        "tensor": shape.tensor,
        "data": shape.data,
        "batch": shape.batch,
        "micro_batches": shape.micro_batches,
        "recompute": shape.recompute,
        "seconds": seconds,
        "tokens_per_second": shape.step_tokens / seconds,
        "mfu": model_flops(shape) / (seconds * shape.ranks * hardware.peak(precision)),
        "memory_bytes": memory(shape, hardware)["total"],
    }
