"""torch alone: parallelize_module (tensor), fully_shard (data with zero=3), or copies whose
gradients are added (data). Models are plain modules; a linear layer each for query, key and value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from conformance.adapters import Refused
from conformance.fixture import IGNORED, Fixture, MicroBatch, ranks

# {module here: its name in transformers}; the first entry of a model is where its layers are.
GPT2 = {
    "layers": "transformer.h",
    "norm1": "ln_1",
    "q": "attn.q",  # parts of c_attn
    "k": "attn.k",
    "v": "attn.v",
    "o": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "words": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
LLAMA = {
    "layers": "model.layers",
    "norm1": "input_layernorm",
    **{each: f"self_attn.{each}_proj" for each in "qkvo"},
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "words": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
BERT = {
    "layers": "bert.encoder.layer",
    "norm1": "attention.output.LayerNorm",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "norm2": "output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "words": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "types": "bert.embeddings.token_type_embeddings",
    "first_norm": "bert.embeddings.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions",  # a bias; its weight is that of `words`
    "pooler": "bert.pooler.dense",
    "order": "cls.seq_relationship",
}
TABLES = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT}
FUSED, PARTS = "attn.c_attn.", tuple(f"attn.{each}." for each in "qkv")


class Bias(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def leaf(name: str, weights: Mapping[str, Tensor], eps: float) -> nn.Module:
    """The module whose weights these are."""
    weight, has_bias = weights.get("weight"), "bias" in weights
    if weight is None:
        return Bias(len(weights["bias"]))
    if name in ("words", "positions", "types"):
        return nn.Embedding(*weight.shape)
    if "norm" in name:
        return (nn.LayerNorm if has_bias else nn.RMSNorm)(len(weight), eps=eps)
    return nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)


class Layer(nn.Module):
    def __init__(self, kind: str, head_size: int) -> None:
        super().__init__()
        self.kind, self.head_size = kind, head_size

    def forward(self, x: Tensor, mask: Tensor | None, rotary: Tensor | None) -> Tensor:
        at: Any = self  # its modules were added by name
        is_post = self.kind == "bert"
        y = x if is_post else at.norm1(x)
        # A rank's heads are those of its columns.
        split = [each(y).unflatten(-1, (-1, self.head_size)) for each in (at.q, at.k, at.v)]
        q, k, v = (each.transpose(1, 2) for each in split)
        if rotary is not None:
            q, k = rotated(q, rotary), rotated(k, rotary)
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + at.o(y.transpose(1, 2).flatten(2))
        x = at.norm1(x) if is_post else x
        y = x if is_post else at.norm2(x)
        if self.kind == "llama":
            y = F.silu(at.gate(y)) * at.up(y)
        else:
            y = F.gelu(at.up(y), approximate="tanh" if self.kind == "gpt2" else "none")
        x = x + at.down(y)
        return at.norm2(x) if is_post else x


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    def __init__(self, facts: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """weights: by the names here."""
        super().__init__()
        config = facts["config"]
        self.kind, self.theta = facts["model_type"], config.get("rope_theta", 0.0)
        heads = config.get("n_head") or config["num_attention_heads"]
        self.head_size = (config.get("n_embd") or config["hidden_size"]) // heads
        names = ("layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps")
        eps = next(config[each] for each in names if each in config)
        number = config.get("n_layer") or config["num_hidden_layers"]
        layers = (Layer(self.kind, self.head_size) for _ in range(number))
        self.layers = nn.ModuleList(layers)
        for path in dict.fromkeys(name.rpartition(".")[0] for name in weights):
            where, _, name = path.rpartition(".")
            kinds = ("weight", "bias")
            own = {k: weights[f"{path}.{k}"] for k in kinds if f"{path}.{k}" in weights}
            self.get_submodule(where).add_module(name, leaf(name, own, eps))
        self.load_state_dict(weights)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [b, s, v], and those of the next sentence [b, 2]."""
        at: Any = self
        numbers = torch.arange(input_ids.shape[1])
        x, mask, rotary = at.words(input_ids), None, None
        if self.kind == "llama":
            half = self.head_size // 2
            speeds = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
            rotary = numbers[:, None] * speeds
        else:
            x = x + at.positions(numbers)
        if self.kind == "bert":
            x = at.first_norm(x + at.types(token_type_ids))
            mask = attention_mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, mask, rotary)
        if self.kind != "bert":
            x = at.final_norm(x)
            return (at.head(x) if self.kind == "llama" else self.tied(x)), None
        order = at.order(torch.tanh(at.pooler(x[:, 0])))
        return at.decoder(self.tied(at.transform_norm(F.gelu(at.transform(x))))), order

    def tied(self, x: Tensor) -> Tensor:
        """Logits by the word embedding; parallelize_module unties a tied nn.Linear in silence."""
        at: Any = self
        weight = at.words.weight
        if not isinstance(weight, DTensor):
            return F.linear(x, weight)
        y: Any = F.linear(DTensor.from_local(x, weight.device_mesh, [Replicate()]), weight)
        logits: Tensor = y.redistribute(placements=[Replicate()]).to_local()
        return logits


