"""Processes of this machine: how many train, and on which device (as many GPUs as can share the
batch, or else the CPU); and a function that runs another one on several processes."""

import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import gcd
from multiprocessing import set_forkserver_preload
from typing import Any, TypeVar
from uuid import uuid4

from megatron.config.pretrain import PretrainConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    tensor_parallel: int
    data_parallel: int
    micro_batch_size: int
    device: str
    threads: int
    """CPU threads of each process; set for GPUs, too, as a listed GPU may not work."""

    @property
    def world(self) -> int:
        return self.tensor_parallel * self.data_parallel


def count_gpus() -> int:
    """Number of GPUs that a program would see, found without torch."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    instances: dict[str, list[str]] = {}
    for uuid in re.findall(r"\(UUID: ((?:GPU|MIG)-[^)]+)\)", listed.stdout):
        if uuid.startswith("GPU-"):
            instances[uuid] = []
        else:  # MIG instances are listed after their GPU
            instances[next(reversed(instances))].append(uuid)
    return visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), instances)


def visible_gpus(visible: str | None, instances: Mapping[str, Sequence[str]]) -> int:
    """Number of devices that CUDA shows a process.

    visible: CUDA_VISIBLE_DEVICES, numbers or beginnings of UUIDs, or None if it is not set. CUDA
    ignores the list from the first entry on that names no device, such as -1, and shows no device
    if one is named twice. instances: {UUID of each GPU: UUIDs of its MIG instances}, in the order
    of GPU numbers; if a listed device has MIG instances, CUDA shows only one instance.
    """
    gpus = list(instances)
    if visible is None:
        return 1 if any(instances.values()) else len(gpus)
    kind = visible.strip()[:4]
    of_migs = kind == "MIG-"
    is_uuid = kind in ("GPU-", "MIG-")
    entry = re.compile(rf"{kind}\S+" if is_uuid else r"\+?\d+")  # a number ends as for strtoul
    names = [each for uuids in instances.values() for each in uuids] if of_migs else gpus
    found = takewhile(bool, (entry.match(each.strip()) for each in visible.split(",")))
    keys = [match[0] if is_uuid else int(match[0]) for match in found if match]
    if len(set(keys)) < len(keys):
        return 0
    devices: list[int] = []
    for key in keys:
        if isinstance(key, int):
            named = [key] if key < len(gpus) else []
        else:
            named = [n for n, uuid in enumerate(names) if uuid.lower().startswith(key.lower())]
            if key.startswith("MIG-GPU-"):  # of older drivers: MIG-GPU-UUID/INSTANCE/INSTANCE
                owner = key.removeprefix("MIG-").partition("/")[0]
                named = [n for n, uuid in enumerate(gpus) if uuid == owner and instances[uuid]]
        if len(named) != 1:
            break
        if named[0] in devices and not of_migs:
            return 0
        devices += named
    is_split = of_migs or any(instances[gpus[number]] for number in devices)
    return min(len(devices), 1) if is_split else len(devices)


def fit_processes(config: PretrainConfig, gpus: int, cores: int) -> Processes:
    """As many GPUs as can share the batch, or the CPU if there are too few GPUs for one model.

    Raises ValueError, naming flags, if the settings do not fit together.
    """
    size = config.parallel.tensor_model_parallel_size
    config.check(size)
    batch, micro = config.global_batch_size(size), config.training.micro_batch_size
    copies = max((d for d in range(1, gpus // size + 1) if batch % d == 0), default=1)
    return Processes(
        size,
        copies,
        gcd(micro, batch // copies),
        "cuda" if gpus >= size else "cpu",
        max(1, cores // (size * copies)),
    )


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
