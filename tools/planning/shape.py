"""What is planned, in the paper's letters: a model, its batch, and how both are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.config.checks import UsageError, flag
from megatron.config.model import BertConfig, RecomputeGranularity, TextModelConfig
from megatron.config.pretrain import PretrainConfig
from megatron.config.training import BertDataConfig

GPT2_VOCABULARY = 50_257  # where a preset leaves it to the tokenizer
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a weight and of an activation
WIDE = 4  # of gradients, masters and moments, of which none is narrower than fp32
FILLED = 16  # BERT's masked tokens come in a multiple of so many

# What the formulas of a plan are of.
ASSUMED: dict[str, Callable[[TextModelConfig], tuple[object, ...]]] = {
    "ffn_hidden_size": lambda model: (None, 4 * model.hidden_size),
    "activation": lambda model: ("gelu", "gelu_tanh"),
    "untie_embeddings_and_output_weights": lambda model: (False,),
    "attention_dropout_rng": lambda model: (None,),
    "embedding_dropout": lambda model: (None, model.hidden_dropout),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One step on every rank."""

    kind: Literal["gpt2", "bert"]
    layers: int  # L
    hidden: int  # h
    heads: int  # a
    sequence: int  # s
    positions: int
    vocabulary: int  # V
    divisible_by: int  # rows of the vocabulary are a multiple of this times t
    batch: int  # b
    micro_batches: int  # m
    tensor: int  # t
    data: int  # d
    width: int  # bytes
    recompute: RecomputeGranularity = "none"
    attention_dropout: bool = True
    hidden_dropout: bool = True
    post_norm: bool = False  # BERT's original order
    masked: float = 0.0  # of BERT's tokens: the share that is predicted

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    @property
    def tokens(self) -> int:
        """n"""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Of the global batch."""
        return self.tokens * self.micro_batches * self.data

    @property
    def predicted(self) -> int:
        """Tokens of a micro-batch with a loss."""
        return self.tokens if self.kind == "gpt2" else round(self.masked * self.tokens)

    @property
    def scored(self) -> int:
        """k: rows of the output layer, which BERT's masked tokens are filled up to."""
        return self.tokens if self.kind == "gpt2" else -(-self.predicted // FILLED) * FILLED

    @property
    def padded(self) -> int:
        """v"""
        multiple = self.divisible_by * self.tensor
        return -(-self.vocabulary // multiple) * multiple


def shape_of(config: PretrainConfig, ranks: int, precision: str) -> Shape:
    """config: one that `check(ranks)` has let pass. precision: a key of WIDTHS."""
    model, data = config.model, config.data
    for name, assumed in ASSUMED.items():
        if (value := getattr(model, name)) not in assumed(model):
            allowed = f"{' or '.join(map(str, assumed(model)))}, which a plan assumes"
            raise UsageError(flag(name), value, allowed)
    if config.parallel.cuts_stream:
        raise UsageError("--sequence-parallel", None, "left out: a plan does not know it")
    copies = config.data_parallel_size(ranks)
    is_bert = isinstance(model, BertConfig)
    return Shape(
        kind="bert" if is_bert else "gpt2",
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        sequence=data.seq_length,
        positions=model.max_position_embeddings,
        vocabulary=model.vocab_size or GPT2_VOCABULARY,
        divisible_by=model.make_vocab_size_divisible_by,
        batch=config.training.micro_batch_size,
        micro_batches=config.global_batch_size(ranks)
        // (copies * config.training.micro_batch_size),
        tensor=config.parallel.tensor_model_parallel_size,
        data=copies,
        width=WIDTHS[precision],
        recompute=model.recompute_granularity,
        attention_dropout=model.attention_dropout > 0,
        hidden_dropout=model.hidden_dropout > 0,
        post_norm=isinstance(model, BertConfig) and model.residual_order == "post-ln",
        masked=data.mask_prob if isinstance(data, BertDataConfig) else 0.0,
    )
