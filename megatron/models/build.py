"""Builds a model of any kind from its config."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch

from megatron.config.model import KindConfig
from megatron.models.registry import find_kind
from megatron.parallel.factory import FACTORIES, ModelPart
from megatron.parallel.initialize import materialize
from megatron.parallel.mesh import Mesh
from megatron.parallel.schedules import UNCUT, PipelinePlan


def build_on_meta(
    config: KindConfig,
    mesh: Mesh,
    vocab_size: int,
    seed: int | None = None,
    pipeline: PipelinePlan = UNCUT,
) -> Any:
    """A model of the config's kind, or this rank's part of it, without memory: for its names,
    shapes and sharding specs. Raises ValueError for a kind that cannot be cut into stages."""
    make = resolve_name(find_kind(config.kind, "kind").model)
    if pipeline.stages > 1 and not hasattr(make, "stream"):
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline.ranks}: the kind of model {config.kind} has "
            "no `stream`, which says what passes between pipeline stages"
        )
    rank, make_factory = mesh.pipeline.rank, FACTORIES[mesh.tensor_parallel_mode]
    factory = make_factory(
        mesh,
        seed or 0,
        norm=config.layernorm_impl,
        draws_in_kernel=config.draws_in_kernel(mesh.device.type),
        by_flex=config.attends_by_flex(mesh.device.type),
        part=ModelPart(
            numbers=pipeline.numbers(rank),
            is_first=rank == 0,
            is_last=rank == pipeline.ranks - 1,
        ),
    )
    with torch.device("meta"):
        return make(config, factory, vocab_size)


def build_model(
    config: KindConfig,
    mesh: Mesh,
    vocab_size: int,
    *,
    seed: int | None,
    dtype: torch.dtype,
    pipeline: PipelinePlan = UNCUT,
    draws: bool = True,
) -> Any:
    """A model of the config's kind on this rank's device, with its initial weights.

    seed: of initial weights and dropout; None for a model that is loaded next and has no dropout.
    pipeline: this rank builds its own stages of this plan. draws: False leaves the weights
    undefined, for a model that is loaded next and has dropout.
    """
    model = build_on_meta(config, mesh, vocab_size, seed, pipeline)
    given, values = seed if draws else None, getattr(model, "initial_values", None)
    return materialize(model, device=mesh.device, dtype=dtype, seed=given, values=values)
