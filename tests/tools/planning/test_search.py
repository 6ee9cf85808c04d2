"""Layouts that fit, and those that cannot work."""

import pytest

from megatron.config.checks import UsageError
from tests.tools.planning.presets import preset
from tools.planning.anchor import find_hardware
from tools.planning.search import check, layouts, search


@pytest.mark.parametrize(
    ("flags", "gpus", "flag", "cure"),
    [
        # 20 heads on 8 ranks
        (("--tensor-model-parallel-size", "8"), 128, "--tensor-model-parallel-size",
         "--tensor-model-parallel-size 4 --micro-batch-size 8"),
        (("--tensor-model-parallel-size", "2"), 31, "--tensor-model-parallel-size",
         "--tensor-model-parallel-size 1 --micro-batch-size 8"),
        (("--global-batch-size", "512"), 256, "--global-batch-size",
         "--tensor-model-parallel-size 2 --micro-batch-size 4"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_nearest_that_can(
    flags: tuple[str, ...], gpus: int, flag: str, cure: str
) -> None:
    config = preset("gpt2_scaling_2.5b", *flags)
    with pytest.raises(UsageError) as refused:
        check(config, gpus)
    assert (refused.value.flag, " ".join(refused.value.works)) == (flag, cure)
    cured = preset("gpt2_scaling_2.5b", *flags, *cure.split())
    check(cured, gpus)


def test_the_search_tries_all_that_can_work() -> None:
    config = preset("gpt2_8.3b")
    found = {
        (each.parallel.tensor_model_parallel_size, each.training.micro_batch_size)
        for each in layouts(config, 512)
    }
    # 24 heads; 512 samples on 512 / t models.
    assert found == {(t, b) for t in (1, 2, 4, 8) for b in (1, 2, 4, 8, 16, 32, 64) if b <= t}


def test_the_search_keeps_what_fits_best_first() -> None:
    hardware = find_hardware("dgx2h")
    found = search(preset("gpt2_8.3b"), 512, hardware, "fp16")
    assert {each["tensor"] for each in found} == {8}  # nothing else fits 32 GB
    speeds = [each["tokens_per_second"] for each in found]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each["data"] * each["batch"] * each["micro_batches"] == 512 for each in found)
    room = hardware.memory - hardware.reserved_memory
    assert all(each["memory_bytes"] <= room for each in found)
