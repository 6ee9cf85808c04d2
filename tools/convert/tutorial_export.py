"""Writes checkpoints that the tutorial's script loads: see `tutorial`.

torch.distributed.checkpoint.save writes the folder, including `.metadata`. This and the scheduler's
file are pickles because the script's own loading requires it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.config.model import LlamaConfig
from megatron.parallel.layers_llama import RotaryEmbedding
from megatron.parallel.sharding import TensorSlice
from tools.convert.dcp import read_folder
from tools.convert.llama import LLAMA
from tools.convert.tutorial import MOMENTS, PREFIX, SCHEDULER, Schedule, key_of, names_of
from tools.convert.weights import resolve

Tensors = dict[str, Tensor]


def read_tensors(
    checkpoint: Checkpoint, section: LlamaConfig, dtype: torch.dtype | None
) -> dict[str, Tensors]:
    """{kind: {name in LLAMA: whole tensor}} of a complete checkpoint. Kinds are "weight" and, if it
    has them, MOMENTS. dtype: dtype of all tensors; None is the widest that the checkpoint has
    weights in: that of its masters, or of its weights if it has no masters."""
    saved = checkpoint.manifest["tensors"]
    entries = resolve(LLAMA, section, checkpoint.manifest["vocab_size"])
    first = entries[0].ours
    kind = "master" if f"master.{first}" in saved else "model"
    dtype = dtype or getattr(torch, saved[f"{kind}.{first}"]["dtype"])
    found: dict[str, Tensors] = {}
    for ours, theirs in {kind: "weight", **{each: each for each in MOMENTS}}.items():
        if f"{ours}.{first}" not in saved:
            continue
        slices = []
        for entry in entries:
            whole = torch.empty(entry.spec.shape, dtype=dtype)
            slices.append(TensorSlice(f"{ours}.{entry.ours}", entry.spec, whole))
        load_checkpoint(checkpoint, slices, partial=True)
        found[theirs] = {
            name: part.contiguous()
            for entry, each in zip(entries, slices, strict=True)
            for name, part in zip(entry.theirs, entry.transform.to_theirs(each.local), strict=True)
        }
    return found


def rotary_buffers(section: LlamaConfig) -> Tensors:
    """cos and sin [positions, head size], fp32, as the script's model computes them."""
    rotary = RotaryEmbedding(section.head_size, base=section.rotary_base)
    turns = rotary(torch.arange(section.max_position_embeddings)[None], torch.float32)
    return {
        f"{PREFIX}rotary_emb.{name}": torch.cat([each[0, 0]] * 2, dim=-1)
        for name, each in zip(("cos", "sin"), turns, strict=True)
    }


def write_tutorial(
    folder: Path,
    section: LlamaConfig,
    tensors: Mapping[str, Tensors],
    schedule: Schedule,
    adamw: Mapping[str, Any],
    *,
    by_name: bool,
) -> None:
    """Write the folder and the scheduler in it. tensors: see read_tensors. adamw: arguments of
    torch's AdamW except the learning rate. by_name: give the optimizer's state the keys of
    get_state_dict rather than of optimizer.state_dict().

    Raises ValueError if a tensor does not read back bit for bit.
    """
    names = names_of(section.num_layers)
    parameters = {key_of(name): nn.Parameter(tensors["weight"][name]) for name in names}
    optimizer = torch.optim.AdamW(parameters.values(), lr=schedule.lr, **adamw)
    scheduler = schedule_of(optimizer, schedule)
    for name in names if schedule.updates and len(tensors) > 1 else ():
        optimizer.state[parameters[key_of(name)]] = {
            "step": torch.tensor(float(schedule.updates)),
            **{kind: tensors[kind][name] for kind in MOMENTS},
        }
    state: dict[str, Any] = optimizer.state_dict()
    if by_name:
        keys = list(parameters)
        state["state"] = {keys[number]: values for number, values in state["state"].items()}
        state["param_groups"][0]["params"] = keys
    model = {**rotary_buffers(section), **{key: each.detach() for key, each in parameters.items()}}
    with warnings.catch_warnings(action="ignore"):  # a warning that it runs in one process
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    torch.save(scheduler.state_dict(), folder / SCHEDULER)
    written = {f"model.{key}": tensor for key, tensor in model.items()}
    for key, values in state["state"].items():
        written |= {f"optimizer.state.{key}.{kind}": tensor for kind, tensor in values.items()}
    items = read_folder(folder)
    for key, tensor in written.items():
        if not torch.equal(items[key].tensor(), tensor):
            raise ValueError(f"{folder}: {key} does not read back as it was written")


def schedule_of(optimizer: torch.optim.Optimizer, schedule: Schedule) -> SequentialLR:
    """The script's scheduler after schedule.updates steps; sets the optimizer's learning rate."""
    warmup = schedule.lr_warmup_iters
    first = LinearLR(
        optimizer,
        start_factor=schedule.lr_warmup_init / schedule.lr,
        end_factor=1.0,
        total_iters=warmup,
    )
    then = CosineAnnealingLR(
        optimizer, T_max=schedule.lr_decay_iters - warmup, eta_min=schedule.min_lr
    )
    scheduler = SequentialLR(optimizer, [first, then], milestones=[warmup])
    optimizer.step()  # has no gradients and does nothing, but the scheduler expects a step
    with warnings.catch_warnings(action="ignore"):  # a warning about its own deprecated argument
        for _ in range(schedule.updates):
            scheduler.step()
    return scheduler
