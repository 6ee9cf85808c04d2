"""From the environment of a launcher to a mesh; below this file nothing reads the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh


def choose_device(environ: Mapping[str, str]) -> torch.device:
    """This process's own GPU where every process of the node can have one, else the CPU."""
    processes = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= processes:
        return torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    if gpus and environ.get("RANK", "0") == "0":
        print(f"{processes} processes but {gpus} GPU(s) on this node: computing on the CPU")
    return torch.device("cpu")


@contextmanager
def launch(
    tensor_parallel_size: int, environ: Mapping[str, str], timeout_minutes: float = 10.0
) -> Iterator[Mesh]:
    """The mesh of this run: torchrun's processes, or this process alone where there is no launcher.

    timeout_minutes: how long a collective may wait for the slowest rank before the run fails.
    """
    device = choose_device(environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in environ:
        if tensor_parallel_size != 1:
            raise ValueError(
                f"--tensor-model-parallel-size {tensor_parallel_size} needs as many processes; "
                f"start them with torchrun --nproc-per-node {tensor_parallel_size}"
            )
        yield serial_mesh(device)
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield build_mesh(tensor_parallel_size, device)
    finally:
        dist.destroy_process_group()
