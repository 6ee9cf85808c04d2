"""A model of any kind, from its config."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.models.registry import find_kind
from megatron.parallel.factory import FACTORIES
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import materialize


def build_on_meta(config: ModelConfig, mesh: Mesh, vocab_size: int, seed: int | None = None) -> Any:
    """A model of the config's kind without memory, for its names, shapes and sharding specs."""
    make = resolve_name(find_kind(config.kind, "kind").model)
    make_factory = FACTORIES[mesh.tensor_parallel_mode]
    factory = make_factory(
        mesh,
        seed or 0,
        norm=config.layernorm_impl,
        draws_in_kernel=config.draws_in_kernel(mesh.device.type),
    )
    with torch.device("meta"):
        return make(config, factory, vocab_size)


def build_model(
    config: ModelConfig, mesh: Mesh, vocab_size: int, *, seed: int | None, dtype: torch.dtype
) -> Any:
    """A model of the config's kind on this rank's device, with its initial weights.

    seed: of these and of dropout; None for a model that is loaded next and drops nothing.
    """
    model = build_on_meta(config, mesh, vocab_size, seed)
    return materialize(model, device=mesh.device, dtype=dtype, seed=seed)
