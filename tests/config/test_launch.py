"""The world size, and launchers that start processes which do not know of each other."""

import pytest

from megatron.config import UsageError
from megatron.config.launch import world_size


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


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_without_ranks(variable: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} is 8, .*torchrun --nproc-per-node 8"):
        world_size({variable: "8"})


@pytest.mark.parametrize("size", ["two", "0", "-1", ""])
def test_a_world_that_is_no_number(size: str) -> None:
    with pytest.raises(UsageError, match=f"WORLD_SIZE is '{size}', which is no number"):
        world_size({"RANK": "0", "WORLD_SIZE": size})
    with pytest.raises(UsageError, match="WORLD_SIZE is ''"):
        world_size({"RANK": "0"})
