"""The layer factory: a model names its layers and their whole sizes, and does not know how they are
cut. Another way to cut a model is another factory, and no change to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.parallel import layers, layers_2d, layers_3d, layers_llama, layers_whole
from megatron.parallel.dropout import Dropout
from megatron.parallel.flex_dropout import FlexAttentionCore
from megatron.parallel.layers_apex import ApexLayerNorm
from megatron.parallel.mesh import ALONE, Axis, Mesh

Maker = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """The makers of the layers that a model is built from; x is the stream [n, h]."""

    column: Maker  # (in, out, parts=1, bias=True, std=): x to the parallel region
    grouped_query: Maker  # (hidden, heads=, key_value_heads=, head_size=, bias=True, std=)
    row: Maker  # (in, out, bias=True, std=): from the parallel region to x
    linear: Maker  # (in, out, bias=True, std=): x to x, outside the parallel region
    gather: Maker  # (): x to x whole on every rank, for the layers of `whole`
    input: Maker  # (in, out, bias=True, std=): [n, in], whole on every rank, to x
    output: Maker  # (in, out, bias=True, std=): x to a few columns, whole on every rank
    word_embedding: Maker  # (vocabulary, hidden, divisible_by=, std=, is_tied=False)
    position_embedding: Maker  # (positions, hidden, std=)
    rotary: Maker  # (head_size, base=, scaling=None): positions to cosines and sines
    layer_norm: Maker  # (hidden, epsilon=)
    rms_norm: Maker  # (hidden, epsilon=)
    inner_layer_norm: Maker  # (hidden, epsilon=): inside the parallel region
    dropout: Maker  # (p, name): outside the parallel region
    attention_core: Maker  # (dropout, name): inside the parallel region
    head: Maker  # (vocabulary, hidden, divisible_by=, bias=False, untied_std=None): logits, losses
    checkpoint: Callable[..., Any]  # (function, *arguments): recompute in the backward
    whole: Callable[[], LayerFactory]  # factory for layers after `gather`: their x is whole
    stream_shape: Callable[[int, int], tuple[int, int]]  # (n, h): shape of this rank's part of x
    exchange: Callable[[Any], Any]
    """(x [b, ..]): sends per-sample data, such as masks and positions, to the ranks that hold these
    samples in the parallel region; returns x unchanged except in 3D."""
    tensor: Axis = ALONE  # axis that cuts the layers
    parallelize: Callable[..., Any] | None = None
    """(model, plan): cuts a model that was not built from these layers, in place, and returns it,
    see the function of this name; None if this factory cannot cut such models."""


def _parallelize(model: nn.Module, plan: Any, mesh: Mesh) -> nn.Module:
    # By name: models that are cut by a plan are a folder above this one.
    return resolve_name("megatron.huggingface.parallelize:parallelize")(model, plan, mesh)


LAYER_NORMS = {"torch": layers.LayerNorm, "apex": ApexLayerNorm}
CORES = {False: layers.AttentionCore, True: FlexAttentionCore}


def factory_1d(
    mesh: Mesh,
    seed: int,
    *,
    norm: str = "torch",
    draws_in_kernel: bool = False,
    by_flex: bool = False,
) -> LayerFactory:
    """The paper's: the mesh's one tensor axis cuts the layers, and also the rows of x if the mesh's
    stream has several ranks (sequence parallelism). Arguments: see `layer_factory`."""
    return LayerFactory(
        column=partial(layers.ColumnParallelLinear, mesh),
        grouped_query=partial(layers_llama.GroupedQueryLinear, mesh),
        row=partial(layers.RowParallelLinear, mesh),
        linear=partial(layers_whole.Linear, mesh),
        gather=partial(layers_whole.Gather, mesh),
        input=partial(layers_whole.InputLinear, mesh),
        output=partial(layers_whole.OutputLinear, mesh),
        word_embedding=partial(layers.VocabParallelEmbedding, mesh),
        position_embedding=partial(layers.PositionEmbedding, mesh),
        rotary=layers_llama.RotaryEmbedding,
        layer_norm=partial(LAYER_NORMS[norm], mesh),
        rms_norm=partial(layers_llama.RMSNorm, mesh),
        inner_layer_norm=partial(layers.LayerNorm, mesh, is_inside=True),
        dropout=partial(Dropout, seed, stream=mesh.stream),
        attention_core=partial(CORES[by_flex], mesh, seed, draws_in_kernel=draws_in_kernel),
        head=partial(layers.VocabParallelHead, mesh),
        checkpoint=partial(checkpoint, use_reentrant=False, preserve_rng_state=draws_in_kernel),
        whole=lambda: factory_1d(
            replace(mesh, stream=ALONE),
            seed,
            norm=norm,
            draws_in_kernel=draws_in_kernel,
            by_flex=by_flex,
        ),
        stream_shape=lambda n, h: (n // mesh.stream.size, h),
        exchange=lambda x: x,
        parallelize=partial(_parallelize, mesh=mesh),
        tensor=mesh.tensor,
    )


def factory_2d(
    mesh: Mesh,
    seed: int,
    *,
    norm: str = "torch",
    draws_in_kernel: bool = False,
    by_flex: bool = False,
) -> LayerFactory:
    """2D and 2.5D: tokens are cut over the mesh's rows, hidden columns over its columns. Arguments:
    see factory_1d; the only norms are torch's."""
    assert norm == "torch"
    factory = LayerFactory(
        column=partial(layers_2d.Linear2D, mesh),
        grouped_query=partial(layers_2d.GroupedQueryLinear2D, mesh),
        row=partial(layers_2d.Linear2D, mesh),
        linear=partial(layers_2d.Linear2D, mesh),
        gather=nn.Identity,
        input=partial(layers_whole.InputLinear, mesh),
        output=partial(layers_whole.OutputLinear, mesh),
        word_embedding=partial(layers.VocabParallelEmbedding, mesh),
        position_embedding=partial(layers.PositionEmbedding, mesh),
        rotary=layers_llama.RotaryEmbedding,
        layer_norm=partial(layers.LayerNorm, mesh),
        rms_norm=partial(layers_llama.RMSNorm, mesh),
        inner_layer_norm=partial(layers.LayerNorm, mesh, is_inside=True),
        dropout=partial(Dropout, seed, hidden=mesh.hidden),
        attention_core=partial(CORES[by_flex], mesh, seed, draws_in_kernel=draws_in_kernel),
        head=partial(layers.VocabParallelHead, mesh),
        checkpoint=partial(checkpoint, use_reentrant=False, preserve_rng_state=draws_in_kernel),
        whole=lambda: factory,
        stream_shape=lambda n, h: (n, h // mesh.hidden.size),
        exchange=lambda x: x,
        tensor=mesh.tensor,
    )
    return factory


def factory_3d(mesh: Mesh, seed: int, **settings: Any) -> LayerFactory:
    """3D: the same as 2D outside the parallel region. Arguments: see factory_2d."""
    return replace(
        factory_2d(mesh, seed, **settings),
        column=partial(layers_3d.Linear3D, mesh),
        grouped_query=partial(layers_3d.GroupedQueryLinear3D, mesh),
        row=partial(layers_3d.Linear3D, mesh, is_inside=True),
        exchange=partial(layers_3d.exchange, mesh),
    )


FACTORIES = {"1d": factory_1d, "2d": factory_2d, "2.5d": factory_2d, "3d": factory_3d}
"""Factories by value of --tensor-parallel-mode."""


def layer_factory(mesh: Mesh, seed: int = 0, **settings: Any) -> LayerFactory:
    """The factory of the mesh's tensor-parallel mode.

    seed: seed of dropout. settings: norm="torch", the kernel of LayerNorm, or "apex";
    draws_in_kernel=False, whether attention's kernel draws its dropout; by_flex=False, whether
    compiled layers drop by coordinates in torch's flex_attention.
    """
    return FACTORIES[mesh.tensor_parallel_mode](mesh, seed, **settings)
