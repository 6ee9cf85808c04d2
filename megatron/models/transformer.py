"""The transformer of section 3 of the paper, in either order of norm and residual (section 5.2).

    b batch   s sequence   n = b s tokens   h hidden   a heads   d = h/a head size   f MLP's width
    t tensor-parallel size, which this file never reads: the factory decides what is cut

    pre-LN, the paper's (figure 7, b)            post-LN, the original BERT's (figure 7, a)
        x = x + dropout(Attention(LayerNorm(x)))     x = LayerNorm(x + dropout(Attention(x)))
        x = x + dropout(MLP(LayerNorm(x)))           x = LayerNorm(x + dropout(MLP(x)))

Hidden states between layers are [n, h]; only attention unfolds them to [b, ...].

Recomputed parts (`recompute_granularity`) run through the factory's `checkpoint`. A whole layer
keeps only its input, [n, h]. The attention core keeps q, k and v but not the probabilities,
[b, a/t, s, s], which saves much memory for little arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig, RecomputeGranularity
from megatron.data.batch import TextBatch
from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import LayerFactory
from megatron.parallel.layers_llama import gated


class KeyValueCache(Protocol):
    """Interface of megatron/inference/cache.py that attention uses."""

    def append(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [b, a/t, s, d]; returns all keys and values of the layer `name`."""
        ...

    def mask(self, columns: int, device: torch.device) -> Tensor | None: ...

    def advance(self, columns: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Facts about the sequences whose tokens are the rows of the hidden states [n, h]."""

    count: int  # b; each has n / b tokens
    mask: Tensor | None  # bool [b or 1, 1, 1 or s, m], True where a query may attend
    is_causal: bool  # query i attends to the keys up to i, without a mask
    rows: Tensor | None = None  # int64 [n], see `text_rows`
    core_rows: Tensor | None = None  # the same for the samples that attention holds
    cache: KeyValueCache | None = None  # keys and values read so far; evaluation only
    turns: tuple[Tensor, Tensor] | None = None  # cos and sin: see RotaryEmbedding


def text_rows(batch: TextBatch) -> Tensor | None:
    """Dropout keys of the tokens, int64 [n]: masks depend on them. None without sample numbers.

    Each sequence of a sample has its own number.
    """
    if batch.numbers is None:
        return None
    *samples, size = batch.tokens.shape
    several, device = prod(samples[1:]), batch.numbers.device
    numbers = batch.numbers[:, None] * several + torch.arange(several, device=device)
    places = torch.arange(size, device=device) if batch.places is None else batch.places
    return row_keys(numbers.flatten(), places)


def _run(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


def _runner(
    config: ModelConfig, factory: LayerFactory, granularity: RecomputeGranularity
) -> Callable[..., Tensor]:
    """Calls function(*arguments), and again in the backward if the config has this granularity."""
    if config.recompute_granularity != granularity:
        return _run
    # A compiled layer is one graph, and the checkpoint of its core is part of this graph.
    is_inside = granularity == "selective"
    return factory.checkpoint if is_inside else torch.compiler.disable(factory.checkpoint)


def make_norm(config: ModelConfig, factory: LayerFactory) -> nn.Module:
    make = factory.rms_norm if config.normalization == "rms" else factory.layer_norm
    return make(config.hidden_size, epsilon=config.layernorm_epsilon)


def in_heads(x: Tensor, count: int, size: int) -> Tensor:
    """Splits x [n, a d] of `count` sequences into heads of this size: [b, a, s, d]."""
    return x.view(count, -1, x.shape[1] // size, size).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention on [n, h]; each head lives whole on one rank."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, name: str) -> None:
        super().__init__()
        self.name = name
        self.of_query: Tensor | None = None  # see AttentionCore; set for fewer key/value heads
        h, std = config.hidden_size, config.init_method_std
        self.head_size = config.head_size
        self.qkv = self.make_qkv(config, factory)
        self.core = factory.attention_core(config.attention_dropout, f"{name}.core")
        self.run_core = _runner(config, factory, "selective")
        out_std = std / sqrt(2 * config.num_layers)
        self.output = factory.row(h, h, bias=config.has_biases, std=out_std)

    def make_qkv(self, config: ModelConfig, factory: LayerFactory) -> nn.Module:
        h = config.hidden_size
        return factory.column(h, h, parts=3, std=config.init_method_std)

    def heads_of(self, x: Tensor, at: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [b, a/t, s, d]."""
        # No unbind of one tensor: the compiler's kernel for its backward is slow.
        q, k, v = (in_heads(each, at.count, self.head_size) for each in self.qkv(x).chunk(3, dim=1))
        return q, k, v

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        q, k, v = self.heads_of(x, at)
        if at.cache is not None:
            k, v = at.cache.append(self.name, k, v)
        of_query = self.of_query
        heads = self.run_core(self.core, q, k, v, at.mask, at.is_causal, at.core_rows, of_query)
        return self.output(heads.transpose(1, 2).flatten(2).flatten(0, 1))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# Gated activations read twice as many columns.
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(gated, by=F.silu),
    "geglu": partial(gated, by=F.gelu),
}


