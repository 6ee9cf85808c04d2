"""The transformer of section 3 of the paper, in either order of norm and residual (section 5.2).

    b batch   s sequence   n = b s tokens   h hidden   a heads   d = h/a head size   f MLP's width
    t tensor-parallel size, which this file never reads: what is cut is left to the factory

    pre-LN, the paper's (figure 7, b)            post-LN, the original BERT's (figure 7, a)
        x = x + dropout(Attention(LayerNorm(x)))     x = LayerNorm(x + dropout(Attention(x)))
        x = x + dropout(MLP(LayerNorm(x)))           x = LayerNorm(x + dropout(MLP(x)))

The stream between layers is [n, h]; only attention unfolds it to [b, ...].

What the backward computes again (`recompute_granularity`) runs through the factory's `checkpoint`:
a layer, of which its input alone is kept, [n, h]; or attention's core, of which q, k and v are kept
and not the probabilities, [b, a/t, s, s]: much memory for little arithmetic.
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
    """What attention asks of megatron/inference/cache.py."""

    def append(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the layer `name`, of which k, v [b, a/t, s, d] are the last."""
        ...

    def mask(self, columns: int, device: torch.device) -> Tensor | None: ...

    def advance(self, columns: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What the layers know of the sequences whose tokens are the rows of the stream [n, h]."""

    count: int  # b; each has n / b tokens
    mask: Tensor | None  # bool [b or 1, 1, 1 or s, m], True where a query may look
    is_causal: bool  # query i looks at the keys up to i, and there is no mask
    rows: Tensor | None = None  # int64 [n], see `text_rows`
    core_rows: Tensor | None = None  # the same of the samples that attention holds
    cache: KeyValueCache | None = None  # of what was read before; evaluation only
    turns: tuple[Tensor, Tensor] | None = None  # of rotary positions, see RotaryEmbedding


def text_rows(batch: TextBatch) -> Tensor | None:
    """int64 [n]: keys of the tokens, which dropout is a function of; None without sample numbers.

    Each sequence of a sample has a number of its own.
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
    """Calls function(*arguments), and in the backward again if the config has this granularity."""
    if config.recompute_granularity != granularity:
        return _run
    # A compiled layer is one graph, which the checkpoint of its core is part of.
    is_inside = granularity == "selective"
    return factory.checkpoint if is_inside else torch.compiler.disable(factory.checkpoint)


def make_norm(config: ModelConfig, factory: LayerFactory) -> nn.Module:
    make = factory.rms_norm if config.normalization == "rms" else factory.layer_norm
    return make(config.hidden_size, epsilon=config.layernorm_epsilon)


def in_heads(x: Tensor, count: int, size: int) -> Tensor:
    """[n, a d] of `count` sequences, as heads of this size: [b, a, s, d]."""
    return x.view(count, -1, x.shape[1] // size, size).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention on [n, h]; each head lives whole on one rank."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, name: str) -> None:
        super().__init__()
        self.name = name
        self.of_query: Tensor | None = None  # see AttentionCore; of fewer heads of keys
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
        # Not unbound from one tensor: the compiler's kernel for the backward of that is slow.
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
# Of twice as many columns.
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(gated, by=F.silu),
    "geglu": partial(gated, by=F.gelu),
}


class MLP(nn.Module):
    """[n, h] to [n, f/t] to [n, h]; the activation acts on each rank's columns alone."""

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
    """Pre-LN: nothing but additions on the path of the residuals."""

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
    """One pipeline rank's layers; parameters and dropout are named by the number in the model."""

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
        """numbers: of the layers, in the model; None for all that are here."""
        for name in self.layers if numbers is None else map(str, numbers):
            x = self.layers[name](x, at)
        return x

    def rows(self, batch: TextBatch) -> Tensor | None:
        """`text_rows`, which dropout alone reads: 60 kernels, for which a GPU waits."""
        return text_rows(batch) if self.training and self.drops else None

    def stream(self, n: int) -> Tensor:
        """What passes between layers of n tokens on this rank, on meta: [n, h] or rows of it."""
        dtype = next(self.parameters()).dtype
        shape = self.stream_shape(n, self.hidden_size)
        return torch.empty(shape, dtype=dtype, device="meta")
