"""Proofs of plans by processes of their own."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import set_forkserver_preload
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from megatron.config.huggingface import HuggingFaceConfig
from megatron.models.proof import NoProofError, Proof, prove
from megatron.parallel.mesh import build_mesh
from megatron.parallel.plan import PlanError

T = TypeVar("T")
Outcome = Proof | str
"""The latter is why there is none."""


def prove_at(configs: Sequence[HuggingFaceConfig], sizes: Sequence[int]) -> list[list[Outcome]]:
    """Of each config at each tensor size; every rank of a launch calls this, the data axis takes
    the ranks that are left."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = [build_mesh({"tensor": size}, torch.device("cpu")) for size in sizes]
    found = [[_outcome(config, mesh) for mesh in meshes] for config in configs]
    dist.destroy_process_group()
    return found


def _outcome(config: HuggingFaceConfig, mesh: Any) -> Outcome:
    try:
        return prove(config, mesh)
    except (PlanError, NoProofError) as error:
        return str(error)


def on_ranks(ranks: int, function: Callable[..., T], *arguments: Any) -> T:
    """What function(*arguments) returns on the first of so many processes on this machine. Raises
    ChildProcessError where one fails."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_forkserver_preload([function.__module__])
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    before = logging.root.manager.disable
    logging.disable()  # of this process, which starts ranks: they say themselves what has failed
    try:
        return elastic_launch(settings, function)(*arguments)[0]
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        ended = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
        raise ChildProcessError(f"a process ended with {ended}; what it said is above") from None
    finally:
        logging.disable(before)
