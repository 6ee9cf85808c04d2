"""Layouts of a model on a number of devices: which can work, how their settings differ, and which
is nearest to one that cannot work or does not fit. torch is imported only where one is planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import log2
from typing import Any

from megatron.config.parallel import EACH, ENDS, PROCESSES, STAGES, VIRTUAL
from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError, flag, spelling
from tools.plan.hardware import Hardware

MOST_SAMPLES = 64  # of a micro-batch that is tried
MOST_DOUBLINGS = 10  # of the number of devices, if no layout fits
# Settings that a search varies: (the config that has it, its name in a row).
VARIED = {
    STAGES: ("parallel", "pipeline"),
    VIRTUAL: ("parallel", "virtual_stages"),
    "pipeline_schedule": ("parallel", "schedule"),
    "tensor_model_parallel_size": ("parallel", "tensor"),
    "tensor_parallel_mode": ("parallel", "tensor_mode"),
    "tensor_parallel_depth": ("parallel", "tensor_depth"),
    "sequence_parallel": ("parallel", "sequence_parallel"),
    "context_parallel_size": ("parallel", "context"),
    "cp_comm_type": ("parallel", "cp_comm_type"),
    "zero_stage": ("parallel", "zero_stage"),
    "micro_batch_size": ("training", "batch"),
    "recompute_granularity": ("model", "recompute"),
}
# Settings that it leaves at these values: others say the same, or balance stages by hand.
PLAIN = {EACH: None, **dict.fromkeys(ENDS), "use_distributed_optimizer": False}
PARTS = VARIED | {name: ("parallel", name) for name in PLAIN}
SIZES = ("tensor_model_parallel_size", "micro_batch_size")  # that `nearest` doubles
Row = dict[str, Any]


def varied(config: PretrainConfig, **values: Any) -> PretrainConfig:
    """The config with these values of PARTS."""
    changes = defaultdict[str, Row](dict)
    for name, value in values.items():
        changes[PARTS[name][0]][name] = value
    parts = {part: replace(getattr(config, part), **each) for part, each in changes.items()}
    return replace(config, **parts)


def settings(config: PretrainConfig) -> Row:
    """The config's values of PARTS, by setting."""
    return {name: getattr(getattr(config, part), name) for name, (part, _) in PARTS.items()}


def spelled(values: Row) -> str:
    """Flags of settings. A default that no flag says is said by what means the same."""
    virtual = values.get(VIRTUAL) or 1
    same = {VIRTUAL: 1, "pipeline_schedule": "interleaved" if virtual > 1 else "1f1b"}
    said = {name: same.get(name) if value is None else value for name, value in values.items()}
    words = (spelling(name, value) for name, value in said.items() if value is not None)
    return " ".join(word for each in words for word in each)


def flags(config: PretrainConfig, found: PretrainConfig, gpus: int) -> str:
    """Flags that turn one config into another layout of the same training, after its own, of which
    those that `left_out` names are not given."""
    old, new = settings(config), settings(found)
    values = {name: value for name, value in new.items() if value != old[name]}
    batch = found.global_batch_size(gpus)
    if varied(config, **new).global_batch_size(gpus) != batch:
        values["global_batch_size"] = batch  # else it is a different training
    if "pipeline_schedule" in values:
        return spelled({VIRTUAL: new[VIRTUAL]} | values)
    return spelled(values)


def left_out(config: PretrainConfig) -> list[str]:
    """Flags that a search sets to what no flag says."""
    own = settings(config)
    return [flag(name) for name, value in PLAIN.items() if value is None and own[name] is not None]


def check(config: PretrainConfig, gpus: int) -> None:
    """Raise UsageError if this layout cannot work on so many devices, with the reason and the
    nearest layout that can."""
    try:
        check_sizes(config, gpus)
    except UsageError as error:
        if (found := nearest(config, gpus)) is not None:
            after, works = f"; on {gpus} GPUs", sizes(found)
            raise error.about(error.flag, error.value, after=after, works=works) from error
        if nearest(config, 1) is None:  # the error has nothing to do with the layout
            raise
        each = gpus - 1
        while (found := nearest(config, each)) is None:
            each -= 1
        works = ("--gpus", str(each), *sizes(found))
        allowed = f"a number of GPUs that some layout fits ({error})"
        raise UsageError("--gpus", gpus, allowed, works=works) from error


def check_sizes(config: PretrainConfig, gpus: int) -> None:
    """`config.check`, which speaks of --gpus in place of a launcher's processes."""
    try:
        config.check(gpus)
    except UsageError as error:
        allowed = error.args[2].replace(PROCESSES, "--gpus")
        again = UsageError(error.flag, error.value, allowed, *error.others, works=error.works)
        raise again from error


def sizes(config: PretrainConfig) -> tuple[str, ...]:
    """The flags of the config's layout."""
    found = settings(config)
    return tuple(word for name in SIZES for word in (flag(name), str(found[name])))


def nearest(config: PretrainConfig, gpus: int) -> PretrainConfig | None:
    """The layout that can work with the fewest doublings of t, then of the micro-batch."""

    def distance(found: PretrainConfig) -> list[float]:
        return [abs(log2(settings(found)[each] / settings(config)[each])) for each in SIZES]

    return min(near(config, gpus), key=distance, default=None)


def near(config: PretrainConfig, gpus: int) -> Iterator[PretrainConfig]:
    """The same training in all layouts that can work and that differ in SIZES alone."""
    for own in product(divisors(gpus), batches(config)):
        cut = config.parallel.sequence_parallel and own[0] > 1
        with suppress(UsageError):  # also for a size that the tensor-parallel mode cannot have
            found = varied(config, sequence_parallel=cut, **dict(zip(SIZES, own, strict=True)))
            found.check(gpus)
            yield found


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def batches(config: PretrainConfig) -> list[int]:
    """Micro-batch sizes that are tried."""
    powers = {2**power for power in range(MOST_SAMPLES.bit_length())}
    return sorted(powers | {config.training.micro_batch_size})


def keeping_batch(config: PretrainConfig, gpus: int) -> PretrainConfig:
    """The config with the global batch that it has on so many devices, whatever the layout."""
    batch = config.global_batch_size(gpus)
    return replace(config, training=replace(config.training, global_batch_size=batch))


def smallest_change(
    config: PretrainConfig, gpus: int, hardware: Hardware, precision: str
) -> str | None:
    """Flags that change SIZES, sequence parallelism and recomputation so that the layout fits: the
    fewest, and of these the fastest; on twice as many devices if no layout fits, and so on."""
    from tools.plan.quick import QuickStep
    from tools.plan.timing import predict

    kept = keeping_batch(config, gpus)
    cuts = (False, True) if config.parallel.tensor_parallel_mode == "1d" else (False,)
    for more in (gpus * 2**power for power in range(MOST_DOUBLINGS + 1)):
        found = list[tuple[int, float, str]]()
        for cut, again in product(cuts, config.model.granularities):
            kind = varied(kept, sequence_parallel=cut, recompute_granularity=again)
            for each in near(kind, more):
                step = QuickStep(each, more, precision, hardware.device)
                if each.parallel.sequence_parallel == cut and step.lacks(hardware.limit) <= 0:
                    changed = settings(each).items() - settings(config).items()
                    seconds = predict(step, hardware).total
                    found.append((len(changed), seconds, flags(config, each, more)))
        if found:
            *_, words = min(found)
            return words if more == gpus else f"{words} --gpus {more}".strip()
    return None
