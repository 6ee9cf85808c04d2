"""The reference: GPT-2, Llama and BERT, trained by plain torch in one process.

Everything is here, from the embedding to AdamW, in the order in which a step happens. A model is
three functions of `w`, its weights by the names of transformers: from tokens to vectors (`embed`),
through the layers (`layers`), to the scores of the vocabulary (`head`). Shapes: b samples, s
tokens, h hidden size, v vocabulary.

A loss is a sum over the scored tokens of the global batch over their number, and nothing else is
divided by anything. Most faults (faults.py) change one method of Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.fixture import COMPARED, IGNORED, NAMES, STEPS, Figures, Fixture, MicroBatch

Weights = Mapping[str, Tensor]
Config = Mapping[str, Any]
Decode = Callable[[Tensor, Tensor], Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """Weights are [out, in] (those of GPT-2, see conv1d, are [in, out])."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def conv1d(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normal = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[f"{name}.weight"]


def split_heads(x: Tensor, size: int) -> Tensor:
    """[b, s, heads * size] to [b, heads, s, size]."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """[b, heads, s, size] three times to [b, s, heads * size]; allowed: [b, s, s], query by key."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    # The least number, not minus infinity: a query that may see nothing gives no NaN.
    scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding; the first half of a head's channels is paired with the second."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None] * speeds  # [s, half]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gpt2_embed(w: Weights, c: Config, batch: MicroBatch, positions: Tensor) -> Tensor:
    return w["transformer.wte.weight"][batch.input_ids] + w["transformer.wpe.weight"][positions]