class MLP(nn.Module):
    """Maps [n, h] to [n, f/t] to [n, h]; the activation acts on each rank's columns only."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.is_gated = config.activation in GATED
        self.activation = (ACTIVATIONS | GATED)[config.activation]
        h, f, std = config.hidden_size, config.ffn_size, config.init_method_std
        parts, bias = 2 if self.is_gated else 1, config.has_biases
        self.up = factory.column(h, f, parts=parts, bias=bias, std=std)
        self.down = factory.row(f, h, bias=bias, std=std / sqrt(2 * config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(self.activation(y))


class TransformerLayer(nn.Module):
    """Pre-LN: the residual path has only additions."""

    make_attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, factory: LayerFactory, number: int) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = make_norm(config, factory)
        self.attention = self.make_attention(config, factory, f"{name}.attention")
        self.attention_dropout = factory.dropout(config.hidden_dropout, f"{name}.attention")
        self.mlp_norm = make_norm(config, factory)
        self.mlp = MLP(config, factory)
        self.mlp_dropout = factory.dropout(config.hidden_dropout, f"{name}.mlp")
        self.run = _runner(config, factory, "full")

    def __call__(self, x: Tensor, at: Sequences) -> Tensor:
        return self.run(super().__call__, x, at)

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), at), at.rows)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), at.rows)


class PostNormLayer(TransformerLayer):
    """Post-LN: the same parts, and every sum passes through a norm."""

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, at), at.rows))
        return self.mlp_norm(x + self.mlp_dropout(self.mlp(x), at.rows))


class Transformer(nn.Module):
    """One pipeline rank's layers; names of parameters and dropout use the number in the model."""

    def __init__(
        self,
        config: ModelConfig,
        factory: LayerFactory,
        make: type[TransformerLayer] = TransformerLayer,
    ) -> None:
        super().__init__()
        numbers = factory.part.layers(config.num_layers)
        self.hidden_size, self.stream_shape = config.hidden_size, factory.stream_shape
        self.drops = config.drops
        self.layers = nn.ModuleDict(
            {str(number): make(config, factory, number) for number in numbers}
        )

    def forward(self, x: Tensor, at: Sequences, numbers: Iterable[int] | None = None) -> Tensor:
        """numbers: numbers in the model of the layers to run; None for all layers of this rank."""
        for name in self.layers if numbers is None else map(str, numbers):
            x = self.layers[name](x, at)
        return x

    def rows(self, batch: TextBatch) -> Tensor | None:
        """`text_rows`, or None if no dropout reads it: it takes 60 kernels that a GPU waits for."""
        return text_rows(batch) if self.training and self.drops else None

    def stream(self, n: int) -> Tensor:
        """Hidden states of n tokens between layers on this rank, on meta: [n, h] or rows of it."""
        dtype = next(self.parameters()).dtype
        shape = self.stream_shape(n, self.hidden_size)
        return torch.empty(shape, dtype=dtype, device="meta")
