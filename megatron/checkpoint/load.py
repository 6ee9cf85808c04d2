"""Reading a checkpoint into the tensors of a run, whatever the two layouts are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoint.format import (
    Checkpoint,
    damage,
    one_step,
    read_checkpoint,
    step_folders,
)
from megatron.checkpoint.resume import newest_readable
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import ShardingSpec, sharding_specs


@dataclass(frozen=True)
class TensorSlice:
    """This rank's slice of the logically whole tensor `key`, cut and padded as `spec` says."""

    key: str
    spec: ShardingSpec
    local: Tensor


def model_slices(model: nn.Module) -> Iterator[TensorSlice]:
    """What a checkpoint keeps of a model."""
    parameters = dict(model.named_parameters())
    for name, spec in sharding_specs(model).items():
        yield TensorSlice(f"model.{name}", spec, parameters[name].detach())


def optimizer_slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[TensorSlice]:
    """What a checkpoint keeps of an optimizer of torch over the model's parameters: what it has for
    each element, such as Adam's moments, and its number of steps; not its settings.

    An optimizer that has made no step gets its state first, to be loaded into. Raises ValueError
    for a state that is not cut as its parameter is.
    """
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)  # makes it, by a step that changes nothing
    table = sharding_specs(model)
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                yield TensorSlice(f"{kind}.{name}", table[name], value)
            elif value.numel() == 1:
                yield TensorSlice(f"{kind}.{name}", ShardingSpec(shape=(1,)), value.view(1))
            else:
                raise ValueError(
                    f"{type(optimizer).__name__}'s {kind} of {name} is {list(value.shape)}, not "
                    f"{list(parameter.shape)} as its parameter: it cannot be cut like it"
                )


def newest_checkpoint(directory: str | Path, mesh: Mesh) -> Checkpoint | None:
    """The newest whole checkpoint in the directory, of which every byte is read, or the one
    checkpoint that it names; None where there is none yet (every rank calls this).

    Raises ValueError where those that are there are damaged.
    """
    one = one_step(directory)
    folders = [one] if one is not None else step_folders(directory)
    return newest_whole(folders, mesh)[0] if mesh.control.gather(folders)[0] else None


def verify(path: Path, mesh: Mesh) -> Checkpoint:
    """The checkpoint at `path`, found whole: each of its files is read by one of the ranks.

    Every rank calls this. Raises ValueError, the same on every rank, naming what is wrong.
    """
    found, checkpoint = [], None
    try:
        checkpoint = read_checkpoint(path)
    except (ValueError, OSError) as error:
        found = [str(error)]
    checksum = checkpoint and checkpoint.manifest["checksum"]
    checksums = mesh.control.gather(checksum)
    if checkpoint is not None and None not in checksums:
        if len(set(checksums)) > 1:
            found = [f"{path} is not the same on all ranks; it must be in a shared directory"]
        else:
            found = damage(checkpoint, (mesh.control.rank, mesh.control.size))
    reasons = [reason for each in mesh.control.gather(found) for reason in each]
    if checkpoint is None or reasons:
        raise ValueError(reasons[0])
    return checkpoint


def newest_whole(
    folders: Sequence[Path], mesh: Mesh, given: str = "--load"
) -> tuple[Checkpoint, list[str]]:
    """As `newest_readable`, but of the first whole one, of which every byte is read.

    Every rank calls this and gets the same; of `folders` those of the first rank hold for all.
    """
    folders = mesh.control.gather(list(folders))[0]
    return newest_readable(folders, given, lambda path: verify(path, mesh))


def load_checkpoint(checkpoint: Checkpoint, slices: Iterable[TensorSlice]) -> None:
    """Fill every slice from a checkpoint that is whole, padding with zeros.

    Raises ValueError for a missing tensor or another shape.
    """
    path, saved = checkpoint.path, checkpoint.manifest["tensors"]
    with ExitStack() as opened, torch.no_grad():
        files: dict[str, Any] = {}
        for each in slices:
            if each.key not in saved:
                raise ValueError(f"{path} has no tensor {each.key}")
            shape, wanted = saved[each.key]["shape"], list(each.spec.shape)
            if shape != wanted:
                raise ValueError(f"{path}: {each.key} is {shape}, this model's {wanted}")
            own = each.spec.local_slices
            each.local[len(each.spec.real(each.local)) :].zero_()
            for one in saved[each.key]["slices"]:
                source, target = [], []  # what both have in common, in the coordinates of each
                for offset, size, cut in zip(one["offset"], one["shape"], own, strict=True):
                    start, stop = max(offset, cut.start), min(offset + size, cut.stop)
                    source.append(slice(start - offset, stop - offset))
                    target.append(slice(start - cut.start, stop - cut.start))
                if any(dim.start >= dim.stop for dim in source):
                    continue
                if (name := one["file"]) not in files:
                    files[name] = opened.enter_context(safe_open(path / name, "pt"))
                values = files[name].get_slice(each.key)[tuple(source)]
                each.local[tuple(target)].copy_(values)


def load_weights(
    checkpoint: Checkpoint,
    weights: Iterable[TensorSlice],
    *,
    missing: Collection[str] = (),
    surplus: Collection[str] = (),
) -> None:
    """Fill weights, keyed by parameter name, from a checkpoint at whatever precision: from its fp32
    masters where it has them, since the weights were rounded from those.

    missing: modules (first components of names) of this model that are left as they are, and that
    the checkpoint may not have. surplus: modules of the checkpoint that this model may not have.
    Raises ValueError, naming the weight, where names or shapes do not match otherwise.
    """
    path, saved = checkpoint.path, checkpoint.manifest["tensors"]
    wanted = {each.key: each for each in weights if each.key.partition(".")[0] not in missing}
    found = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    if lacking := wanted.keys() - found:
        raise ValueError(f"{path} has no {min(lacking)}, which this model needs")
    if more := {name for name in found - wanted.keys() if name.partition(".")[0] not in surplus}:
        raise ValueError(f"{path} has {min(more)}, for which this model has no use")
    slices = [
        replace(each, key=key if (key := f"master.{name}") in saved else f"model.{name}")
        for name, each in wanted.items()
    ]
    load_checkpoint(checkpoint, slices)
