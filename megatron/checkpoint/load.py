"""Reads a checkpoint of any layout into the tensors of a run of any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoint.format import Checkpoint, damage, one_step, read_checkpoint, step_folders
from megatron.checkpoint.resume import newest_readable
from megatron.parallel.bucket import require_whole
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec, TensorSlice, sharding_specs


def model_slices(
    model: nn.Module, prefix: str = "model", specs: Mapping[str, ShardingSpec] | None = None
) -> list[TensorSlice]:
    """Slices of a model for a checkpoint. prefix: another one for a second model in a checkpoint.
    specs: see GradientBuckets. Raises ValueError for a model in ZeRO stage 3, for which
    `MasterWeights.slices` has all slices."""
    require_whole(model, "model_slices")
    parameters, table = dict(model.named_parameters()), sharding_specs(model, specs)
    return [
        TensorSlice(f"{prefix}.{name}", spec, parameters[name].detach())
        for name, spec in table.items()
    ]


def optimizer_slices(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    specs: Mapping[str, ShardingSpec] | None = None,
) -> list[TensorSlice]:
    """Slices of a torch optimizer over the model's parameters for a checkpoint: its state for each
    element, such as Adam's moments, and its number of steps; nothing before its first step, and not
    its settings. specs: see GradientBuckets.

    Raises ValueError for a state that is not cut as its parameter is, and for an optimizer of
    another model.
    """
    _require_shared(model, optimizer)
    table, slices = sharding_specs(model, specs), []
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                slices.append(TensorSlice(f"{kind}.{name}", table[name], value))
            elif value.numel() == 1:
                # Several pipeline stages have it for a tied parameter: it is saved once.
                one = ShardingSpec(shape=(1,), partial=table[name].partial)
                slices.append(TensorSlice(f"{kind}.{name}", one, value.view(1)))
            else:
                raise ValueError(
                    f"{type(optimizer).__name__}'s {kind} of {name} is {list(value.shape)}, not "
                    f"{list(parameter.shape)} as its parameter: it cannot be cut like it"
                )
    return slices


def load_optimizer(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    specs: Mapping[str, ShardingSpec] | None = None,
) -> None:
    """Replace a torch optimizer's state by the one that a checkpoint has from `optimizer_slices`,
    saved at any layout."""
    _require_shared(model, optimizer)
    table, parameters = sharding_specs(model, specs), dict(model.named_parameters())
    description = optimizer.state_dict()
    numbers = {
        id(parameter): number
        for group, saved in zip(optimizer.param_groups, description["param_groups"], strict=True)
        for parameter, number in zip(group["params"], saved["params"], strict=True)
    }
    state: dict[int, dict[str, Tensor]] = {}
    slices = []
    for key, entry in checkpoint.manifest["tensors"].items():
        kind, _, name = key.partition(".")
        number = numbers.get(id(parameters.get(name)))
        if number is None or kind == "model":
            continue
        is_like_it = entry["shape"] == list(table[name].shape)
        spec = table[name] if is_like_it else ShardingSpec(shape=(1,))
        local = torch.empty(spec.local_shape, dtype=getattr(torch, entry["dtype"]))
        state.setdefault(number, {})[kind] = local if is_like_it else local[0]
        slices.append(TensorSlice(key, spec, local))
    # Files are read first: a damaged one leaves the optimizer as it is.
    load_checkpoint(checkpoint, slices, partial=True)
    optimizer.load_state_dict({**description, "state": state})


def _require_shared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if not any(id(parameter) in parameters for parameter in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters: build it of this model")


def newest_checkpoint(directory: str | Path, mesh: Mesh) -> Checkpoint | None:
    """The newest whole checkpoint in the directory, or the one checkpoint that it names; every byte
    is read. None if there is no checkpoint yet. Every rank calls this.

    Raises ValueError if there are checkpoints and all are damaged.
    """
    one = one_step(directory)
    folders = [one] if one is not None else step_folders(directory)
    if not mesh.control.gather(folders)[0]:
        return None
    return newest_whole(folders, mesh, str(directory), any_loop=True)[0]


def verify(path: Path, mesh: Mesh) -> Checkpoint:
    """The checkpoint at `path`, verified to be whole: one of the ranks reads each of its files.

    Every rank calls this. Raises ValueError, the same on every rank, naming what is wrong.
    """
    faults, checkpoint = [], None
    try:
        checkpoint = read_checkpoint(path)
    except (ValueError, OSError) as error:
        faults = [str(error)]
    checksum = checkpoint and checkpoint.manifest["checksum"]
    checksums = mesh.control.gather(checksum)
    if checkpoint is not None and None not in checksums:
        if len(set(checksums)) > 1:
            faults = [f"{path} is not the same on all ranks; it must be in a shared directory"]
        else:
            files = [*checkpoint.manifest["files"].items()][mesh.control.rank :: mesh.control.size]
            faults = [line for _, line in damage(path, dict(files)) if line]
    reasons = [reason for each in mesh.control.gather(faults) for reason in each]
    if checkpoint is None or reasons:
        raise ValueError(reasons[0])
    return checkpoint


def newest_whole(
    folders: Sequence[Path], mesh: Mesh, option: str = "--load", *, any_loop: bool = False
) -> tuple[Checkpoint, list[str]]:
    """As `newest_readable`, but for the first whole checkpoint: every byte is read.

    Every rank calls this and gets the same result, for the `folders` of the first rank.
    """
    folders = mesh.control.gather(list(folders))[0]
    return newest_readable(folders, option, lambda path: verify(path, mesh), any_loop=any_loop)


def load_checkpoint(
    checkpoint: Checkpoint,
    slices: Iterable[TensorSlice],
    *,
    partial: bool = False,
    mesh: Mesh | None = None,
) -> None:
    """Fill every slice from a whole checkpoint, saved at any layout; padding becomes zero.

    partial: whether weights of a model in the checkpoint may stay unread. mesh: for a model in
    pipeline stages, each of which fills its own slices (every rank then calls this). Raises
    ValueError for a tensor that is missing, of another shape, or left unread.
    """
    path, saved = checkpoint.path, checkpoint.manifest["tensors"]
    slices = list(slices)
    keys = _of_all_stages(slices, mesh)
    prefixes = {key.partition(".")[0] for key in keys} & {"model"}
    left = [key for key in saved if key.partition(".")[0] in prefixes and key not in keys]
    if not partial and (left or not keys):
        what = f"{left[0]}, for which there is no slice" if left else "nothing that is asked for"
        raise ValueError(
            f"{path} has {what}; partial=True leaves tensors, mesh= those of other pipeline stages"
        )
    with ExitStack() as opened, torch.no_grad():
        files: dict[str, Any] = {}
        for each in slices:
            if each.key not in saved:
                raise ValueError(f"{path} has no tensor {each.key}")
            shape, expected = saved[each.key]["shape"], list(each.spec.shape)
            if shape != expected:
                raise ValueError(f"{path}: {each.key} is {shape}, this model's {expected}")
            if each.spec.padded_rows is not None:
                each.local.zero_()
            boxes = list(each.spec.boxes(each.local))
            for (local, own), one in product(boxes, saved[each.key]["slices"]):
                source, target = [], []  # the intersection, in the coordinates of each
                for offset, size, cut in zip(one["offset"], one["shape"], own, strict=True):
                    start, stop = max(offset, cut.start), min(offset + size, cut.stop)
                    source.append(slice(start - offset, stop - offset))
                    target.append(slice(start - cut.start, stop - cut.start))
                if any(dim.start >= dim.stop for dim in source):
                    continue
                if (name := one["file"]) not in files:
                    files[name] = opened.enter_context(safe_open(path / name, "pt"))
                stored = one.get("tensor", each.key)
                if source:
                    values = files[name].get_slice(stored)[tuple(source)]
                else:  # a single number
                    values = files[name].get_tensor(stored)
                local[tuple(target)].copy_(values)


def _of_all_stages(slices: Iterable[TensorSlice], mesh: Mesh | None) -> set[str]:
    """The keys of the slices of all pipeline stages (every rank calls this)."""
    keys = {each.key for each in slices}
    if mesh is None or mesh.pipeline.size == 1:
        return keys
    return keys.union(*mesh.control.gather(keys))


def load_weights(
    checkpoint: Checkpoint,
    weights: Iterable[TensorSlice],
    *,
    missing: Collection[str] = (),
    surplus: Collection[str] = (),
    mesh: Mesh | None = None,
) -> None:
    """Fill weights, keyed by parameter name, from a checkpoint of any precision: from its fp32
    masters if it has them, since the weights were rounded from those.

    missing: modules (first components of names) of this model that are left as they are, and that
    the checkpoint may lack. surplus: modules of the checkpoint that this model may lack. mesh: see
    load_checkpoint. Raises ValueError, naming the weight, for any other mismatch of names or
    shapes.
    """
    path, saved = checkpoint.path, checkpoint.manifest["tensors"]
    expected = {each.key: each for each in weights if each.key.partition(".")[0] not in missing}
    names = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    if lacking := expected.keys() - names:
        raise ValueError(f"{path} has no {min(lacking)}, which this model needs")
    more = names - _of_all_stages(expected.values(), mesh)
    if more := {name for name in more if name.partition(".")[0] not in surplus}:
        raise ValueError(f"{path} has {min(more)}, for which this model has no use")
    slices = [
        replace(each, key=key if (key := f"master.{name}") in saved else f"model.{name}")
        for name, each in expected.items()
    ]
    load_checkpoint(checkpoint, slices, partial=True)