class Base:
    """The common part of adapters whose trainers get a module, and neither a loss nor batches.

    keys, stages: those of a layout that the trainer has. dtypes: those that it keeps throughout.
    """

    trainer: str
    keys: tuple[str, ...] = ("data", "zero")
    stages: tuple[int, ...] = (0,)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    model: Any
    optimizer: Any

    def __init__(self, fixture: Fixture, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        self.facts = fixture.facts
        self.zero, self.ranks = layout.get("zero", 0), ranks(layout)
        self.sizes = layout.get("data", 1), layout.get("tensor", 1)
        self.table = TABLES[self.facts["model_type"]]
        self.check(layout, dtype)
        if self.ranks > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.data_rank = dist.get_rank() // self.sizes[1] if self.ranks > 1 else 0
        self.group: Any = None  # data ranks of the same shards
        self.scale = self.sizes[0]  # of a loss, where the trainer divides gradients by data ranks
        self.accumulated = len(fixture.batches()[0])  # micro-batches of a step
        self.recorded: dict[str, Tensor] = {}
        self.model = self.build(fixture, dtype)
        self.prepare()

    def check(self, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        """Raises Refused for what the trainer has not, before ranks join."""
        if unknown := layout.keys() - set(self.keys):
            known = ", ".join(self.keys)
            raise Refused(f"{self.trainer} has no {min(unknown)} for these models, but {known}")
        if self.zero not in self.stages:
            known = ", ".join(map(str, self.stages))
            raise Refused(f"{self.trainer} has no zero={self.zero} here, but {known}")
        if dtype not in self.dtypes:
            raise Refused(f"{self.trainer} computes parts in fp32: --dtype float32")

    def build(self, fixture: Fixture, dtype: torch.dtype) -> Any:
        return Model(self.facts, self.to_ours(fixture.weights())).to(dtype)

    def prepare(self) -> None:
        """Hands the model to the trainer, and makes the optimizer."""
        raise NotImplementedError

    def adamw(self) -> torch.optim.Optimizer:
        optimizer = self.facts["optimizer"]
        decayed = self.to_ours(dict.fromkeys(optimizer["decayed"], torch.empty(3, 3)))
        groups = [
            {"params": [p for n, p in self.parameters() if (n in decayed) is decays], **other}
            for decays, other in ((True, {}), (False, {"weight_decay": 0.0}))
        ]
        settings = {key: optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")}
        return torch.optim.AdamW(groups, **settings)

    def parameters(self) -> list[tuple[str, Any]]:
        return [(n.removeprefix("module."), p) for n, p in self.model.named_parameters()]

    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the names here; linear layers of GPT-2 are [in, out] there."""
        prefix, ours = self.table["layers"] + ".", {}
        modules = {theirs: own for own, theirs in self.table.items()}
        for name, tensor in theirs.items():
            is_in_layer = name.startswith(prefix)
            number, _, rest = name.removeprefix(prefix).partition(".") if is_in_layer else ("",) * 3
            parts = {rest if is_in_layer else name: tensor}
            if FUSED in name:
                chunks = tensor.chunk(3, -1)
                parts = {rest.replace(FUSED, p): c for p, c in zip(PARTS, chunks, strict=True)}
            for path, part in parts.items():
                module, _, kind = path.rpartition(".")
                where = f"layers.{number}." if is_in_layer else ""
                is_turned = prefix == "transformer.h." and is_in_layer and part.ndim == 2
                ours[f"{where}{modules[module]}.{kind}"] = part.T if is_turned else part
        return ours

    def to_theirs(self, ours: Mapping[str, Any]) -> dict[str, Tensor]:
        """As to_ours; DTensors become whole tensors."""
        theirs: dict[str, Tensor] = {}
        for name, tensor in ours.items():
            part = tensor.detach()
            part = part.full_tensor() if isinstance(part, DTensor) else part
            path, _, kind = name.rpartition(".")
            where, _, module = path.rpartition(".")
            where = where.replace("layers", self.table["layers"]) + "." * bool(where)
            is_turned = where.startswith("transformer.h.") and part.ndim == 2
            theirs[f"{where}{self.table[module]}.{kind}"] = part.T if is_turned else part
        for name in [each for each in theirs if PARTS[0] in each]:
            parts = [theirs.pop(name.replace(PARTS[0], each)) for each in PARTS]
            theirs[name.replace(PARTS[0], FUSED)] = torch.cat(parts, -1)
        return theirs

    def outputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Logits [b, s, v], and those of the next sentence [b, 2]."""
        return self.model(batch.input_ids, batch.attention_mask, batch.token_type_ids)

    def term(self, own: MicroBatch, tokens: int, samples: int) -> Tensor:
        """The part of a global batch's loss, of so many of both, that this rank's samples add."""
        logits, order = self.outputs(own)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(
            logits.flatten(0, 1), own.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / tokens
        if order is not None and own.next_sentence_label is not None:
            of_order = F.cross_entropy(order, own.next_sentence_label, reduction="sum")
            loss = loss + of_order / samples
        return loss

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        tokens = sum(int((each.labels != IGNORED).sum()) for each in micro_batches)
        samples = sum(len(each.input_ids) for each in micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        for number, each in enumerate(micro_batches, 1):
            with self.accumulating(number < len(micro_batches)):
                loss = self.term(each.share(self.data_rank, self.sizes[0]), tokens, samples)
                self.backward(loss * self.scale)
            total += loss.detach()
        if self.sizes[0] > 1:
            dist.all_reduce(total, group=self.group)
        return float(total), self.update()

    def accumulating(self, more: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; more: others of the step follow."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> float:
        """Clips and updates; the norm before."""
        self.recorded = {name: each.grad.clone() for name, each in self.parameters()}
        norm = float(self.clip(self.facts["optimizer"]["clip"]))
        self.optimizer.step()
        return norm

    def clip(self, most: float) -> float:
        gradients = [each.grad for _, each in self.parameters()]
        norm = total_norm(gradients)
        for each in gradients:
            each.mul_(min(1.0, most / (norm + 1e-6)))
        return norm

    def gradients(self) -> Mapping[str, Tensor]:
        return self.to_theirs(self.recorded)

    def weights(self) -> Mapping[str, Tensor]:
        return self.to_theirs(dict(self.parameters()))


class Adapter(Base):
    trainer = "torch"
    keys = ("tensor", "data", "zero")
    stages = (0, 3)

    def check(self, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        super().check(layout, dtype)
        # Whole heads are a rank's, and a column layer's local output is taken for an equal part.
        config, tensor = self.facts["config"], self.sizes[1]
        heads = ("n_head", "num_attention_heads", "num_key_value_heads")
        for key in (*heads, "n_inner", "intermediate_size"):
            if config.get(key, tensor) % tensor:
                raise Refused(f"parallelize_module: tensor={tensor} cuts no {key} of {config[key]}")

    def prepare(self) -> None:
        if self.ranks > 1:
            mesh = init_device_mesh("cpu", self.sizes, mesh_dim_names=("data", "tensor"))
            self.group = mesh.get_group("data")
            if self.sizes[1] > 1:
                parallelize_module(self.model, mesh["tensor"], plan_of(self.model))
            if self.zero:
                for module in (*self.model.layers, self.model):
                    fully_shard(module, mesh=mesh["data"])
        self.scale = self.sizes[0] if self.zero else 1
        self.optimizer = self.adamw()

    def update(self) -> float:
        if self.sizes[0] > 1 and not self.zero:
            for _, each in self.parameters():
                local = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
                dist.all_reduce(local, group=self.group)
        return super().update()

    def save(self, folder: Any) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Any) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def plan_of(model: Model) -> dict[str, Any]:
    """The vocabulary, pairs of column and row layers, and an output layer of its own are cut."""
    plan: dict[str, Any] = {"words": RowwiseParallel(input_layouts=Replicate())}
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("o", "down")}
    if model.kind == "llama":
        plan |= {"layers.*.gate": ColwiseParallel()}
        plan |= {"head": ColwiseParallel(output_layouts=Replicate())}
    return plan


def total_norm(gradients: Iterable[Any]) -> float:
    """clip_grad_norm_ takes neither plain tensors beside DTensors nor two meshes."""
    groups: dict[Any, list[Any]] = {}
    for each in gradients:
        key = (each.device_mesh, each.placements) if isinstance(each, DTensor) else None
        groups.setdefault(key, []).append(each)
    norms: list[Any] = [nn.utils.get_total_norm(group) for group in groups.values()]
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in norms)
    return sum(float(each) ** 2 for each in whole) ** 0.5
