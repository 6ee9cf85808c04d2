"""The machine that a run computes on: its memory, precision and compiler, and its description."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from megatron.config.pretrain import PretrainConfig
from megatron.errors import OutOfMemoryError, UsageError
from megatron.parallel.mesh import Mesh
from megatron.train.launch import default_precision
from megatron.train.watch import Progress

ROOT = Path(__file__).resolve().parents[2]
COMPILER_HELP = "a C++ compiler (CPU) or Triton (GPU) may be missing; --no-compile does without"


def keep_freed_memory(*, gathers: bool = False) -> None:
    """Lets the C library keep up to 2 GB of memory that this process frees. Returned to the system
    after each step, it would come back page by page, for one to two per cent of a step's time.

    gathers: whether weights are gathered layer by layer. Then blocks larger than 4 MB go back:
    glibc 2.36 cannot place an aligned block where one of its size was freed, so each gather, and
    its copy in gloo, would take new memory.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**22 if gathers else 2**25)  # the largest value allowed


@contextmanager
def memory_errors(config: PretrainConfig, mesh: Mesh) -> Iterator[None]:
    """Inside the `with`, an allocation that fails, of the device's memory or of a CPU's, raises
    OutOfMemoryError; its message lists changes of the config that take less memory per rank."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_allocation = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # On a CPU torch has no error class of its own; oneDNN without memory says only this.
        is_allocation |= "can't allocate memory" in str(error)
        if not is_allocation and str(error) != "could not create a primitive":
            raise
        clear_frames(error.__traceback__)  # frees their objects: ending takes memory, too
        parallel, training = config.parallel, config.training
        cures: list[str] = []
        with_more: list[str] = []  # what only more ranks can divide
        if mesh.device.type == "cuda" and mesh.size() == 1 and training.cuda_graph is not False:
            cures.append("--no-cuda-graph")
        if parallel.stage_of_zero < (3 if parallel.pipeline_model_parallel_size == 1 else 1):
            stage = f"--zero-stage {parallel.stage_of_zero + 1}"
            if mesh.replicas.size > 1:
                cures.append(stage)
            else:  # ZeRO has nothing to divide by
                with_more.append(stage)
        with suppress(UsageError):  # where its checks accept a longer context axis
            longer = replace(parallel, context_parallel_size=2 * mesh.context.size)
            replace(config, parallel=longer).check(2 * mesh.size())
            with_more.append(f"--context-parallel-size {longer.context_parallel_size}")
        if training.micro_batch_size > 1:
            cures.append(f"--micro-batch-size {training.micro_batch_size // 2}")
        if "full" in config.model.granularities and config.model.recompute_granularity != "full":
            cures.append("--recompute-granularity full")
        more = " with ".join(filter(None, ["more ranks", " or ".join(with_more)]))
        where = Progress.phase
        if where == "train step":
            where += f" {Progress.step}"
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        size = f" ({request[1]} were asked for)" if request else ""
        raise OutOfMemoryError(
            f"rank {mesh.control.rank} is out of memory in {where}{size}: "
            f"{', '.join([*cures, more])} take less memory of each rank; tools/plan.py with the "
            "same flags says how much"
        ) from error


def choose_precision(name: str | None, mesh: Mesh, flag: str, works: tuple[str, ...]) -> str:
    """The precision of all ranks, a key of DTYPES: `name`, or else the default of the device.

    Raises UsageError on every rank if ranks differ: `flag` must be given, e.g. as in `works`.
    """
    chosen = mesh.control.gather(name or default_precision(mesh.device))
    if len(set(chosen)) > 1:
        defaults = (f"{each} (rank {chosen.index(each)})" for each in dict.fromkeys(chosen))
        allowed = f"given: the ranks' devices would compute in {' and '.join(defaults)}"
        raise UsageError(flag, None, allowed, works=works)
    return chosen[0]


def choose_compile(asked: bool | None, mesh: Mesh) -> tuple[bool, list[str]]:
    """(whether layers are compiled, the same on all ranks; warnings).

    asked: None if no flag was given; then layers are compiled on GPUs if the compiler works. Raises
    UsageError on every rank if --compile is given and does not work.
    """
    if not (mesh.device.type == "cuda" if asked is None else asked):
        return False, []
    if (failure := failure_of_ranks(mesh)) is None:
        return True, []
    reason = f"torch.compile does not work here: {failure}; {COMPILER_HELP}"
    if asked:
        raise UsageError("--compile", None, f"left out: {reason}", works=("--no-compile",))
    return False, [f"warning: layers are not compiled, which is slower: {reason}"]


def failure_of_ranks(mesh: Mesh) -> str | None:
    """Why torch.compile fails on a rank; None if it works on all (every rank calls this)."""
    return next(filter(None, mesh.control.gather(compiler_failure(mesh.device))), None)


def require_update(impl: str, mesh: Mesh) -> None:
    """Raises UsageError on every rank if --optimizer-impl compiled cannot be compiled."""
    if impl == "compiled" and (failure := failure_of_ranks(mesh)) is not None:
        allowed = f"torch, as torch.compile does not work here: {failure}"
        raise UsageError("--optimizer-impl", impl, allowed, works="torch")


def compiler_failure(device: torch.device) -> str | None:
    """Why torch.compile fails on this device, tested on a small function; None if it works."""

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) * x + 1

    x = torch.linspace(-2, 2, 64, device=device)
    try:
        compiled = torch.compile(function)(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if torch.allclose(compiled, function(x)) else "it computes something else"


def crowded_hosts(mesh: Mesh) -> list[str]:
    """A warning for each host with more processes than cores (every rank calls this)."""
    cores = defaultdict[str, list[set[int]]](list)  # of each process, which may be bound to some
    for host, own in mesh.control.gather((socket.gethostname(), os.sched_getaffinity(0))):
        cores[host].append(own)
    return [
        f"warning: {len(each)} processes on {host} take turns on {number} "
        f"core{'s' * (number > 1)}; as many processes as cores are faster"
        for host, each in cores.items()
        if len(each) > (number := len(set.union(*each)))
    ]


def environment(mesh: Mesh) -> dict[str, Any]:
    """The program and all else that decides the last bits of a sum; kept in every checkpoint."""
    device = mesh.device
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "layout": mesh.sizes,
    }


def versions() -> dict[str, str]:
    """The versions of the libraries that a run computes and reads with."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "transformers", "tokenizers", "safetensors"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def commit(root: Path = ROOT) -> str | None:
    """The commit of this code, followed by "-dirty" if a file differs from it; None if the code has
    no repository of its own, or git is not installed."""
    if not (root / ".git").exists():  # git would search the parent folders
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        ended = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() or None
