"""GPT-2 in plain torch, in nanoGPT's style: the model of peers that have no other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """x [b, s, h] to [b, s, h]. Parameters have this project's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        h, epsilon = config.hidden_size, config.layernorm_epsilon
        self.head_size = h // config.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h, epsilon), nn.LayerNorm(h, epsilon)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(h, 3 * h), "output": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(h, 4 * h), "down": nn.Linear(4 * h, h)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention.qkv(self.attention_norm(x)).chunk(3, dim=2)
        q, k, v = (each.unflatten(2, (-1, self.head_size)).transpose(1, 2) for each in qkv)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention.output(seen.transpose(1, 2).flatten(2))
        return x + self.mlp.down(F.gelu(self.mlp.up(self.mlp_norm(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2, or the pipeline stage of it with these layers. Parameters have this project's names,
    and `head.weight`."""

    def __init__(self, config: Any, vocab_size: int, layers: range | None = None) -> None:
        super().__init__()
        h, layers = config.hidden_size, layers or range(config.num_layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        if self.is_first:
            self.word_embedding = nn.Embedding(vocab_size, h)
            self.position_embedding = nn.Embedding(config.max_position_embeddings, h)
        blocks = nn.ModuleDict({str(number): Block(config) for number in layers})
        self.transformer = nn.ModuleDict({"layers": blocks})
        if self.is_last:
            self.final_norm = nn.LayerNorm(h, config.layernorm_epsilon)
            self.head = nn.Linear(h, vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x: int64 [b, s] tokens, or [b, s, h] of the previous stage. Returns the mean loss over
        labels, or without them [b, s, h] or logits."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.word_embedding(x) + self.position_embedding(positions)
        for block in self.transformer.layers.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.final_norm(x))
        return x if labels is None else F.cross_entropy(x.flatten(0, 1), labels.flatten())
