"""One rank of one contender of `train_step.py`, which starts this as a process of its own.

    python -m benchmarks.contenders NAME SETTINGS.json RANK

All have the same initial weights, batches, fused AdamW and clipping. In bf16 this project computes
on bf16 weights with fp32 masters; the others as their users do, on fp32 weights under autocast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import FLOOR, LEARNING_RATE, OURS, Case
from benchmarks.floor import Floor
from benchmarks.own import build, initial_weights, make_batch, model_section, optimizer_section
from benchmarks.profiles import profiled
from benchmarks.turns import Answer, ResidentMemory, Stopwatch, serve
from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh
from megatron.train.state import DTYPES
from megatron.train.step import train_step

Step = Callable[[int], float]  # of a batch's number, to its loss


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contenders of a run are told."""

    case: Case
    dtype: str
    device: torch.device
    mesh: Mesh


def ours(setting: Setting) -> Step:
    state = build(setting.case, setting.mesh, setting.dtype)

    def step(number: int) -> float:
        return train_step(state, [make_batch(setting.case, number)], LEARNING_RATE).loss

    return step


def plain(setting: Setting) -> Step:
    """nn.Linear, nn.Embedding, nn.LayerNorm and F.cross_entropy; cut by DTensor where t > 1."""
    from benchmarks import plain_gpt2 as peer

    grid = setting.mesh.tensor.grid
    projections = peer.FusedProjections if grid is None else peer.SeparateProjections
    section, weights = model_section(setting.case), initial_weights(setting.case)
    model = peer.PlainGPT2(section, setting.case.vocab_size, projections)
    model.load_state_dict(peer.plain_weights(weights, fused=grid is None))
    model.to(setting.device)
    if grid is not None:
        peer.parallelize(model, grid["tensor"])
    return training(setting, model, model)


def transformers(setting: Setting, *, compiled: bool = False) -> Step:
    """GPT2LMHeadModel with sdpa, and the loss as transformers computes it."""
    from benchmarks import transformers_gpt2 as peer

    section, weights = model_section(setting.case), initial_weights(setting.case)
    model = peer.build(section, setting.case.vocab_size, weights).to(setting.device)
    assert model.config._attn_implementation == "sdpa"
    if setting.case.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return training(setting, model, torch.compile(loss) if compiled else loss)


def training(setting: Setting, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Steps of a peer. loss: of int64 [b, s] inputs and labels."""
    from benchmarks.plain_gpt2 import PlainTraining

    kind = setting.device.type
    autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=setting.dtype == "bf16")
    section = optimizer_section(setting.case)
    whole = PlainTraining(model, loss, section, LEARNING_RATE, autocast)

    def step(number: int) -> float:
        text = torch.from_numpy(setting.case.text(number)).to(setting.device)
        return whole.step(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return step


CONTENDERS: dict[str, Callable[[Setting], Step]] = {
    OURS: ours,
    "plain torch": plain,
    "DTensor": plain,
    "transformers": transformers,
    "transformers, compiled": partial(transformers, compiled=True),
}


def main(name: str, file: str, rank: int) -> None:
    """Build one contender and answer what `train_step.py` asks of it."""
    told = json.loads(Path(file).read_text())
    device, size = torch.device(told["device"]), told["tensor_parallel"]
    torch.set_num_threads(told["threads"])
    case = Case.read(told["case"])
    wait = torch.cuda.synchronize if device.type == "cuda" else nothing
    if size > 1:
        store = dist.FileStore(f"{file}.{name}", size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        wait = dist.barrier
    mesh = build_mesh(size, device) if size > 1 else serial_mesh(device)
    setting = Setting(case=case, dtype=told["dtype"], device=device, mesh=mesh)
    if name == FLOOR:
        floor = Floor(case.products(size), DTYPES[setting.dtype], device, wait)
        watch = Stopwatch(floor.step, wait)
        serve({"time": watch.time, "products": partial(products, floor)})
        return
    memory = GpuMemory() if device.type == "cuda" else ResidentMemory()
    watch = Stopwatch(CONTENDERS[name](setting), wait)

    def profile(steps: int, trace: str) -> Answer:
        return profiled(partial(watch.time, 1), steps, Path(f"{trace}.{rank}.json"))

    serve(
        {
            "losses": watch.losses,
            "time": watch.time,
            "memory": lambda: {"bytes": memory.peak()},
            "profile": profile,
        }
    )


def nothing() -> None:
    pass


def products(floor: Floor) -> Answer:
    return {
        "products": [
            {"name": each.product.name, "layout": each.layout, "tflops": each.tflops}
            for each in floor.choices
        ]
    }


class GpuMemory:
    """Most memory that tensors of this process took on its GPU, in bytes."""

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
