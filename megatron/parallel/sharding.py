"""How each parameter is laid out over the mesh: said once by its layer, read by everything else.

Initialisation, gradient reduction, the global norm, checkpoints and conversion all read the table
`sharding_specs(model)`. A spec belongs to the module and not to the tensor, because `deepcopy`,
`fully_shard` and all that brings a model off meta replace the tensor and lose what hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.parallel.mesh import Axis
from megatron.parallel.random import derive_seed

if TYPE_CHECKING:
    from megatron.parallel.gradients import Slot


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """One parameter, whole and cut.

    shape: the whole parameter as it is saved, that is with the true number of rows.
    cuts: (dim, axis) for every dim that is cut into equal parts along an axis.
    padded_rows: size of dim 0 with the padding that makes it divisible; None for no padding.
    partial: axes over which each rank's gradient is one term of a sum.
    std: standard deviation of the normal initialisation; None for the constant `fill`.
    decay: whether weight decay applies (not to biases and norms).
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Axis], ...] = ()
    padded_rows: int | None = None
    partial: tuple[Axis, ...] = ()
    std: float | None = None
    fill: float = 0.0
    decay: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, padding included."""
        sizes = list(self.shape)
        sizes[0] = self.padded_rows or sizes[0]
        for dim, axis in self.cuts:
            assert sizes[dim] % axis.size == 0, f"{self.shape} dim {dim} on {axis.size} ranks"
            sizes[dim] //= axis.size
        return tuple(sizes)

    @property
    def place(self) -> tuple[slice, ...]:
        """Where the real rows of this rank's part lie in the whole parameter; may be empty."""
        place = [slice(0, size) for size in self.shape]
        for dim, axis in self.cuts:
            part = self.local_shape[dim]
            bounds = (axis.rank * part, (axis.rank + 1) * part)
            place[dim] = slice(*(min(bound, self.shape[dim]) for bound in bounds))
        return tuple(place)

    def real(self, local: Tensor) -> Tensor:
        """View of this rank's part without padding rows."""
        return local[tuple(slice(0, cut.stop - cut.start) for cut in self.place)]


class ShardedModule(nn.Module):
    """A module that says how its own parameters are laid out.

    slots: where training adds up their gradients, by name; none without gradient buffers.
    """

    specs: dict[str, ShardingSpec]
    slots: dict[str, Slot]

    def __init__(self) -> None:
        super().__init__()
        self.specs = {}
        self.slots = {}

    def add_parameter(self, name: str, spec: ShardingSpec) -> None:
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(spec.local_shape)))


def sharding_specs(model: nn.Module) -> dict[str, ShardingSpec]:
    """{full parameter name: spec}, in the order of `model.named_parameters()`."""
    table = {
        f"{prefix}.{name}" if prefix else name: spec
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, spec in module.specs.items()
    }
    names = [name for name, _ in model.named_parameters()]
    assert set(names) == set(table), f"without a sharding spec: {set(names) ^ set(table)}"
    return {name: table[name] for name in names}


def initial_value(name: str, spec: ShardingSpec, seed: int) -> Tensor:
    """The whole parameter [spec.shape], fp32 on the CPU: a function of (seed, name) alone.

    It is drawn whole on every rank and then cut, so that no layout changes the model.
    """
    whole = torch.empty(spec.shape)
    if spec.std is None:
        return whole.fill_(spec.fill)
    generator = torch.Generator().manual_seed(derive_seed(seed, "initialise", name))
    return whole.normal_(0.0, spec.std, generator=generator)


def materialize(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, seed: int | None
) -> nn.Module:
    """Give a model that was built on meta its memory and initial values; the only such place.

    seed: None leaves the values undefined, for a model that is loaded next.
    """
    # Not by to_empty(): for an empty_like() of what is on meta torch imports the symbolic algebra
    # of its compiler, which takes half a second.
    parameters = {
        name: nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
        for name, parameter in model.named_parameters()
    }
    model.load_state_dict(parameters, assign=True)
    if seed is None:
        return model
    with torch.no_grad():
        for name, spec in sharding_specs(model).items():
            load_whole(parameters[name], initial_value(name, spec, seed), spec)
    return model


def load_whole(local: Tensor, whole: Tensor, spec: ShardingSpec) -> None:
    """Copy this rank's part of a whole parameter into `local`; padding rows become zero."""
    assert whole.shape == spec.shape, f"{tuple(whole.shape)} is not {spec.shape}"
    local.zero_()
    spec.real(local).copy_(whole[spec.place])
