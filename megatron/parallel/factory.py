"""The layer factory: a model names its layers and their whole sizes, and does not know how they are
cut. Another way to cut a model is a row of `PAIRS`, and no change to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.libraries import load
from megatron.parallel import layers, layers_llama
from megatron.parallel import layers_grid as grid
from megatron.parallel.context import Context, core_of
from megatron.parallel.dropout import Dropout, block_attention
from megatron.parallel.flex_dropout import flex_or_blocks
from megatron.parallel.mesh import ALONE, Mesh


class ApexLayerNorm(layers.LayerNorm):
    """LayerNorm by the kernel of NVIDIA apex's FusedLayerNorm, which also computes in fp32. Raises
    UsageError if apex is not installed."""

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh, hidden_size, epsilon=epsilon)
        if self.hidden.size > 1:
            raise ValueError("apex's layer norm needs whole rows; LayerNorm takes shards")
        module = load("apex.normalization.fused_layer_norm", "--layernorm-impl torch")
        self.kernel = module.fused_layer_norm_affine

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.weight.shape, self.epsilon)


Maker = Callable[..., Any]
# By value of --tensor-parallel-mode: column, row, grouped_query and linear of LayerFactory.
PAIRS: dict[str, tuple[Maker, Maker, Maker, Maker]] = {
    "1d": (
        layers.ColumnParallelLinear,
        layers.RowParallelLinear,
        layers_llama.GroupedQueryLinear,
        grid.Linear,
    ),
    "2d": (grid.Linear2D, grid.Linear2D, grid.GroupedQueryLinear2D, grid.Linear2D),
    "3d": (
        grid.Linear3D,
        partial(grid.Linear3D, is_inside=True),
        grid.GroupedQueryLinear3D,
        grid.Linear2D,
    ),
}
PAIRS["2.5d"] = PAIRS["2d"]
LAYER_NORMS: dict[str, Maker] = {"torch": layers.LayerNorm, "apex": ApexLayerNorm}
# By name, as models that are cut by a plan are a folder above this one.
BY_PLAN = "megatron.huggingface.parallelize:parallelize"


class LayerFactory:
    """The makers of the layers that a model is built from; x is the stream [n, h]. The parallel
    region lies between a column and a row layer: columns or heads are cut there. Arguments: see
    `layer_factory`."""

    def __init__(
        self,
        mesh: Mesh,
        seed: int = 0,
        *,
        norm: str = "torch",
        draws_in_kernel: bool = False,
        by_flex: bool = False,
        custom: Mapping[str, Maker] | None = None,
    ) -> None:
        column, row, grouped_query, linear = PAIRS[mesh.tensor_parallel_mode]
        # (in, out, parts=1, bias=True, std=): x to the parallel region
        self.column: Maker = partial(column, mesh)
        # (hidden, heads=, key_value_heads=, head_size=, bias=True, std=): the same for q, k and v
        self.grouped_query: Maker = partial(grouped_query, mesh)
        # (in, out, bias=True, std=): from the parallel region to x
        self.row: Maker = partial(row, mesh)
        # (in, out, bias=True, std=): x to x, outside the parallel region
        self.linear: Maker = partial(linear, mesh)
        # (): x to x whole on every rank, for the layers of `whole`
        self.gather: Maker = partial(grid.Gather, mesh)
        # (in, out, bias=True, std=): [n, in], whole on every rank, to x
        self.input: Maker = partial(grid.InputLinear, mesh)
        # (in, out, bias=True, std=): x to a few columns, whole on every rank
        self.output: Maker = partial(grid.OutputLinear, mesh)
        # (vocabulary, hidden, divisible_by=, std=, is_tied=False)
        self.word_embedding: Maker = partial(layers.VocabParallelEmbedding, mesh)
        # (positions, hidden, std=)
        self.position_embedding: Maker = partial(layers.PositionEmbedding, mesh)
        # (head_size, base=, scaling=None): positions to cosines and sines
        self.rotary: Maker = layers_llama.RotaryEmbedding
        # (hidden, epsilon=), the last one inside the parallel region
        self.layer_norm: Maker = partial(LAYER_NORMS[norm], mesh)
        self.rms_norm: Maker = partial(layers.RMSNorm, mesh)
        self.inner_layer_norm: Maker = partial(layers.LayerNorm, mesh, is_inside=True)
        # (p, name): outside the parallel region
        self.dropout: Maker = partial(Dropout, seed, stream=mesh.stream, hidden=mesh.hidden)
        # (dropout, name): inside the parallel region
        self.attention_core: Maker = partial(
            core_of(mesh),
            mesh,
            seed,
            draws_in_kernel=draws_in_kernel,
            drop=flex_or_blocks if by_flex else block_attention,
        )
        # (vocabulary, hidden, divisible_by=, bias=False, untied_std=None): logits, losses
        self.head: Maker = partial(layers.VocabParallelHead, mesh)
        # (function, *arguments): recompute in the backward. Dropout by coordinates needs no state
        # of a generator for that; attention's kernel does.
        self.checkpoint: Callable[..., Any] = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=draws_in_kernel
        )
        # (): factory for layers after `gather`, whose x is whole
        settings: Any = {"norm": norm, "draws_in_kernel": draws_in_kernel, "by_flex": by_flex}
        settings["custom"] = custom
        self.whole = lambda: LayerFactory(replace(mesh, stream=ALONE), seed, **settings)
        # (n, h): shape of this rank's part of x
        self.stream_shape = lambda n, h: (n // mesh.stream.size, h // mesh.hidden.size)
        # (x [b, ..]): sends per-sample data, such as masks and positions, to the ranks that hold
        # these samples in the parallel region; returns x unchanged except in 3D
        self.exchange: Callable[[Any], Any] = lambda x: x
        if mesh.tensor_parallel_mode == "3d":
            self.exchange = partial(grid.exchange, mesh)
        # (model, plan): cuts a model that was not built from these layers, in place, and returns
        # it, see the function of this name; None if this mode cannot cut such models
        self.parallelize: Maker | None = None
        if mesh.tensor_parallel_mode == "1d":
            self.parallelize = lambda model, plan: resolve_name(BY_PLAN)(model, plan, mesh)
        # positions, masks and sums of a model whose ranks hold other tokens of a sample
        self.context = Context(mesh)
        self.tensor = mesh.tensor  # axis that cuts the layers
        self.stream = mesh.stream  # axis that cuts the rows of x: sequence parallelism
        for name, maker in (custom or {}).items():
            setattr(self, name, partial(maker, mesh))


def layer_factory(mesh: Mesh, seed: int = 0, **settings: Any) -> LayerFactory:
    """The factory of the mesh's tensor-parallel mode, which makes the layers named in
    megatron/parallel/factory.py: `column(in, out)`, `row(in, out)`, `layer_norm(hidden)` ...

    `attention_core(dropout, name)` makes attention of the mesh's `cp_comm_type`, which is called
    with q [b, a, s/c, d], k and v [b, g, s/c, d], mask=None and is_causal. Under context
    parallelism these have the tokens of this rank, at the positions
    `context.positions(s, device)`, int64 [s/c], of a sample of s tokens.

    seed: seed of dropout. settings: norm="torch", the kernel of LayerNorm, or in 1D "apex";
    draws_in_kernel=False, whether attention's kernel draws its dropout; by_flex=False, whether
    compiled layers drop by coordinates in torch's flex_attention; custom={name: maker}, layers
    in place of these, called with the mesh and then as these are.
    """
    return LayerFactory(mesh, seed, **settings)
