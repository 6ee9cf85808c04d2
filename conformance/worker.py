"""One rank of a run: makes the adapter, takes steps, and writes the figures and what it held.

torchrun starts it for `conformance.run`: python -m conformance.worker JOB.json
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30A0000:
    sys.exit(f"error: Python 3.10 or newer is needed; this is {sys.version.split()[0]}")

import faulthandler
import json
import os
import platform
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from conformance.adapters import Refused
from conformance.fixture import COMPARED, Figures, Fixture, write_figures

KINDS = ("parameters", "gradients", "optimizer")
LIBRARIES = "torch numpy safetensors transformers accelerate deepspeed megatron-core lightning"
# Attention of the CPU, which torch's table lacks: matmuls of a forward, and of a backward.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}


class Matmuls(TorchDispatchMode):
    """Counts the FLOPs of this rank's matmuls and attention.

    FlopCounterMode counts a matmul of DTensors by its whole size. This one leaves a DTensor to
    itself, and counts the local matmul that it makes; not the one of fake tensors, from which
    DTensor learns shapes.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(each, "placements") for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(issubclass(each, FakeTensor) for each in types):
            return out
        packet = getattr(func, "_overloadpacket", func)
        name = getattr(packet, "__name__", "")
        # torch's table has addmm, and not addmm_ in place.
        base = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else packet
        formula = flop_registry.get(base)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        elif name in ATTENTION:
            first, matmuls = ATTENTION[name]
            query, key = args[first], args[first + 1]
            self.flops += 2 * matmuls * query.numel() * key.shape[-2]
        return out


def held(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Elements and bytes of this rank's parts; two names of the same memory count once."""
    parts: dict[Any, tuple[int, int]] = {}
    for tensor in tensors:
        local: Any = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        storage = local.untyped_storage()
        number = min(local.numel(), storage.nbytes() // local.element_size())  # freed: 0
        if number:
            where = storage.data_ptr(), local.storage_offset(), number
            parts[where] = number, number * local.element_size()
    return {
        "elements": sum(number for number, _ in parts.values()),
        "bytes": sum(size for _, size in parts.values()),
    }


def local_tensors(adapter: Any) -> dict[str, list[Tensor]]:
    if hasattr(adapter, "local_tensors"):
        return dict(adapter.local_tensors())
    parameters = list(adapter.model.parameters()) if hasattr(adapter, "model") else []
    states = adapter.optimizer.state.values() if hasattr(adapter, "optimizer") else []
    return {
        "parameters": parameters,
        "gradients": [each.grad for each in parameters if each.grad is not None],
        "optimizer": [each for state in states for each in state.values() if torch.is_tensor(each)],
    }


def take_steps(adapter: Any, fixture: Fixture, first: int, last: int) -> tuple[Figures, Any]:
    """Steps first to last, counted from 1: the figures, and what this rank held after the first
    of them and computed in it."""
    figures, division = Figures(), {}
    batches = fixture.batches()

    def kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.detach().cpu().clone() for name, each in tensors.items()}

    for step in range(first, last + 1):
        if step == first:
            with Matmuls() as counted:
                loss, norm = adapter.step(batches[step - 1])
            tensors = local_tensors(adapter)
            division = {kind: held(tensors.get(kind, [])) for kind in KINDS}
            division["flops"] = {"elements": counted.flops}
        else:
            loss, norm = adapter.step(batches[step - 1])
        figures.losses.append(float(loss))
        figures.grad_norms.append(float(norm))
        if step == 1:
            figures.gradients = kept(adapter.gradients())
        if step in COMPARED:
            figures.weights[step] = kept(adapter.weights())
    return figures, division


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES.split():
        if name in sys.modules or (name == "megatron-core" and "megatron.core" in sys.modules):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = str(getattr(sys.modules.get(name), "__version__", "unknown"))
    return found


def work(job: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The findings of this rank; the first one also writes the figures."""
    folder = Path(job["output"])
    fixture, dtype = Fixture(Path(job["fixture"])), getattr(torch, job["dtype"])
    first, last = job["steps"]
    adapter = resolve_name(job["adapter"])(fixture, job["layout"], dtype)
    if (job["save"] or job["load"]) and not hasattr(adapter, "load"):
        raise Refused("the adapter has no save and load, so it cannot be resumed")
    if job["load"]:
        adapter.load(Path(job["load"]))
    figures, division = take_steps(adapter, fixture, first, last)
    if job["save"]:
        adapter.save(Path(job["save"]))
    if rank == 0:
        write_figures(figures, folder / "figures.safetensors")
    if dist.is_initialized():
        dist.barrier()
    if hasattr(adapter, "close"):
        adapter.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"division": division, "versions": versions()}


def main(file: str) -> int:
    job, rank = json.loads(Path(file).read_text()), int(os.environ["RANK"])
    folder = Path(job["output"])
    stack = (folder / f"{rank}.stack").open("w")  # where a rank hangs
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    own = folder / f"{rank}.pid"  # whom the runner ends where it must
    own.write_text(str(os.getpid()))
    try:
        report = work(job, rank)
    except Refused as error:
        report = {"refused": " ".join(str(error).split()), "time": time.time()}
    except Exception:
        report = {"failed": traceback.format_exc(), "time": time.time()}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    own.unlink()
    return 0 if "division" in report else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
