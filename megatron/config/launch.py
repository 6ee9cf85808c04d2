"""How many processes run the program, as the launcher's environment tells."""

from collections.abc import Mapping

from megatron.config.checks import UsageError

# Variables that say how many processes were started: torchrun's own, that of a step of srun (a
# batch script, which is one process, has it not), that of Open MPI.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def world_size(environ: Mapping[str, str]) -> int:
    """Processes of this run: WORLD_SIZE beside torchrun's RANK, 1 without a launcher.

    Raises UsageError where WORLD_SIZE is no number of processes, and where there are several
    processes without RANK, which would each do the whole work alone.
    """
    if "RANK" in environ:
        return _read(environ, "WORLD_SIZE")
    for variable in _SIZES:
        size = _read(environ, variable) if variable in environ else 1
        if size > 1:
            raise UsageError(
                f"{variable} is {size}, but RANK is not set, so that each process would run alone; "
                f"torchrun --nproc-per-node {size} would work"
            )
    return 1


def _read(environ: Mapping[str, str], variable: str) -> int:
    value = environ.get(variable, "")
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(
            f"{variable} is {value!r}, which is no number of processes; torchrun sets it, as in "
            "torchrun --nproc-per-node 2"
        )
    return int(value)
