"""Real processes that run a few lines inside `launch`, as a launcher would start them."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 200.0  # seconds of one run on a busy machine; an idle one takes some ten
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """\
import os, signal, sys, threading, time
from pathlib import Path
import torch
import megatron.train.launch as start
from megatron.config.training import ParallelConfig
from megatron.parallel.collectives import all_reduce
from megatron.train.launch import launch

parallel = ParallelConfig(
    tensor_model_parallel_size={tensor}, distributed_timeout_minutes={limit} / 60
)
rank = int(os.environ["RANK"])
{first}
with launch(parallel, os.environ) as mesh:
    for step in range(6):
        last = step == 5
{body}
"""


@dataclass(frozen=True)
class Ended:
    status: int  # as subprocess has it: minus the signal's number where one killed it
    output: str
    errors: str


def write_program(
    directory: Path, body: str, *, tensor: int = 2, limit: float = 60, first: str = ""
) -> Path:
    """body: lines run in each of six steps, `last` being true in the sixth.

    limit: seconds without progress. first: lines run before the ranks meet.
    """
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    path = directory / "program.py"
    path.write_text(PROGRAM.format(tensor=tensor, limit=limit, first=first, body=lines))
    return path


def environment() -> dict[str, str]:
    extra = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        extra["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | extra


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_ranks(
    program: Path, world: int, *, absent: tuple[int, ...] = (), stopped: tuple[int, ...] = ()
) -> list[Ended]:
    """Start the ranks as srun does, without an agent; wait for all that are not `stopped`."""
    common = environment() | {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = {
        rank: subprocess.Popen(
            [sys.executable, program],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
        if rank not in absent
    }
    try:
        ended = {
            rank: Ended(process.wait(_LONGEST), *process.communicate())
            for rank, process in processes.items()
            if rank not in stopped
        }
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
    return [ended[rank] for rank in sorted(ended)]