def gpt2_layers(w: Weights, c: Config, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
    size, eps = c["n_embd"] // c["n_head"], c["layer_norm_epsilon"]
    for number in range(c["n_layer"]):
        name = f"transformer.h.{number}"
        qkv = conv1d(w, f"{name}.attn.c_attn", layer_norm(w, f"{name}.ln_1", x, eps))
        q, k, v = (split_heads(each, size) for each in qkv.chunk(3, -1))
        x = x + conv1d(w, f"{name}.attn.c_proj", attention(q, k, v, allowed))
        y = conv1d(w, f"{name}.mlp.c_fc", layer_norm(w, f"{name}.ln_2", x, eps))
        x = x + conv1d(w, f"{name}.mlp.c_proj", F.gelu(y, approximate="tanh"))
    return layer_norm(w, "transformer.ln_f", x, eps)


def head(w: Weights, c: Config, x: Tensor, decode: Decode) -> Tensor:
    return decode(x, w["lm_head.weight"])


def llama_embed(w: Weights, c: Config, batch: MicroBatch, positions: Tensor) -> Tensor:
    return w["model.embed_tokens.weight"][batch.input_ids]


def llama_layers(w: Weights, c: Config, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
    heads, eps, theta = c["num_attention_heads"], c["rms_norm_eps"], c["rope_theta"]
    size = c["hidden_size"] // heads
    for number in range(c["num_hidden_layers"]):
        name = f"model.layers.{number}"
        y = rms_norm(w, f"{name}.input_layernorm", x, eps)
        q, k, v = (split_heads(linear(w, f"{name}.self_attn.{n}_proj", y), size) for n in "qkv")
        q, k = rotated(q, positions, theta), rotated(k, positions, theta)
        # Neighbouring query heads share a key and a value head.
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
        x = x + linear(w, f"{name}.self_attn.o_proj", attention(q, k, v, allowed))
        y = rms_norm(w, f"{name}.post_attention_layernorm", x, eps)
        gate = F.silu(linear(w, f"{name}.mlp.gate_proj", y))
        x = x + linear(w, f"{name}.mlp.down_proj", gate * linear(w, f"{name}.mlp.up_proj", y))
    return rms_norm(w, "model.norm", x, eps)


def bert_embed(w: Weights, c: Config, batch: MicroBatch, positions: Tensor) -> Tensor:
    name = "bert.embeddings"
    x = w[f"{name}.word_embeddings.weight"][batch.input_ids]
    x = x + w[f"{name}.token_type_embeddings.weight"][batch.token_type_ids]
    x = x + w[f"{name}.position_embeddings.weight"][positions]
    return layer_norm(w, f"{name}.LayerNorm", x, c["layer_norm_eps"])


def bert_layers(w: Weights, c: Config, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
    size, eps = c["hidden_size"] // c["num_attention_heads"], c["layer_norm_eps"]
    for number in range(c["num_hidden_layers"]):
        name = f"bert.encoder.layer.{number}"
        names = (f"{name}.attention.self.{each}" for each in ("query", "key", "value"))
        q, k, v = (split_heads(linear(w, each, x), size) for each in names)
        y = linear(w, f"{name}.attention.output.dense", attention(q, k, v, allowed))
        x = layer_norm(w, f"{name}.attention.output.LayerNorm", x + y, eps)
        y = linear(w, f"{name}.output.dense", F.gelu(linear(w, f"{name}.intermediate.dense", x)))
        x = layer_norm(w, f"{name}.output.LayerNorm", x + y, eps)
    return x


def bert_head(w: Weights, c: Config, x: Tensor, decode: Decode) -> Tensor:
    x = F.gelu(linear(w, "cls.predictions.transform.dense", x))
    x = layer_norm(w, "cls.predictions.transform.LayerNorm", x, c["layer_norm_eps"])
    return decode(x, w["cls.predictions.decoder.weight"]) + w["cls.predictions.decoder.bias"]


def next_sentence(w: Weights, x: Tensor) -> Tensor:
    """[b, 2], from each sample's first token."""
    return linear(w, "cls.seq_relationship", torch.tanh(linear(w, "bert.pooler.dense", x[:, 0])))


MODELS = {
    "gpt2": (gpt2_embed, gpt2_layers, head),
    "llama": (llama_embed, llama_layers, head),
    "bert": (bert_embed, bert_layers, bert_head),
}


@dataclass
class Trainer:
    """A step of training in the methods' order, from `micro_batches` to `update`.

    A fault is a subclass. ranks: the number of ranks that the fault is between, one of `among`;
    without meaning in the trainer itself. models: those in which the fault is possible.
    """

    among: ClassVar[tuple[int, ...]] = (1,)
    models: ClassVar[tuple[str, ...]] = NAMES
    fixture: Fixture
    dtype: torch.dtype = torch.float64
    ranks: int = 1

    def __post_init__(self) -> None:
        self.facts = self.fixture.facts
        self.kind = self.facts["model_type"]
        self.batches = self.fixture.batches()
        self.weights = self.first_weights()
        self.step_count = 0
        self.moments = self.no_moments()

    def first_weights(self) -> dict[str, Tensor]:
        return {name: each.to(self.dtype) for name, each in self.fixture.weights().items()}

    def no_moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """AdamW's state before the first step: the means of gradients and of their squares."""
        zeros = ((name, torch.zeros_like(each)) for name, each in self.weights.items())
        return {name: (zero, zero) for name, zero in zeros}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self.batches[step]

    def token_weights(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The factors of the tokens' losses, [b, s] for each micro-batch: 1 / N, where N is the
        number of scored tokens of the global batch."""
        total = sum(int(scored(each).sum()) for each in micro_batches)
        return [scored(each) / total for each in micro_batches]

    def used(self, weights: Weights) -> Weights:
        """A tied weight is one tensor that is used under two names."""
        return {**weights, **{other: weights[name] for name, other in self.facts["tied"]}}

    def positions(self, length: int) -> Tensor:
        return torch.arange(length)

    def allowed(self, batch: MicroBatch) -> Tensor:
        """[b, s, s]: a query sees real tokens and, but in BERT, none after its own."""
        b, s = batch.input_ids.shape
        real = batch.attention_mask.bool()[:, None].expand(b, s, s)
        return real if self.kind == "bert" else real.tril()

    def embedded(self, x: Tensor) -> Tensor:
        """The vectors [b, s, h] at the place where sequence parallelism scatters them."""
        return x

    def decode(self, x: Tensor, weight: Tensor) -> Tensor:
        """The scores of the vocabulary, [b, s, v]."""
        return x @ weight.T

    def loss(self, weights: Weights, batch: MicroBatch, token_weights: Tensor, n: int) -> Tensor:
        """The term that a micro-batch adds to the loss; n: the samples of the global batch."""
        w, c = self.used(weights), self.facts["config"]
        embed, layers, scores = MODELS[self.kind]
        positions = self.positions(batch.input_ids.shape[1])
        x = self.embedded(embed(w, c, batch, positions))
        x = layers(w, c, x, self.allowed(batch), positions)
        loss = (cross_entropy(scores(w, c, x, self.decode), batch.labels) * token_weights).sum()
        if batch.next_sentence_label is not None:
            of_samples = cross_entropy(next_sentence(w, x), batch.next_sentence_label)
            loss = loss + of_samples.sum() / n
        return loss

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        """Both of the global batch: sums over the micro-batches, since the loss is a sum."""
        leaves = {name: each.detach().requires_grad_() for name, each in self.weights.items()}
        samples = sum(len(each.input_ids) for each in micro_batches)
        loss = 0.0
        total: Weights = {name: torch.zeros_like(each) for name, each in self.weights.items()}
        for batch, each in zip(micro_batches, self.token_weights(micro_batches), strict=True):
            part = self.loss(leaves, batch, each, samples)
            gradients = torch.autograd.grad(part, list(leaves.values()), materialize_grads=True)
            total = self.added(total, dict(zip(leaves, gradients, strict=True)))
            loss += part.item()
        return loss, total

    def added(self, total: Weights, part: Weights) -> Weights:
        """The sums of the gradients so far and a micro-batch's."""
        return {name: each + part[name] for name, each in total.items()}

    def norm(self, gradients: Weights) -> float:
        """The norm over all elements of all parameters, a tied one once."""
        return sum(float(each.double().square().sum()) for each in gradients.values()) ** 0.5

    def clipped(self, gradients: Weights, norm: float) -> Weights:
        scale = min(1.0, self.facts["optimizer"]["clip"] / (norm + 1e-6))
        return {name: each * scale for name, each in gradients.items()}

    def decay(self, name: str) -> float:
        optimizer = self.facts["optimizer"]
        return optimizer["weight_decay"] if name in optimizer["decayed"] else 0.0

    def corrections(self) -> tuple[float, float]:
        """The divisors of AdamW's moments, which start at zero."""
        beta1, beta2 = self.facts["optimizer"]["betas"]
        return 1 - beta1**self.step_count, 1 - beta2**self.step_count

    def update(self, gradients: Weights) -> None:
        """AdamW: decay is no part of the gradient."""
        optimizer = self.facts["optimizer"]
        lr, (beta1, beta2) = optimizer["lr"], optimizer["betas"]
        self.step_count += 1
        first, second = self.corrections()
        for name, gradient in gradients.items():
            m, v = self.moments[name]
            m = beta1 * m + (1 - beta1) * gradient
            v = beta2 * v + (1 - beta2) * gradient.square()
            self.moments[name] = m, v
            weight = self.weights[name] * (1 - lr * self.decay(name))
            weight = weight - lr * (m / first) / ((v / second).sqrt() + optimizer["eps"])
            self.weights[name] = weight

    def step(self, number: int) -> tuple[float, float, Weights]:
        """(loss, gradient norm, gradients), the latter two before clipping."""
        loss, gradients = self.loss_and_gradients(self.micro_batches(number))
        norm = self.norm(gradients)
        self.update(self.clipped(gradients, norm))
        return loss, norm, gradients

    def whole(self, tensors: Weights) -> dict[str, Tensor]:
        """The tensors to compare, by the fixture's names and in its shapes."""
        shapes = {name: each.shape for name, each in self.fixture.weights().items()}
        return {name: tensors[name][: shape[0]].clone() for name, shape in shapes.items()}


class DataRank(Trainer):
    """One of `ranks` data-parallel ranks: its samples' part of the loss and of the gradients."""

    rank = 0

    def loss(self, weights: Weights, batch: MicroBatch, token_weights: Tensor, n: int) -> Tensor:
        batch = batch.share(self.rank, self.ranks)
        own = token_weights.chunk(self.ranks)[self.rank]
        return super().loss(weights, batch, own, n)


def scored(batch: MicroBatch) -> Tensor:
    return (batch.labels != IGNORED).double()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., v] and [...] to [...]; zero where the label is not scored."""
    # In bf16 a sum of so many terms would say little.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORED, torch.zeros_like(each), each)


def train(
    fixture: Fixture,
    dtype: torch.dtype = torch.float64,
    fault: type[Trainer] | None = None,
    ranks: int = 1,
) -> Figures:
    """The figures of STEPS steps. fault: a trainer of faults.FAULTS, among so many ranks."""
    trainer = (fault or Trainer)(fixture, dtype, ranks)
    figures = Figures()
    for number in range(STEPS):
        loss, norm, gradients = trainer.step(number)
        figures.losses.append(loss)
        figures.grad_norms.append(norm)
        if number == 0:
            figures.gradients = trainer.whole(gradients)
        if number + 1 in COMPARED:
            figures.weights[number + 1] = trainer.whole(trainer.weights)
    return figures
