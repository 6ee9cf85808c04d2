"""The layer factory: a model names its layers and their whole sizes, and does not know how they are
cut. Another way to cut a model is another factory, and no change to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.parallel import layers, layers_2d, layers_3d, layers_llama, layers_whole
from megatron.parallel.dropout import Dropout
from megatron.parallel.flex_dropout import FlexAttentionCore
from megatron.parallel.layers_apex import ApexLayerNorm
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.parallelize import parallelize

Maker = Callable[..., nn.Module]


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one pipeline rank builds; by default all of it.

    numbers: of its layers, in the whole model. is_first: whether it has what comes before the first
    layer; is_last: what comes behind the last one.
    """

    numbers: tuple[int, ...] | None = None
    is_first: bool = True
    is_last: bool = True

    def layers(self, count: int) -> Sequence[int]:
        """The numbers of this rank's layers, of a model of so many."""
        return range(count) if self.numbers is None else self.numbers


WHOLE = ModelPart()


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """The makers of the layers that a model is built from; x is the stream [n, h]."""

    column: Maker  # (in, out, parts=1, bias=True, std=): x to the parallel region
    grouped_query: Maker  # (hidden, heads=, key_value_heads=, head_size=, bias=True, std=)
    row: Maker  # (in, out, bias=True, std=): from the parallel region to x
    linear: Maker  # (in, out, bias=True, std=): x to x, outside the parallel region
    gather: Maker  # (): x to the same whole on every rank, where the layers of `whole` go on
    input: Maker  # (in, out, bias=True, std=): [n, in] that is whole on every rank, to x
    output: Maker  # (in, out, bias=True, std=): x to a few columns, whole on every rank
    word_embedding: Maker  # (vocabulary, hidden, divisible_by=, std=, is_tied=False)
    position_embedding: Maker  # (positions, hidden, std=)
    rotary: Maker  # (head_size, base=, scaling=None): positions to turns of heads
    layer_norm: Maker  # (hidden, epsilon=)
    rms_norm: Maker  # (hidden, epsilon=)
    inner_layer_norm: Maker  # (hidden, epsilon=): inside the parallel region
    dropout: Maker  # (p, name): outside the parallel region
    attention_core: Maker  # (dropout, name): inside the parallel region
    head: Maker  # (vocabulary, hidden, divisible_by=, bias=False, untied_std=None): logits, losses
    checkpoint: Callable[..., Any]  # (function, *arguments): recompute in the backward
    whole: Callable[[], LayerFactory]  # whose x is whole on every rank, behind `gather`
    stream_shape: Callable[[int, int], tuple[int, int]]  # (n, h): of x what this rank holds
    exchange: Callable[[Any], Any]
    """(x [b, ..]): what is known of the samples that a rank reads, to the same of those that it
    holds in the parallel region."""
    part: ModelPart = WHOLE  # of the model, that this rank builds
    tensor: Axis = ALONE  # that layers are cut over
    parallelize: Callable[..., Any] | None = None
    """(model, plan): cuts a model that was not built from these layers, in place, and returns it,
    as the function of this name; None where this way of cutting cannot."""


LAYER_NORMS = {"torch": layers.LayerNorm, "apex": ApexLayerNorm}
CORES = {False: layers.AttentionCore, True: FlexAttentionCore}


def factory_1d(
    mesh: Mesh,
    seed: int,
    *,
    norm: str = "torch",
    draws_in_kernel: bool = False,
    by_flex: bool = False,
    part: ModelPart = WHOLE,
) -> LayerFactory:
    """The paper's: layers cut along the one tensor axis of the mesh; the rows of x, too, where the
    mesh's stream has several ranks (sequence parallelism).

    seed: of dropout. norm: whose kernel LayerNorm runs on, a key of LAYER_NORMS. draws_in_kernel:
    whether attention's kernel draws its dropout. by_flex: whether compiled layers drop by
    coordinates in torch's flex_attention.
    """
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
            part=part,
        ),
        stream_shape=lambda n, h: (n // mesh.stream.size, h),
        exchange=lambda x: x,
        parallelize=partial(parallelize, mesh=mesh),
        tensor=mesh.tensor,
        part=part,
    )


def factory_2d(
    mesh: Mesh,
    seed: int,
    *,
    norm: str = "torch",
    draws_in_kernel: bool = False,
    by_flex: bool = False,
    part: ModelPart = WHOLE,
) -> LayerFactory:
    """2D and 2.5D: tokens cut along rows, hidden columns along columns. Arguments: see factory_1d;
    torch's are the only norms."""
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
        part=part,
    )
    return factory


def factory_3d(mesh: Mesh, seed: int, **settings: Any) -> LayerFactory:
    """3D: as 2D outside the parallel region. Arguments: see factory_2d."""
    return replace(
        factory_2d(mesh, seed, **settings),
        column=partial(layers_3d.Linear3D, mesh),
        grouped_query=partial(layers_3d.GroupedQueryLinear3D, mesh),
        row=partial(layers_3d.Linear3D, mesh, is_inside=True),
        exchange=partial(layers_3d.exchange, mesh),
    )


FACTORIES = {"1d": factory_1d, "2d": factory_2d, "2.5d": factory_2d, "3d": factory_3d}
"""By the name that --tensor-parallel-mode gives them."""


def layer_factory(mesh: Mesh, seed: int = 0, **settings: Any) -> LayerFactory:
    """That of the mesh's tensor-parallel mode. Arguments: see factory_1d."""
    return FACTORIES[mesh.tensor_parallel_mode](mesh, seed, **settings)
