"""The error message of a run that is out of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch

from megatron.config.pretrain import PretrainConfig
from megatron.errors import OutOfMemoryError
from megatron.parallel.mesh import Mesh
from megatron.train.watch import Progress


def is_allocation(error: BaseException) -> bool:
    """Whether an allocation failed, of the device's memory or of a CPU's, for which torch has no
    error class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@contextmanager
def memory_errors(config: PretrainConfig, mesh: Mesh) -> Iterator[None]:
    """Inside the `with`, an allocation that fails raises OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_allocation(error):
            raise
        clear_frames(error.__traceback__)  # frees their objects: ending takes memory, too
        raise OutOfMemoryError(_message(config, mesh, error)) from error


def _message(config: PretrainConfig, mesh: Mesh, error: BaseException) -> str:
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    size = f" ({asked[1]} were asked for)" if asked else ""
    where = f"in {Progress.phase}" + (f" {Progress.step}" if Progress.phase == "train step" else "")
    has_graph = config.training.cuda_graph is not False and mesh.size() == 1
    graph = ["--no-cuda-graph"] * (has_graph and mesh.device.type == "cuda")
    less = ", ".join([*graph, *cures(config, mesh.replicas.size)])
    return (
        f"rank {mesh.control.rank} is out of memory {where}{size}: {less} take less memory of each "
        "rank; tools/plan.py with the same flags says how much"
    )


def cures(config: PretrainConfig, copies: int) -> list[str]:
    """Changes that take less memory per rank than the config. copies: copies of the model."""
    parallel, found, more = config.parallel, list[str](), "more ranks"
    most = 3 if parallel.pipeline_model_parallel_size == 1 else 1
    if parallel.stage_of_zero < most:
        stage = f"--zero-stage {parallel.stage_of_zero + 1}"
        if copies > 1:
            found.append(stage)
        else:  # ZeRO has nothing to divide by
            more = f"{more} with {stage}"
    if (size := config.training.micro_batch_size) > 1:
        found.append(f"--micro-batch-size {size // 2}")
    if "full" in config.model.granularities and config.model.recompute_granularity != "full":
        found.append("--recompute-granularity full")
    return [*found, more]
