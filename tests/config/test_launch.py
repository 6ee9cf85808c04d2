"""The world size, and launchers that start processes which do not know of each other."""

import pytest

from megatron.config.launch import world_size
from megatron.errors import UsageError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1"}, 1),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8),
        ({"SLURM_NTASKS": "8"}, 1),  # a batch script: one process
    ],
)
def test_processes_of_the_run(environ: dict[str, str], expected: int) -> None:
    assert world_size(environ) == expected


@pytest.mark.parametrize(
    ("environ", "flag"),
    [
        # Several processes without ranks.
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE"),
        # No number of processes.
        ({"RANK": "0"}, "WORLD_SIZE"),
        *(({"RANK": "0", "WORLD_SIZE": size}, "WORLD_SIZE") for size in ("two", "0", "-1", "")),
    ],
)
def test_processes_that_do_not_know_of_each_other(environ: dict[str, str], flag: str) -> None:
    with pytest.raises(UsageError) as refused:
        world_size(environ)
    assert refused.value.flag == flag
    assert refused.value.works[:2] == ("torchrun", "--nproc-per-node")
