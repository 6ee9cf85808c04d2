"""A kind of model that no part of the project knows of, built as a Llama is."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import Activation, TextModelConfig
from megatron.config.pretrain import PretrainTextConfig
from megatron.config.training import GPT2DataConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.gpt import dropout_keys
from megatron.models.registry import KINDS, ModelKind
from megatron.parallel.factory import LayerFactory
from megatron.parallel.layers_llama import GroupedQueryLinear, rotate

KIND = ModelKind(
    config="tests.models.own_kind:OwnConfig",
    model="tests.models.own_kind:Own",
    program="tests.models.own_kind:PretrainOwnConfig",
    inputs="megatron.train.inputs:open_gpt2_inputs",
    data="tests.models.own_kind:OwnDataConfig",
)
MISNAMED = replace(KIND)
IMAGES = replace(KINDS["vit"], program=None)  # of no text, and without pretraining


@dataclass(frozen=True, kw_only=True)
class OwnConfig(TextModelConfig):
    kind: ClassVar[str] = "tests.models.own_kind:KIND"

    activation: Activation = "swiglu"

    max_position_embeddings: int = 64

    key_value_heads: int = 3
    """Heads of keys and values."""


def own_config(**changes: Any) -> OwnConfig:
    """A small one: neither 2 nor 4 ranks divide the heads of keys and values."""
    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 12, "ffn_hidden_size": 40}
    return OwnConfig(**(sizes | {"attention_dropout": 0.0, "hidden_dropout": 0.0} | changes))


@dataclass(frozen=True, kw_only=True)
class OwnDataConfig(GPT2DataConfig):
    twice: bool = False
    """Read each document twice."""


@dataclass(frozen=True, kw_only=True)
class PretrainOwnConfig(PretrainTextConfig):
    model: OwnConfig
    data: OwnDataConfig


class Own(nn.Module):
    """One layer with RMSNorm, rotary positions, shared keys and values, SwiGLU, no bias and a head
    of its own weight."""

    terms: ClassVar = ("loss",)
    qkv: GroupedQueryLinear

    def __init__(self, config: OwnConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        h, heads, std = config.hidden_size, config.num_attention_heads, config.init_method_std
        f, rows = config.ffn_size, config.make_vocab_size_divisible_by
        self.head_size = h // heads
        self.word_embedding = factory.word_embedding(vocab_size, h, divisible_by=rows, std=std)
        self.attention_norm = factory.rms_norm(h, epsilon=1e-5)
        sizes = {"key_value_heads": config.key_value_heads, "head_size": self.head_size}
        self.qkv = factory.grouped_query(h, heads=heads, **sizes, bias=False, std=std)
        self.rotary = factory.rotary(self.head_size)
        self.core = factory.attention_core(config.attention_dropout, "core")
        self.output = factory.row(h, h, bias=False, std=std)
        self.mlp_norm = factory.rms_norm(h, epsilon=1e-5)
        self.up = factory.column(h, f, parts=2, bias=False, std=std)
        self.down = factory.row(f, h, bias=False, std=std)
        self.final_norm = factory.rms_norm(h, epsilon=1e-5)
        self.head = factory.head(vocab_size, h, divisible_by=rows, untied_std=std)

    def denominators(self, batch: GPT2Batch) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def embed(self, batch: Any) -> Tensor:
        return self.word_embedding(batch.tokens.flatten())

    def layers(self, x: Tensor, batch: Any) -> Tensor:
        b, s = batch.tokens.shape
        q, k, v = (
            each.view(b, s, -1, self.head_size).transpose(1, 2)
            for each in self.qkv(self.attention_norm(x))
        )
        cos, sin = self.rotary(batch.positions, x.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = self.core(q, k, v, None, True, dropout_keys(batch), self.qkv.kv_head_index)
        x = x + self.output(heads.transpose(1, 2).reshape(b * s, -1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=1)
        return x + self.down(F.silu(gate) * up)

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        scales = (batch.loss_mask.double() * loss_scales).flatten()
        return self.head(self.final_norm(x), None, batch.labels.flatten(), scales)[None]
