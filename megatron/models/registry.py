"""The kinds of model: the config that describes each, and what builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.config.model import BertConfig, FinetunedConfig, ModelConfig
from megatron.models.bert import BERT, FinetunedBert
from megatron.models.gpt2 import GPT2
from megatron.parallel.layers import factory_1d
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import RandomStreams
from megatron.parallel.sharding import materialize

MODELS: dict[str, tuple[type[ModelConfig], type[nn.Module]]] = {
    config.kind: (config, model)
    for config, model in (
        (ModelConfig, GPT2),
        (BertConfig, BERT),
        (FinetunedConfig, FinetunedBert),
    )
}


def config_of(manifest: Mapping[str, Any]) -> ModelConfig:
    """The config of the model of a checkpoint, from its manifest."""
    config, _ = MODELS[manifest["kind"]]
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in manifest["config"]["model"].items()
    }
    # What the first checkpoints called the full granularity.
    if settings.pop("checkpoint_activations", False):
        settings["recompute_granularity"] = "full"
    return config(**settings)


def build_model(
    config: ModelConfig, mesh: Mesh, vocab_size: int, *, seed: int | None, dtype: torch.dtype
) -> tuple[Any, RandomStreams]:
    """A model of the config's kind on this rank's device, with its initial weights, and the random
    streams it draws from.

    seed: None for a model that is loaded next and draws nothing.
    """
    streams = RandomStreams(seed or 0, mesh)
    _, make = MODELS[config.kind]
    with torch.device("meta"):
        model = make(config, factory_1d(mesh, streams, norm=config.layernorm_impl), vocab_size)
    materialize(model, device=mesh.device, dtype=dtype, seed=seed)
    return model, streams
