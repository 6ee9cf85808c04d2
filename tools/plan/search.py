"""Layouts of a model on a number of devices: which can work, which fit, which is fastest, and which
is nearest to one that does not fit. torch is imported only where a layout is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import log2
from typing import Any

from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError, flag, switch
from tools.plan.hardware import Hardware

GRANULARITIES = ("none", "selective", "full")
MOST_SAMPLES = 64  # of a micro-batch that is tried
MOST_DOUBLINGS = 10  # of the number of devices, if no layout fits
# Settings that a search varies: (the config that has it, its name in a row).
VARIED = {
    "tensor_model_parallel_size": ("parallel", "tensor"),
    "sequence_parallel": ("parallel", "sequence_parallel"),
    "micro_batch_size": ("training", "batch"),
    "recompute_granularity": ("model", "recompute"),
}
SIZES = ("tensor_model_parallel_size", "micro_batch_size")  # that `nearest` doubles
Row = dict[str, Any]


def varied(config: PretrainConfig, **values: Any) -> PretrainConfig:
    """The config with these values of VARIED."""
    for name, value in values.items():
        part, _ = VARIED[name]
        config = replace(config, **{part: replace(getattr(config, part), **{name: value})})
    return config


def settings(config: PretrainConfig) -> Row:
    """The config's values of VARIED, by setting."""
    return {name: getattr(getattr(config, part), name) for name, (part, _) in VARIED.items()}


def check(config: PretrainConfig, gpus: int) -> None:
    """Raise UsageError if this layout cannot work on so many devices, with the reason and the
    nearest layout that can."""
    try:
        config.check(gpus)
    except UsageError as error:
        if (found := nearest(config, gpus)) is not None:
            allowed = f"{error.allowed}; on {gpus} GPUs"
            raise UsageError(error.flag, error.value, allowed, works=sizes(found)) from error
        if nearest(config, 1) is None:  # the error has nothing to do with the layout
            raise
        each = gpus - 1
        while (found := nearest(config, each)) is None:
            each -= 1
        works = ("--gpus", str(each), *sizes(found))
        allowed = f"a number of GPUs that some layout fits ({error})"
        raise UsageError("--gpus", gpus, allowed, works=works) from error


def sizes(config: PretrainConfig) -> tuple[str, ...]:
    """The flags of the config's layout."""
    found = settings(config)
    return tuple(word for name in SIZES for word in (flag(name), str(found[name])))


def nearest(config: PretrainConfig, gpus: int) -> PretrainConfig | None:
    """The layout that can work with the fewest doublings of t, then of the micro-batch."""

    def distance(found: PretrainConfig) -> list[float]:
        return [abs(log2(settings(found)[each] / settings(config)[each])) for each in SIZES]

    return min(layouts(config, gpus), key=distance, default=None)


def layouts(config: PretrainConfig, gpus: int) -> Iterator[PretrainConfig]:
    """The same training in all layouts that can work. The global batch, the tensor-parallel mode,
    the context-parallel ranks, the pipeline and the ZeRO stage stay the same."""
    batches = {2**power for power in range(MOST_SAMPLES.bit_length())}
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for size, batch in product(sizes, sorted(batches | {config.training.micro_batch_size})):
        cut = config.parallel.sequence_parallel and size > 1
        with suppress(UsageError):  # also for a size that the tensor-parallel mode cannot have
            found = varied(config, tensor_model_parallel_size=size, micro_batch_size=batch)
            found = varied(found, sequence_parallel=cut)
            found.check(gpus)
            yield found


def search(config: PretrainConfig, gpus: int, hardware: Hardware, precision: str) -> list[Row]:
    """The layouts that fit, with and without sequence parallelism and recomputation, sorted by
    tokens a second, most first. Each has the context-parallel ranks, the pipeline and
    the ZeRO stage of the config."""
    from tools.plan.timing import predict
    from tools.plan.trace import Step

    rows = []
    cuts = (False, True) if config.parallel.tensor_parallel_mode == "1d" else (False,)
    for cut, granularity in product(cuts, GRANULARITIES):
        kind = varied(config, sequence_parallel=cut, recompute_granularity=granularity)
        for found in layouts(kind, gpus):
            step = Step(found, gpus, precision, hardware.device)
            if found.parallel.sequence_parallel != cut:
                continue  # one tensor-parallel rank has nothing to cut
            if any(sum(each.lasting.values()) > hardware.limit for each in step.stages):
                continue  # many do not fit by their lasting memory, which needs no trace
            memory = max(each.memory["total"] for each in step.stages)
            if memory > hardware.limit:
                continue
            seconds = predict(step, hardware).total
            row = {VARIED[setting][1]: value for setting, value in settings(found).items()}
            row |= {"data": step.copies, "micro_batches": step.micro_batches, "seconds": seconds}
            row |= {"tokens_per_second": step.tokens / seconds, "mfu": step.mfu(seconds, hardware)}
            rows.append(row | {"memory_bytes": memory})
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def keeping_batch(config: PretrainConfig, gpus: int) -> PretrainConfig:
    """The config with the global batch that it has on so many devices, whatever the layout."""
    batch = config.global_batch_size(gpus)
    return replace(config, training=replace(config.training, global_batch_size=batch))


def smallest_change(
    config: PretrainConfig, gpus: int, hardware: Hardware, precision: str, found: Sequence[Row]
) -> str | None:
    """Flags that change to a layout that fits: the fewest, and of these the fastest. found: result
    of a search on so many devices; if it is empty, twice as many are tried, and so on."""
    more, kept = gpus, keeping_batch(config, gpus)
    while not found and more < gpus * 2**MOST_DOUBLINGS:
        more *= 2
        found = search(kept, more, hardware, precision)

    if not found:
        return None

    def changed(row: Row) -> list[str]:
        new = {name: row[own] for name, (_, own) in VARIED.items()}
        return [
            switch(name, value) if isinstance(value, bool) else f"{flag(name)} {value}"
            for name, value in new.items()
            if value != settings(config)[name]
        ]

    row = min(found, key=lambda each: len(changed(each)))
    flags = changed(row)
    if more > gpus:
        flags.append(f"--gpus {more}")
    batch = kept.training.global_batch_size
    changes = {name: row[own] for name, (_, own) in VARIED.items()}
    if varied(config, **changes).global_batch_size(more) != batch:
        flags.append(f"--global-batch-size {batch}")  # otherwise it is a different training
    return " ".join(flags)
