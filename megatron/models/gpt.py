"""Transformers that predict the next token, in one file: layers, decoder, GPT-2.

    b batch   s sequence   n = b s tokens   h hidden   a heads   d = h/a head size   f MLP's width
    v padded vocabulary
    t tensor-parallel size, which this file never reads: the factory decides what is cut

A model is a list of stages: `embed`, each layer, `loss`. A batch holds tensors on its device.
A pipeline rank keeps a slice of this list, with the names of the whole model (models/build.py).

A layer is that of section 3 of the paper, in either order of norm and residual (section 5.2):

    pre-LN, the paper's (figure 7, b)            post-LN, the original BERT's (figure 7, a)
        x = x + dropout(Attention(LayerNorm(x)))     x = LayerNorm(x + dropout(Attention(x)))
        x = x + dropout(MLP(LayerNorm(x)))           x = LayerNorm(x + dropout(MLP(x)))

Hidden states between layers are [n, h], and a rank may hold a part of them; only attention unfolds
them to [b, ...].

Recomputed parts (`recompute_granularity`) run through the factory's `checkpoint`. A whole layer
keeps only its input, [n, h]. The attention core keeps q, k and v but not the probabilities,
[b, a/t, s, s], which saves much memory for little arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig, RecomputeGranularity, TextModelConfig
from megatron.data.batch import TextBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.cache import KeyValueCache
from megatron.parallel import kernels
from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import LayerFactory
from megatron.parallel.layers_llama import gated
from megatron.parallel.ring import Visible


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Facts about the sequences whose tokens are the rows of the hidden states [n, h]."""

    count: int  # b; each has n / b tokens
    # bool [b or 1, 1, 1 or s, m], True where a query may attend; of the ring see Context
    mask: Tensor | Visible | None
    is_causal: bool  # query i attends to the keys up to i, without a mask
    dropout_keys: Tensor | None = None  # int64 [n], see the function of this name
    attention_dropout_keys: Tensor | None = None  # the same for the samples that attention holds
    cache: KeyValueCache | None = None  # keys and values read so far; evaluation only
    rotary_cos_sin: tuple[Tensor, Tensor] | None = None  # see RotaryEmbedding


def dropout_keys(batch: TextBatch) -> Tensor | None:
    """Dropout keys of the tokens, int64 [n]: masks depend on them. None without sample numbers.

    Each sequence of a sample has its own number.
    """
    if batch.numbers is None:
        return None
    *samples, size = batch.tokens.shape
    several, device = prod(samples[1:]), batch.numbers.device
    numbers = batch.numbers[:, None] * several + torch.arange(several, device=device)
    positions = (
        torch.arange(size, device=device) if batch.token_order is None else batch.token_order
    )
    return row_keys(numbers.flatten(), positions)


def _call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


def maybe_checkpoint(
    config: ModelConfig, factory: LayerFactory, granularity: RecomputeGranularity
) -> Callable[..., Tensor]:
    """Function that calls function(*arguments), which the backward repeats if the config has this
    granularity."""
    if config.recompute_granularity != granularity:
        return _call
    # A compiled layer is one graph, and the checkpoint of its core is part of this graph.
    is_in_graph = granularity == "selective"
    return factory.checkpoint if is_in_graph else torch.compiler.disable(factory.checkpoint)


def make_norm(config: ModelConfig, factory: LayerFactory) -> nn.Module:
    make = factory.rms_norm if config.normalization == "rms" else factory.layer_norm
    return make(config.hidden_size, epsilon=config.layernorm_epsilon)


