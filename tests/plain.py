"""GPT-2, BERT, Llama and AdamW in plain torch, with nothing of megatron/ in them.

GPT-2 and BERT take whole weights by the project's names and compute in fp64. Llama is written as
users write it, of torch's modules, by the names of transformers. Streams are [b, s, h], heads
[b, a, s, d]; batches are of arrays or of tensors.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
gelu_tanh = partial(F.gelu, approximate="tanh")


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """mask: True where a query may look; by default at itself and what is before it. Queries may
    share the heads of k and v."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -inf)
    return scores.softmax(-1) @ v


def document_mask(starts: Tensor) -> Tensor:
    """[b, s] document starts to [b, 1, s, s]: causal, within one document."""
    return (starts[:, :, None] == starts[:, None, :]).tril()[:, None]


class Tree(nn.Module):
    """Parameters by their dotted names; what has a number for a name is a layer."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        nested: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            first, _, rest = name.partition(".")
            if rest:
                nested.setdefault(first, {})[rest] = weight
            else:
                self.register_parameter(name, nn.Parameter(weight.detach().double().clone()))
        for name, part in nested.items():
            self.add_module(name, (Layer if name.isdigit() else Tree)(part))

    def __getattr__(self, name: str) -> Any:  # for type checkers
        return super().__getattr__(name)


def linear(x: Tensor, at: Tree) -> Tensor:
    """The parts of a weight [parts, out, in] come side by side."""
    bias = getattr(at, "bias", None)
    return F.linear(x, at.weight.flatten(0, -2), None if bias is None else bias.flatten())


def layer_norm(x: Tensor, at: Tree) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], at.weight, at.bias, 1e-5)


class Layer(Tree):
    def forward(
        self,
        x: Tensor,
        heads: int,
        mask: Tensor | None,
        activation: Callable[[Tensor], Tensor],
        is_post: bool = False,
    ) -> Tensor:
        """is_post: the norms stand after the sums."""

        def attention(x: Tensor) -> Tensor:
            qkv = linear(x, self.attention.qkv).chunk(3, -1)
            q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in qkv)
            return linear(attend(q, k, v, mask).transpose(1, 2).flatten(2), self.attention.output)

        def mlp(x: Tensor) -> Tensor:
            return linear(activation(linear(x, self.mlp.up)), self.mlp.down)

        if is_post:
            x = layer_norm(x + attention(x), self.attention_norm)
            return layer_norm(x + mlp(x), self.mlp_norm)
        x = x + attention(layer_norm(x, self.attention_norm))
        return x + mlp(layer_norm(x, self.mlp_norm))


class GPT2(Tree):
    def __init__(self, weights: Weights, heads: int) -> None:
        super().__init__(weights)
        self.heads = heads

    def forward(self, batch: Any) -> Tensor:
        """Logits [b, s, v]."""
        tokens, positions = map(torch.as_tensor, (batch.tokens, batch.positions))
        starts = batch.document_starts
        mask = None if starts is None else document_mask(torch.as_tensor(starts))
        x = F.embedding(tokens, self.word_embedding.weight)
        x = x + F.embedding(positions, self.position_embedding.weight)
        for layer in self.transformer.layers.children():
            x = layer(x, self.heads, mask, gelu_tanh)
        return linear(layer_norm(x, self.final_norm), getattr(self, "head", self.word_embedding))


class BERT(Tree):
    """Without its heads, which are left to the test."""

    def __init__(self, weights: Weights, heads: int, is_post: bool = False) -> None:
        super().__init__(weights)
        self.heads, self.is_post = heads, is_post

    def encode(self, batch: Any) -> Tensor:
        tokens, types, is_real = map(
            torch.as_tensor, (batch.tokens, batch.token_types, batch.is_real)
        )
        at = self.encoder
        x = F.embedding(tokens, at.word_embedding.weight)
        x = x + at.position_embedding.weight[: tokens.shape[1]]
        x = x + F.embedding(types, at.token_type_embedding.weight)
        x = layer_norm(x, at.embedding_norm) if self.is_post else x
        for layer in at.transformer.layers.children():
            x = layer(x, self.heads, is_real[:, None, None], F.gelu, self.is_post)
        return x if self.is_post else layer_norm(x, at.final_norm)

    def pool(self, x: Tensor) -> Tensor:
        return linear(x[:, 0], self.pooler.dense).tanh()


def summed_loss(logits: Tensor, batch: Any) -> Tensor:
    """The sum of the losses of the tokens that count."""
    labels, mask = (torch.as_tensor(each).flatten() for each in (batch.labels, batch.loss_mask))
    losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return losses @ mask.to(losses.dtype)


# Llama


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, inner = hidden // heads, groups * hidden // heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.size))
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = attend(*(each.transpose(1, 2) for each in (turn(q), turn(k), v)))
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.self_attn = SelfAttention(hidden, heads, groups)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = GatedMLP(hidden, inner)

    def forward(self, x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaBody(nn.Module):
    """All but the head."""

    def __init__(
        self, vocabulary: int, hidden: int, layers: int, *, heads: int, groups: int, inner: int
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads, groups, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def turn(self, x: Tensor) -> Tensor:
        """x [b, s, a, d] by its positions: pairs of its first and its second half."""
        size = x.shape[-1]
        frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        cos, sin = (each(angles).repeat(1, 2)[:, None] for each in (torch.cos, torch.sin))
        one, two = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-two, one], dim=-1) * sin

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        out: Tensor = self.norm(x)
        return out


class Llama(LlamaBody):
    def __init__(self, vocabulary: int, hidden: int, layers: int, **sizes: int) -> None:
        super().__init__(vocabulary, hidden, layers, **sizes)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(super().forward(tokens))
        return logits


_OF_LAYER = {
    "attention_norm.weight": ("input_layernorm",),
    "attention.qkv.query": ("self_attn.q_proj",),
    "attention.qkv.key_value": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.output.weight": ("self_attn.o_proj",),
    "mlp_norm.weight": ("post_attention_layernorm",),
    "mlp.up.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down.weight": ("mlp.down_proj",),
}


def by_project_names(llama: Weights) -> dict[str, Tensor]:
    """Weights or gradients of a Llama by the names of transformers, with or without the name of
    the body before them."""
    theirs = {
        name.removeprefix("base_").removeprefix("model."): each for name, each in llama.items()
    }
    found = {
        "word_embedding.weight": theirs["embed_tokens.weight"],
        "final_norm.weight": theirs["norm.weight"],
    }
    if "lm_head.weight" in theirs:
        found["head.weight"] = theirs["lm_head.weight"]
    for layer in {int(name.split(".")[1]) for name in theirs if name.startswith("layers.")}:
        for ours, names in _OF_LAYER.items():
            parts = [theirs[f"layers.{layer}.{name}.weight"] for name in names]
            whole = torch.stack(parts) if len(parts) > 1 else parts[0]
            found[f"transformer.layers.{layer}.{ours}"] = whole
    return found


# Training


def adamw(model: nn.Module, config: Any, lr: float = 1e-3) -> torch.optim.AdamW:
    """torch's, with the numbers of this config of the project; vectors and biases do not decay."""
    named = [each for each in model.named_parameters() if each[1].requires_grad]
    kept = [each for name, each in named if each.dim() == 1 or name.endswith("bias")]
    ids = {id(each) for each in kept}
    return torch.optim.AdamW(
        [
            {"params": [each for _, each in named if id(each) not in ids]},
            {"params": kept, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def update(
    optimizer: torch.optim.Optimizer, loss: Tensor, clip: float, lr: float | None = None
) -> Tensor:
    """A step by the gradient of the loss; returns its norm before it is clipped. clip: 0 for no
    limit."""
    optimizer.zero_grad()
    loss.backward()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip or inf)
    for group in optimizer.param_groups if lr is not None else ():
        group["lr"] = lr
    optimizer.step()
    return norm
