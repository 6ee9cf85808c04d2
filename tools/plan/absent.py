"""Meshes of ranks that do not exist, to find the shapes and the work of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis, Calls, ControlGroup, Mesh, build_mesh


class AbsentAxis(Axis):
    """An axis whose calls the failure watch does not see."""

    @cached_property
    def calls(self) -> Calls:
        return Calls(self.name, [])

    @cached_property
    def channels(self) -> dict[tuple[int, int], Calls]:
        return defaultdict(lambda: Calls(self.name, []))


class AbsentRanks(ControlGroup):
    """Control group of this rank; the other ranks do not exist."""

    axis_class = AbsentAxis

    def new_group(self, name: str, groups: list[list[int]]) -> dist.ProcessGroup | None:
        own = next((each for each in groups if self.rank in each), None)
        if own is None:
            return None
        return dist.ProcessGroup(dist.HashStore(), own.index(self.rank), len(own))


def absent_mesh(
    sizes: Mapping[str, int], device: torch.device, *, stage: int = 0, **options: Any
) -> Mesh:
    """The mesh of the first rank at `stage` along the pipeline axis.

    sizes: of some axes; the others have size 1. options: see build_mesh. Needs no
    torch.distributed: a dispatch mode, such as tools.layouts.work.Meter, has to handle the
    collectives. Raises ValueError for a stage that the axis does not have.
    """
    world, stages = prod(sizes.values()), sizes.get("pipeline", 1)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of a pipeline axis of {stages} ranks")
    control = AbsentRanks(size=world, rank=stage * (world // stages))
    return build_mesh(sizes, device, control=control, **options)
