"""Real processes that run a few lines inside `launch`, as a launcher would start them."""

import runpy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.dist import PATIENCE
from tests.programs import Run, start_ranks

DUMP = "flight_recorder_"  # and the rank, beside the program
PROGRAM = """\
import os, signal, sys, threading, time
import torch
import megatron.train.launch as start
from megatron.config.parallel import ParallelConfig
from megatron.parallel.collectives import all_reduce
from megatron.train.launch import launch
from megatron.train.watch import note

parallel = ParallelConfig(
    tensor_model_parallel_size={tensor}, distributed_timeout_minutes={limit} / 60
)
rank = int(os.environ["RANK"])
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = {dumps!r}
{first}
with launch(parallel, os.environ) as mesh:
    for step in range(6):
        note("train step", step)
        last = step == 5
{body}
"""


@dataclass(frozen=True)
class Ended:
    status: int  # minus the signal's number where one killed it
    text: str  # what it printed


def write_program(
    folder: Path, body: str, *, tensor: int = 2, limit: float = PATIENCE, first: str = ""
) -> Path:
    """body: lines run in each of six steps, `last` being true in the sixth.

    limit: seconds without progress. first: lines run before the ranks meet.
    """
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    path, dumps = folder / "program.py", str(folder / DUMP)
    text = PROGRAM.format(tensor=tensor, limit=limit, first=first, dumps=dumps, body=lines)
    path.write_text(text)
    return path


def begin(
    program: Path, world: int, *, ranks: Sequence[int] | None = None, agent: bool = False
) -> AbstractContextManager[Run]:
    """Start the program on these ranks, or all. agent: the store outlives the ranks, as torchrun's
    does; else rank 0 keeps it."""
    target = partial(runpy.run_path, str(program))
    return start_ranks(target, ranks or range(world), world, program.parent, agent=agent)


def end(run: Run, stopped: Sequence[int] = ()) -> list[Ended]:
    """Wait for those that are not `stopped`."""
    going = [number for number in range(len(run.processes)) if number not in stopped]
    statuses = run.wait(ranks=going)
    return [Ended(*each) for each in zip(statuses, map(run.text, going), strict=True)]


def run_ranks(program: Path, world: int, **options: Any) -> list[Ended]:
    """See `begin`."""
    with begin(program, world, **options) as run:
        return end(run)
