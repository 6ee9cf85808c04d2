"""Builds a model of any kind from its config."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from megatron.config.model import KindConfig
from megatron.config.parts import custom_layers
from megatron.errors import UsageError
from megatron.models.registry import find_kind
from megatron.parallel.factory import layer_factory
from megatron.parallel.initialize import materialize
from megatron.parallel.mesh import Mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan


def build_on_meta(
    config: KindConfig,
    mesh: Mesh,
    vocab_size: int,
    seed: int | None = None,
    pipeline: PipelinePlan = WHOLE_MODEL,
) -> Any:
    """A model of the config's kind, or this rank's part of it, without memory: for its names,
    shapes and sharding specs. Raises ValueError for a kind that cannot be cut into stages."""
    make = resolve_name(find_kind(config.kind, "kind").model)
    lacks = [name for name in ("stages", "stream") if not hasattr(make, name)]
    if pipeline.stages > 1 and lacks:
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline.ranks}: the kind of model {config.kind} has "
            f"no {' and no '.join(lacks)}; see megatron.models.gpt.Decoder"
        )
    custom, used = custom_layers(config.layers), {"factory"}
    make_factory = custom.pop("factory", layer_factory)

    def recorded(name: str, *sizes: Any, **settings: Any) -> Any:
        used.add(name)
        return custom[name](*sizes, **settings)

    factory = make_factory(
        mesh,
        seed or 0,
        custom={name: partial(recorded, name) for name in custom},
        norm=config.layernorm_impl,
        draws_in_kernel=config.draws_in_kernel(mesh.device.type),
        by_flex=config.attends_by_flex(mesh.device.type),
    )
    with torch.device("meta"):  # 96 layers take 0.06 s: each pipeline rank can make the whole model
        model = make(config, factory, vocab_size)
    for each in config.layers:
        if each.partition("=")[0] not in used:
            allowed = f"layers that a model of the kind {config.kind} has"
            raise UsageError("--layers", each, allowed)
    if pipeline.stages > 1:
        keep_stages(model, pipeline, mesh.pipeline.rank)
    return model


def keep_stages(model: Any, pipeline: PipelinePlan, rank: int) -> None:
    """Removes the modules of the stages that other pipeline ranks have. model: see
    megatron.models.gpt.Decoder.stages. Raises ValueError for a parameter in no stage: each pipeline
    rank would train a copy of its own."""
    embed, *layers, loss = model.stages()
    modules = (*embed, *chain(*layers), *loss)
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{module}.") for module in modules):
            raise ValueError(f"{type(model).__name__}.stages() has no module with {name}")
    kept = set[str](embed if rank == 0 else ())
    kept.update(*(layers[number] for number in pipeline.numbers(rank) or ()))
    kept.update(loss if rank == pipeline.ranks - 1 else ())
    for name in {*modules} - kept:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(module, nn.ModuleDict):
            del module[child]
        else:
            setattr(module, child, None)


def build_model(
    config: KindConfig,
    mesh: Mesh,
    vocab_size: int,
    *,
    seed: int | None,
    dtype: torch.dtype,
    pipeline: PipelinePlan = WHOLE_MODEL,
) -> Any:
    """A model of the config's kind on this rank's device, with its initial weights.

    seed: of initial weights and dropout; None for a model that is loaded next and has no dropout.
    pipeline: this rank builds its own stages of this plan.
    """
    model = build_on_meta(config, mesh, vocab_size, seed, pipeline)
    values = getattr(model, "initial_values", None)
    return materialize(model, device=mesh.device, dtype=dtype, seed=seed, values=values)
