"""One rank of one contender of `train_step.py`, which starts this as a process of its own.

    python -m benchmarks.contenders NAME SETTINGS.json RANK

All have the same initial weights, batches, fused AdamW and clipping. In bf16 this project computes
on bf16 weights with fp32 masters; the others as their users do, on fp32 weights under autocast.
All import what any of them needs, and what torch's optimizer would import in its first step, so
that none of it counts as memory of a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import transformers_gpt2
from benchmarks.cases import (
    AT_ONCE,
    COMPILED,
    DTENSOR,
    FLOOR,
    IN_CHUNKS,
    LEARNING_RATE,
    NOT_COMPILED,
    OURS,
    PLAIN,
    SEQUENCE,
    SETTINGS,
    TRANSFORMERS,
    Case,
)
from benchmarks.floor import Floor
from benchmarks.output_layer_steps import output_layer
from benchmarks.own import build, initial_weights, make_batch, model_section, optimizer_section
from benchmarks.plain_gpt2 import (
    FusedProjections,
    PlainGPT2,
    PlainTraining,
    SeparateProjections,
    parallelize,
    plain_weights,
)
from benchmarks.profiles import profiled
from benchmarks.turns import Answer, GpuMemory, ResidentMemory, Stopwatch, serve
from megatron.parallel.mesh import ControlGroup, Mesh, build_mesh, serial_mesh
from megatron.train.state import DTYPES, choose_compile
from megatron.train.step import train_step

Step = Callable[[int], float]  # of a batch's number, to its loss


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contenders of a run are told."""

    case: Case
    dtype: str
    device: torch.device
    mesh: Mesh
    has_peers: bool  # beside this project, and so the same initial weights
    notes: list[str] = field(default_factory=list)  # what the record should say of the contender


def ours(setting: Setting, *, compiled: bool | None = None, **settings: Any) -> Step:
    """compiled: as --compile. settings: of the model, in place of the case's."""
    is_compiled, warnings = choose_compile(compiled, setting.mesh)
    setting.notes.extend(warnings)
    state = build(
        setting.case,
        setting.mesh,
        setting.dtype,
        settings=settings,
        compiled=is_compiled,
        is_drawn_there=not setting.has_peers,
    )

    def step(number: int) -> float:
        return train_step(state, [make_batch(setting.case, number)], LEARNING_RATE).loss

    return step


def with_sequence_parallelism(setting: Setting) -> Step:
    return ours(replace(setting, mesh=replace(setting.mesh, stream=setting.mesh.tensor)))


def plain(setting: Setting) -> Step:
    """nn.Linear, nn.Embedding, nn.LayerNorm and F.cross_entropy; cut by DTensor where t > 1."""
    grid = setting.mesh.device_mesh() if setting.mesh.tensor.size > 1 else None
    projections = FusedProjections if grid is None else SeparateProjections
    section, weights = model_section(setting.case), initial_weights(setting.case)
    model = PlainGPT2(section, setting.case.vocab_size, projections)
    model.load_state_dict(plain_weights(weights, fused=grid is None))
    model.to(setting.device)
    if grid is not None:
        parallelize(model, grid["tensor"])
    return training(setting, model, model)


def transformers(setting: Setting, *, compiled: bool = False) -> Step:
    """GPT2LMHeadModel with sdpa, and the loss as transformers computes it."""
    section, weights = model_section(setting.case), initial_weights(setting.case)
    model = transformers_gpt2.build(section, setting.case.vocab_size, weights).to(setting.device)
    assert model.config._attn_implementation == "sdpa"
    if setting.case.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    entropy = F.cross_entropy
    if compiled:
        # Block by block, since of a model that is compiled whole attention gets a mask as a tensor,
        # with which torch has no flash attention.
        entropy = torch.compile(entropy)
        for block in model.transformer.h:
            block.compile()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return entropy(logits.float().flatten(0, 1), labels.flatten())

    return training(setting, model, loss)


def training(setting: Setting, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Steps of a peer. loss: of int64 [b, s] inputs and labels."""
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
    NOT_COMPILED: partial(ours, compiled=False),
    SEQUENCE: with_sequence_parallelism,
    **{name: partial(ours, **settings) for name, settings in SETTINGS.items()},
    PLAIN: plain,
    DTENSOR: plain,
    TRANSFORMERS: transformers,
    COMPILED: partial(transformers, compiled=True),
    IN_CHUNKS: lambda setting: output_layer(setting.case, setting.mesh, setting.dtype, True),
    AT_ONCE: lambda setting: output_layer(setting.case, setting.mesh, setting.dtype, False),
}


def main(name: str, file: str, rank: int) -> None:
    """Build one contender and answer what `train_step.py` asks of it."""
    told = json.loads(Path(file).read_text())
    torch.set_num_threads(told["threads"])
    mesh, wait = connect(told, f"{file}.{name}", rank)
    case, device = Case.read(told["case"]), mesh.device
    setting = Setting(
        case=case, dtype=told["dtype"], device=device, mesh=mesh, has_peers=told["has_peers"]
    )
    if name == FLOOR:
        products = case.products(told["tensor_parallel"])
        floor = Floor(products, DTYPES[setting.dtype], device, wait)
        serve({"choose": partial(choose, floor), "time": Stopwatch(floor.step, wait).time})
        return
    memory = GpuMemory() if device.type == "cuda" else ResidentMemory()
    watch = Stopwatch(CONTENDERS[name](setting), wait)
    serve(
        {
            "losses": watch.losses,
            "time": watch.time,
            "memory": lambda: {"bytes": memory.peak(), "notes": setting.notes},
            "profile": partial(profile, watch, device.type, rank),
        }
    )


def connect(told: dict[str, Any], store: str, rank: int) -> tuple[Mesh, Callable[[], object]]:
    """(this rank's mesh, what waits until all that was started on all ranks is done)."""
    size, kind = told["tensor_parallel"], told["device"]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    wait = torch.cuda.synchronize if kind == "cuda" else nothing
    if kind == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return serial_mesh(device), wait
    if told["stub_communication"]:
        return alone(size, device), wait
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)

    def wait_for_all() -> None:
        wait()
        dist.barrier()

    return build_mesh({"tensor": size}, device), wait_for_all


def alone(size: int, device: torch.device) -> Mesh:
    """The first of `size` tensor-parallel ranks, of which the others are not there: collectives
    leave their tensors as they are, and take no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return replace(build_mesh({"tensor": size}, device), control=ControlGroup())


def nothing() -> None:
    pass


def choose(floor: Floor) -> Answer:
    return {
        "products": [
            {"name": each.product.name, "layout": each.layout, "tflops": each.tflops}
            for each in floor.choose()
        ]
    }


def profile(watch: Stopwatch, device: str, rank: int, steps: int, trace: str) -> Answer:
    return profiled(partial(watch.time, 1), steps, Path(f"{trace}.{rank}.json"), device)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
