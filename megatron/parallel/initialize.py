"""Seeds, and memory and initial values of a model that is built on meta.

Every rank draws each whole parameter from (seed, name) and keeps its shard, so that the model is
the same at every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron.parallel import sharding
from megatron.parallel.mesh import Mesh


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed that depends only on the key, and not on the machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_kernels(seed: int, mesh: Mesh, step: int, micro_batch: int, *stage: int) -> None:
    """Seed the default generators, from which attention's kernel draws its dropout. A resumed run
    draws the same as an undisturbed one at the same layout. Ranks draw for their own heads.

    stage: the virtual pipeline stage, if this rank has several."""
    where = (axis.rank for axis in mesh.axes)
    torch.manual_seed(derive_seed(seed, "kernels", step, micro_batch, *where, *stage))


def initial_value(name: str, spec: sharding.ShardingSpec, seed: int) -> Tensor:
    """Initial value of the whole parameter, a function only of (seed, name): fp32 on the CPU."""
    return spec.draw(torch.Generator().manual_seed(derive_seed(seed, "initialise", name)))


def materialize(
    model: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    values: Callable[[int], Iterable[tuple[str, Tensor]]] | None = None,
) -> nn.Module:
    """Give a model that is on meta its memory and initial values.

    seed: None leaves values undefined, for a model that is loaded next. values: maps a seed to
    (name, whole tensor) of every parameter, with a few in memory at a time; by default the values
    are those of the specs. Raises ValueError for a parameter of torch's own layers if there is a
    seed and no `values`: build a model with such layers on the device at once.
    """
    give_memory(model, lambda each: torch.empty(each.shape, dtype=dtype, device=device))
    if seed is not None:
        table = sharding.owned_specs(model) if values is None else sharding.sharding_specs(model)
        parameters = dict(model.named_parameters())
        slices = {n: sharding.TensorSlice(n, table[n], parameters[n].detach()) for n in table}
        set_values(model, slices, seed, values)
    return model


def give_memory(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Give each parameter the memory that `make` returns, of its shape; values are undefined."""
    # Not by to_empty(): for the empty_like() of a meta tensor, torch imports the symbolic algebra
    # of its compiler, which takes half a second.
    real = {
        id(parameter): nn.Parameter(make(parameter), parameter.requires_grad)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for name, parameter in [*module.named_parameters("", False, False)]:
            module.register_parameter(name, real[id(parameter)])
        if isinstance(module, sharding.ShardedModule) and module.values_check:
            module.values_check.remove()


@torch.no_grad()
def set_values(
    model: nn.Module,
    slices: Mapping[str, sharding.TensorSlice],
    seed: int,
    values: Callable[[int], Iterable[tuple[str, Tensor]]] | None = None,
) -> None:
    """Fill this rank's part of each parameter, `slices` by name, with initial values, rounded to
    the parameter's dtype; see `materialize`."""
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if values is None:
        table = sharding.owned_specs(model)
        if others := [name for name in dtypes if name not in table]:
            raise ValueError(
                f"{others[0]} has no sharding spec that says its initial values: build the model "
                'without torch.device("meta"), and materialize has nothing to do'
            )
        drawn: Iterable[tuple[str, Tensor]] = (
            (name, initial_value(name, spec, seed)) for name, spec in table.items()
        )
    else:
        drawn = values(seed)
    for name, whole in drawn:
        if name in slices:  # a shared parameter is there under one name
            sharding.load_whole(slices[name].local, whole.to(dtypes[name]), slices[name].spec)