def in_heads(x: Tensor, count: int, size: int) -> Tensor:
    """Splits x [.., a d] of `count` sequences into heads of this size: [b, a, s, d]."""
    return x.view(count, -1, x.shape[-1] // size, size).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention of [n, h] or [b, s, h], to [n, h]; a head lives whole on a rank."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, name: str) -> None:
        super().__init__()
        self.name = name
        # int64 [a/t], see AttentionCore; None where the queries of a key/value head are adjacent.
        self.kv_head_index: Tensor | None = None
        h, std = config.hidden_size, config.init_method_std
        self.head_size = config.head_size
        self.qkv = self.make_qkv(config, factory)
        self.core = factory.attention_core(config.attention_dropout, f"{name}.core")
        self.maybe_checkpoint = maybe_checkpoint(config, factory, "selective")
        # The paper's 1 / sqrt(2 N): N layers add 2 N outputs to the residual path.
        out_std = std / sqrt(2 * config.num_layers)
        self.output = factory.row(h, h, bias=config.has_biases, std=out_std)

    def make_qkv(self, config: ModelConfig, factory: LayerFactory) -> nn.Module:
        h = config.hidden_size
        return factory.column(h, h, parts=3, std=config.init_method_std)

    def heads_of(self, x: Tensor, at: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [b, a/t, s, d]."""
        # Not `unbind`, which is slower: its backward is one Triton kernel of 0.66 ms (124M).
        q, k, v = (in_heads(each, at.count, self.head_size) for each in self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        q, k, v = self.heads_of(x, at)
        if at.cache is not None:
            k, v = at.cache.append(self.name, k, v)
        keys, index = at.attention_dropout_keys, self.kv_head_index
        how = at.mask, at.is_causal, keys, index, at.cache is not None
        heads = self.maybe_checkpoint(self.core, q, k, v, *how)
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
    """Maps [n, h] or [b, s, h] to [n, f/t] to [n, h]. The activation acts on each rank's own
    columns, so nothing is sent between the two matmuls."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.activation = (ACTIVATIONS | GATED)[config.activation]
        h, f, std = config.hidden_size, config.ffn_size, config.init_method_std
        parts, bias = 2 if config.activation in GATED else 1, config.has_biases
        self.up = factory.column(h, f, parts=parts, bias=bias, std=std)
        self.down = factory.row(f, h, bias=bias, std=std / sqrt(2 * config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)).flatten(0, -2))


OWN = ("megatron.models.", "megatron.parallel.")


class TransformerLayer(nn.Module):
    """Pre-LN: the residual path has only additions."""

    make_attention: ClassVar[type[Attention]] = Attention
    compiles: ClassVar[str] = "whole"  # see train/compiled.py

    def __init__(self, config: ModelConfig, factory: LayerFactory, number: int) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = make_norm(config, factory)
        self.attention = self.make_attention(config, factory, f"{name}.attention")
        self.attention_dropout = factory.dropout(config.hidden_dropout, f"{name}.attention")
        self.mlp_norm = make_norm(config, factory)
        self.mlp = MLP(config, factory)
        self.mlp_dropout = factory.dropout(config.hidden_dropout, f"{name}.mlp")
        self.maybe_checkpoint = maybe_checkpoint(config, factory, "full")
        # A layer of one's own takes [n, h] alone, as those of sequence parallelism do.
        is_ours = all(type(each).__module__.startswith(OWN) for each in self.modules())
        self.takes_sequences = is_ours and factory.stream.size == 1

    def __call__(self, x: Tensor, at: Sequences) -> Tensor:
        return self.maybe_checkpoint(super().__call__, x, at)

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        if self.takes_sequences and torch.compiler.is_compiling() and not kernels.is_on_cpu(x):
            # As [b, s, h] biases have cheaper gradients, see kernels.sum_rows. And as a view is no
            # input of the graph, torch keeps x + y for the backward, which else adds them again:
            # kernels of a layer of 124M read and write 1,085 MiB, not 1,302.
            x = x.unflatten(0, (at.count, -1))
        y = self.attention_dropout(self.attention(self.attention_norm(x), at), at.dropout_keys)
        x = x + y.view_as(x)
        return x.flatten(0, -2) + self.mlp_dropout(self.mlp(self.mlp_norm(x)), at.dropout_keys)


class PostNormLayer(TransformerLayer):
    """Post-LN: the same parts, and every sum passes through a norm. With this order models larger
    than BERT-large degrade (section 5.2)."""

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, at), at.dropout_keys))
        return self.mlp_norm(x + self.mlp_dropout(self.mlp(x), at.dropout_keys))


class Transformer(nn.Module):
    """The layers; names of parameters and dropout use the number in the model."""

    def __init__(
        self,
        config: ModelConfig,
        factory: LayerFactory,
        make: type[TransformerLayer] = TransformerLayer,
    ) -> None:
        super().__init__()
        self.hidden_size, self.stream_shape = config.hidden_size, factory.stream_shape
        self.drops = config.drops
        self.layers = nn.ModuleDict(
            {str(number): make(config, factory, number) for number in range(config.num_layers)}
        )

    def forward(self, x: Tensor, at: Sequences, numbers: Sequence[int] | None = None) -> Tensor:
        """numbers: numbers in the model of the layers to run; None for all."""
        for name in self.layers if numbers is None else map(str, numbers):
            x = self.layers[name](x, at)
        return x

    def dropout_keys(self, batch: TextBatch) -> Tensor | None:
        """See the function of this name. None if no dropout reads them: they cost 60 small
        kernels a batch, for which a GPU waits."""
        return dropout_keys(batch) if self.training and self.drops else None

    def stream_like(self, n: int) -> Tensor:
        """Hidden states of n tokens between layers on this rank, on meta: [n, h] or rows of it."""
        dtype = next(self.parameters()).dtype
        shape = self.stream_shape(n, self.hidden_size)
        return torch.empty(shape, dtype=dtype, device="meta")


