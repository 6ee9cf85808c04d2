"""Peers of `train_step.py`: GPT-2 as a user of torch writes it, and its DTensor plan.

It shares no code with megatron/models and takes no detour for generality: fused QKV, one position
embedding for all samples, the mean of `F.cross_entropy`. Under `parallelize_module` query, key and
value are three layers, since a fused one would have to be interleaved by head to be cut.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from megatron.config.model import GPT2Config
from megatron.config.training import OptimizerConfig


class FusedProjections(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, dim=-1)


class SeparateProjections(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.query(x), self.key(x), self.value(x)


class Layer(nn.Module):
    """x [b, s, h] to [b, s, h]."""

    def __init__(self, section: GPT2Config, projections: Callable[[int], nn.Module]) -> None:
        super().__init__()
        h, epsilon = section.hidden_size, section.layernorm_epsilon
        self.head_size = h // section.num_attention_heads
        self.attention_norm = nn.LayerNorm(h, eps=epsilon)
        self.projections = projections(h)
        self.output = nn.Linear(h, h)
        self.mlp_norm = nn.LayerNorm(h, eps=epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(h, 4 * h), nn.GELU(approximate="tanh"), nn.Linear(4 * h, h)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for each in self.projections(self.attention_norm(x))
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT2(nn.Module):
    def __init__(
        self, section: GPT2Config, vocab_size: int, projections: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        h = section.hidden_size
        self.word_embedding = nn.Embedding(vocab_size, h)
        self.position_embedding = nn.Embedding(section.max_position_embeddings, h)
        self.layers = nn.ModuleList(Layer(section, projections) for _ in range(section.num_layers))
        self.final_norm = nn.LayerNorm(h, eps=section.layernorm_epsilon)
        self.head = nn.Linear(h, vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.word_embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over int64 [b, s] tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def parallelize(model: PlainGPT2, grid: DeviceMesh) -> PlainGPT2:
    """Cut a model with SeparateProjections as the paper does, its loss too.

    The norms stay plain tensors, since dispatch through DTensor makes them slower.
    """
    whole = Replicate()
    outer = {
        "word_embedding": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    inner = {
        # One conversion for the three layers, and so one all-reduce in the backward.
        "projections": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "projections.query": ColwiseParallel(),
        "projections.key": ColwiseParallel(),
        "projections.value": ColwiseParallel(),
        "output": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    }
    parallelize_module(model, grid, outer)
    for layer in model.layers:
        parallelize_module(layer, grid, inner)
    model.tie()  # parallelize_module has untied them
    return model


def groups(parameters: Iterable[Tensor], key: Callable[[Tensor], object]) -> list[list[Tensor]]:
    table: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        table.setdefault(key(parameter), []).append(parameter)
    return list(table.values())


def is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


def plain_weights(weights: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
    """This project's whole parameters under the names of PlainGPT2."""
    renamed: dict[str, Tensor] = {"head.weight": weights["word_embedding.weight"]}
    for name, whole in weights.items():
        name = name.removeprefix("transformer.")
        name = name.replace("mlp.up", "mlp.0").replace("mlp.down", "mlp.2")
        name = name.replace("attention.qkv", "projections.qkv").replace(
            "attention.output", "output"
        )
        if "qkv" not in name:
            renamed[name] = whole
        elif fused:
            renamed[name] = whole.flatten(0, 1)
        else:
            for part, own in zip(("query", "key", "value"), whole, strict=True):
                renamed[name.replace("qkv", part)] = own
    return renamed


class PlainTraining:
    """Whole training steps as a user of torch writes them, of a model parallelized or not."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        section: OptimizerConfig,
        lr: float,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """loss: the mean over int64 [b, s] inputs and labels."""
        self.loss, self.autocast = loss, autocast
        self.clip_grad = section.clip_grad
        # DTensors and plain tensors in one list break fused AdamW and the norm.
        self.kinds = groups(model.parameters(), is_cut)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": same, "weight_decay": section.weight_decay * (same[0].dim() > 1)}
                for same in groups(model.parameters(), lambda each: (is_cut(each), each.dim() > 1))
            ],
            lr=lr,
            betas=(section.adam_beta1, section.adam_beta2),
            eps=section.adam_eps,
            fused=True,
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One update; the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with loss_parallel():  # of no effect on plain tensors
            with self.autocast():
                loss = self.loss(tokens, labels)
            loss.backward()
        self._clip()
        self.optimizer.step()
        return loss.item()

    def _clip(self) -> None:
        """`clip_grad_norm_`, which is these two calls, over both kinds of parameters."""
        norms = [get_total_norm([each.grad for each in kind]) for kind in self.kinds]
        local = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(local))
        for kind in self.kinds:
            clip_grads_with_norm_(kind, self.clip_grad, total)
