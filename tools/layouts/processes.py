"""Processes of this machine: its GPUs, and a function that runs another one on several ranks."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from typing import Any, TypeVar
from uuid import uuid4

T = TypeVar("T")


def count_gpus() -> int:
    """Number of GPUs that a program sees, as torch counts them in a process of its own, so that
    this one need not load it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    program = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    return int(ended.stdout) if ended.returncode == 0 else 0


def on_ranks(ranks: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Run function(*arguments) on `ranks` processes of this machine; returns its results by rank.
    Raises ChildProcessError if one fails."""
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
    logging.disable()  # only in this process, which starts the ranks: they report their own errors
    try:
        found = elastic_launch(settings, function)(*arguments)
        return [found[rank] for rank in range(ranks)]
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