class Decoder(nn.Module):
    """Common base of GPT-2 and Llama: word embedding, transformer, final norm, and a head that may
    be tied to the word embedding."""

    terms: ClassVar = ("loss",)
    make_layer: ClassVar[type[TransformerLayer]] = TransformerLayer
    learns_positions: ClassVar = False

    def __init__(self, config: TextModelConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the true one; the factory pads it."""
        super().__init__()
        self.vocab_size = vocab_size
        self.positions, self.is_tied = config.max_position_embeddings, config.has_tied_head
        h, std = config.hidden_size, config.init_method_std
        rows = config.make_vocab_size_divisible_by
        self.word_embedding: nn.Module | None = factory.word_embedding(
            vocab_size, h, divisible_by=rows, std=std, is_tied=self.is_tied
        )
        if self.learns_positions:
            self.position_embedding = factory.position_embedding(self.positions, h, std=std)
        self.embedding_dropout = factory.dropout(config.dropout_of_embeddings, "embedding")
        self.transformer = Transformer(config, factory, self.make_layer)
        self.exchange, self.context = factory.exchange, factory.context
        self.final_norm = make_norm(config, factory)
        self.head = factory.head(
            vocab_size, h, divisible_by=rows, untied_std=None if self.is_tied else std
        )

    def stages(self) -> list[list[str]]:
        """Names of the modules of each stage: of `embed`, of each layer, of `loss`. A pipeline rank
        has those of its stages, and all modules that are in no stage."""
        first = ["word_embedding", "embedding_dropout"]
        first += ["position_embedding"] * self.learns_positions
        layers = [[f"transformer.layers.{number}"] for number in self.transformer.layers]
        # Both ends hold a tied embedding; the sum of its two gradients is over their group.
        last = ["final_norm", "head"] + ["word_embedding"] * self.is_tied
        return [first, *layers, last]

    def denominators(self, batch: GPT2Batch) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def embed(self, batch: GPT2Batch) -> Tensor:
        """Sum of the embeddings, [n, h], without dropout, which is in `layers`."""
        assert self.word_embedding is not None
        x = self.word_embedding(batch.tokens.flatten())
        if self.learns_positions:
            x = x + self.position_embedding(batch.positions.flatten())
        return x

    def rotary_cos_sin(self, batch: GPT2Batch) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of rotary positions; None for a model without rotary positions."""
        return None

    def stream(self, batch: GPT2Batch, number: int) -> Tensor:
        """Input of layer `number` for a batch of arrays, as a tensor on meta."""
        return self.transformer.stream_like(batch.tokens.size)

    def layers(
        self,
        x: Tensor,
        batch: GPT2Batch,
        cache: KeyValueCache | None = None,
        *,
        numbers: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states after the last layer, or after the last of `numbers`.

        cache: keys and values of the tokens read so far; the batch's are added. Evaluation only.
        """
        if cache is None:
            self.context.require_local(batch)
        starts, size = self.exchange(batch.document_starts), batch.tokens.shape[1]
        keys = self.transformer.dropout_keys(batch)
        # Attention is causal by a mask for documents and where the cache needs one, otherwise by
        # is_causal; a single query without a mask is the last of all tokens and sees them all.
        mask = self.context.document_mask(starts)
        if cache is not None:
            assert mask is None
            assert not self.training
            mask = cache.mask(size, x.device)
        at = Sequences(
            count=len(batch.tokens),
            mask=mask,
            is_causal=mask is None and (cache is None or size > 1),
            dropout_keys=keys,
            attention_dropout_keys=self.context.attention_keys(
                self.exchange(keys), len(batch.tokens)
            ),
            cache=cache,
            rotary_cos_sin=self.rotary_cos_sin(batch),
        )
        # Dropout of the embeddings is here, so that a stage hashes the keys of a batch once.
        if numbers is None or 0 in numbers:
            x = self.embedding_dropout(x, keys)
        x = self.transformer(x, at, numbers)
        if cache is not None:
            cache.advance(size)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """This rank's columns [m, v/t] of the logits, from rows [m, h] of the `layers` output."""
        return self.head(self.final_norm(x), self.word_embedding)

    def losses(self, x: Tensor, batch: GPT2Batch, scales: Tensor | None = None) -> Tensor:
        """Loss of each label [n]; with floating-point scales [b, s], the sum of scale x loss."""
        labels = batch.labels.flatten()
        scales = None if scales is None else scales.flatten()
        return self.head(self.final_norm(x), self.word_embedding, labels, scales)

    def loss(self, x: Tensor, batch: GPT2Batch, loss_scales: Tensor) -> Tensor:
        """Cross-entropy of each counted token: see Objective."""
        return self.losses(x, batch, batch.loss_mask.double() * loss_scales)[None]

    def forward(self, batch: GPT2Batch, loss_scales: Tensor | None = None) -> Tensor:
        """Runs all stages. With loss_scales see `loss`; without, this rank's columns [n, v/t] of
        the logits."""
        x = self.layers(self.embed(batch), batch)
        return self.logits(x) if loss_scales is None else self.loss(x, batch, loss_scales)


class GPT2(Decoder):
    """Learned positions, pre-LN layers with biases, a head tied to the word embedding."""

    learns_positions = True
