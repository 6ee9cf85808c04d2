"""How many processes train, and on what: every GPU that a batch can be dealt to, else the CPU."""

import os
import subprocess
from dataclasses import dataclass
from math import gcd

from megatron.config.pretrain import PretrainConfig


@dataclass(frozen=True)
class Processes:
    tensor_parallel: int
    data_parallel: int
    micro_batch_size: int
    device: str
    threads: int
    """Of each process on a CPU; set for GPUs too, as one that is listed may not work."""

    @property
    def world(self) -> int:
        return self.tensor_parallel * self.data_parallel


def count_gpus() -> int:
    """GPUs that a program would see, found without torch."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    present = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len(visible.split(",")) if visible else 0)


def fit_processes(config: PretrainConfig, gpus: int, cores: int) -> Processes:
    """Every GPU that the batch can be dealt to; the CPU where there are fewer than one model needs.

    Raises ValueError, naming flags, where the settings do not fit together.
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
