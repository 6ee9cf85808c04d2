"""The bundle of layer makers a model is built from.

A model names its layers and their shapes; the factory decides how they are cut. `factory_1d` is the
paper's; another way to cut a model is another factory, and no change to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.parallel.layers import (
    LAYER_NORMS,
    AttentionCore,
    ColumnParallelLinear,
    Linear,
    PositionEmbedding,
    RowParallelLinear,
    SharedDropout,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import RandomStreams

Maker = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """Makers, called with whole sizes; arguments and shapes are those of `factory_1d`'s layers."""

    column: Maker  # (in, out, parts=, std=): [n, in] to the parallel region
    row: Maker  # (in, out, std=): from the parallel region to [n, out]
    linear: Maker  # (in, out, std=): outside the parallel region
    word_embedding: Maker  # (vocabulary, hidden, divisible_by=, std=)
    position_embedding: Maker  # (positions, hidden, std=)
    norm: Maker  # (hidden, epsilon=)
    dropout: Maker  # (p, name): outside the parallel region
    attention_core: Maker  # (dropout, name): inside the parallel region
    head: Maker  # (vocabulary, bias_divisible_by=None): logits or losses of [n, h], tied
    checkpoint: Callable[..., Tensor]  # (function, *arguments): recompute in the backward


def factory_1d(mesh: Mesh, streams: RandomStreams, *, norm: str = "torch") -> LayerFactory:
    """The paper's: layers cut along the one tensor axis of the mesh.

    norm: whose kernel LayerNorm runs on, a key of LAYER_NORMS.
    """
    make: Any = {
        "column": ColumnParallelLinear,
        "row": RowParallelLinear,
        "linear": Linear,
        "word_embedding": VocabParallelEmbedding,
        "position_embedding": PositionEmbedding,
        "norm": LAYER_NORMS[norm],
        "head": VocabParallelHead,
    }
    return LayerFactory(
        **{name: partial(layer, mesh) for name, layer in make.items()},
        dropout=partial(SharedDropout, streams),
        attention_core=partial(AttentionCore, streams),
        checkpoint=streams.checkpoint,
    )
