"""A block of your own in GPT-2, trained, resumed and generated from by the project's programs.

    python pretrain.py --model examples.own_model:KIND --preset quickstart --mock-data

GPT-NeoX (arXiv 2204.06745) adds attention and MLP to the hidden states side by side.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from megatron.api import (
    GPT2,
    GPT2Config,
    PretrainGPT2Config,
    Sequences,
    TransformerLayer,
    find_kind,
)


class ParallelLayer(TransformerLayer):
    """x + Attention(norm(x)) + MLP(norm(x)); x is [n, h], or this rank's part of it."""

    def forward(self, x: Tensor, at: Sequences) -> Tensor:
        attention = self.attention(self.attention_norm(x), at)
        mlp = self.mlp(self.mlp_norm(x))
        keys = at.dropout_keys
        return x + self.attention_dropout(attention, keys) + self.mlp_dropout(mlp, keys)


class NeoX(GPT2):
    make_layer = ParallelLayer


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(GPT2Config):
    kind: ClassVar[str] = f"{__name__}:KIND"


@dataclass(frozen=True, kw_only=True)
class PretrainNeoXConfig(PretrainGPT2Config):
    model: NeoXConfig


# As GPT-2, but for these; there are no tables to convert it to HuggingFace.
KIND = replace(
    find_kind("gpt2"),
    config=f"{__name__}:NeoXConfig",
    model=f"{__name__}:NeoX",
    program=f"{__name__}:PretrainNeoXConfig",
    conversion=None,
)
