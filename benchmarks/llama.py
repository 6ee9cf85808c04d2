"""Llama compared with torch's tensor parallelism, and with transformers.

The model of source C of docs/sources.md: 12 layers, hidden size 768, 12 query and 3 key/value
heads, vocabulary 50,000, sequences of 512 tokens. On two ranks torch's `parallelize_module` shards
a plain Llama by the tutorial's plan: norms and hidden states between layers are sharded along the
sequence, and the loss is computed from sharded logits. The plan gathers queries, keys and values,
so every rank computes all heads; in a second row each rank computes its own heads, as here. On one
rank the peer is transformers' LlamaForCausalLM with `sdpa`. All start from the same weights, read
the same random tokens and update by AdamW with clipping; a turn is one update; losses are compared.
In bf16 all keep weights, gradients and moments in bf16 (--pure-bf16), as the tutorial does.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.config.model import LlamaConfig
from megatron.config.pretrain import PretrainLlamaConfig
from megatron.parallel.layers_llama import RotaryEmbedding
from tools.convert.llama import LLAMA
from tools.convert.weights import resolve, to_theirs
from tools.layouts.job import open_samples

OURS, ALL_HEADS, OWN_HEADS = "this project", "torch, all heads", "torch, own heads"
SEQUENCE_PARALLEL, TRANSFORMERS = "this project, sequence parallel", "transformers"
WORDS = "--preset llama_tutorial --train-iters 3000 --micro-batch-size 2 --no-compile"
DTYPES = {"fp32": "--no-bf16", "bf16": "--pure-bf16"}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


def config_of(flags: Sequence[str], ranks: int = 1) -> PretrainLlamaConfig:
    return steps.read(flags, ranks, PretrainLlamaConfig)


def initial_weights(model: LlamaConfig, vocab_size: int) -> dict[str, Tensor]:
    """This project's initial weights, by transformers' names."""
    weights = peers.initial_weights(model, vocab_size)
    return to_theirs(LLAMA, resolve(LLAMA, model, vocab_size), weights)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, of_query: Tensor | None) -> None:
        """of_query: index of the key/value head that each query head of this rank uses."""
        super().__init__()
        h, self.size, self.of_query = config.hidden_size, config.head_size, of_query
        groups = config.query_groups * self.size
        self.q_proj, self.o_proj = (nn.Linear(h, h, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(h, groups, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.of_query is not None:
            k, v = k[:, self.of_query], v[:, self.of_query]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(h, f, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, of_query: Tensor | None) -> None:
        super().__init__()
        h, epsilon = config.hidden_size, config.layernorm_epsilon
        self.input_layernorm = nn.RMSNorm(h, epsilon)
        self.self_attn = Attention(config, of_query)
        self.post_attention_layernorm = nn.RMSNorm(h, epsilon)
        self.mlp = MLP(h, config.ffn_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, config: LlamaConfig, vocab_size: int, of_query: Tensor | None) -> None:
        super().__init__()
        h, self.rotary = config.hidden_size, RotaryEmbedding(config.head_size)
        self.embed_tokens = nn.Embedding(vocab_size, h)
        layers = (Layer(config, of_query) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(h, config.layernorm_epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.embed_tokens(tokens)
        tables = self.rotary(positions, x.dtype)
        cos, sin = (torch.cat([each, each], dim=-1).to(x.dtype) for each in tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class PlainLlama(nn.Module):
    """Llama in a tutorial's style; parameters have transformers' names."""

    def __init__(
        self, config: LlamaConfig, vocab_size: int, of_query: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model = Stack(config, vocab_size, of_query)
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over int64 [b, s] tokens."""
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plan(own_heads: bool) -> dict[str, Any]:
    """The tutorial's plan; with own_heads, queries are not gathered."""
    whole, cut = Replicate(), Shard(1)
    columns = parallel.ColwiseParallel
    gathered = columns(output_layouts=whole)
    return {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "model.layers.*.input_layernorm": parallel.SequenceParallel(),
        "model.layers.*.self_attn": parallel.PrepareModuleInput(
            input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
        ),
        "model.layers.*.self_attn.q_proj": columns() if own_heads else gathered,
        "model.layers.*.self_attn.k_proj": gathered,
        "model.layers.*.self_attn.v_proj": gathered,
        "model.layers.*.self_attn.o_proj": parallel.RowwiseParallel(
            input_layouts=Shard(-1) if own_heads else whole, output_layouts=cut
        ),
        "model.layers.*.post_attention_layernorm": parallel.SequenceParallel(),
        "model.layers.*.mlp": parallel.PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(whole,)
        ),
        "model.layers.*.mlp.gate_proj": columns(),
        "model.layers.*.mlp.up_proj": columns(),
        "model.layers.*.mlp.down_proj": parallel.RowwiseParallel(output_layouts=cut),
        "model.norm": parallel.SequenceParallel(),
        "lm_head": columns(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
    }


def torchs(rank: Rank, flags: Sequence[str], *, own_heads: bool) -> Turn:
    config = config_of(flags, rank.size)
    ours, vocab_size = config.model, open_samples(config)[1]
    of_query = None
    if own_heads:
        each = ours.num_attention_heads // rank.size
        own = torch.arange(rank.rank * each, (rank.rank + 1) * each)
        of_query = own * ours.query_groups // ours.num_attention_heads
    model = PlainLlama(ours, vocab_size, of_query)
    model.load_state_dict(initial_weights(ours, vocab_size))
    model.to(rank.device, dtype_of(config))
    parallel.parallelize_module(model, rank.mesh().device_mesh()["tensor"], plan(own_heads))
    return trained(rank, config, model, model)


def transformers(rank: Rank, flags: Sequence[str]) -> Turn:
    config = config_of(flags)
    model = peers.transformers_llama(config.model, open_samples(config)[1])
    assert model.config._attn_implementation == "sdpa"
    model.to(rank.device, dtype_of(config))

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return trained(rank, config, model, loss)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dtype_of(config: PretrainLlamaConfig) -> torch.dtype:
    return steps.DTYPES[steps.precision_of(config)]


def trained(
    rank: Rank, config: PretrainLlamaConfig, model: nn.Module, loss: Callable[..., Tensor]
) -> Turn:
    """Training steps as in the tutorial. Parameters may be plain tensors, DTensors or a mixture,
    which neither clip_grad_norm_ nor a fused optimizer accepts in one call."""
    own, number, parameters = config.optimizer, count(), list(model.parameters())
    betas = own.adam_beta1, own.adam_beta2
    kinds = [[x for x in parameters if isinstance(x, DTensor) is cut] for cut in (True, False)]
    groups = [each for each in kinds if each]
    adamw = torch.optim.AdamW(
        [{"params": each} for each in groups],
        steps.LEARNING_RATE,
        betas,
        own.adam_eps,
        own.weight_decay,
        fused=True,
    )

    def clip() -> None:
        norms = [get_total_norm(x.grad for x in each) for each in groups]
        norm = torch.stack([whole(each) for each in norms]).norm()
        for each in groups:
            clip_grads_with_norm_(each, own.clip_grad, norm)

    def turn() -> Figures:
        batch = steps.batch_of(config, next(number))
        tokens, labels = (
            torch.from_numpy(each).to(rank.device).contiguous()
            for each in (batch.tokens, batch.labels)
        )
        adamw.zero_grad(set_to_none=True)
        with parallel.loss_parallel():  # no effect on plain tensors
            mean = loss(tokens, labels)
            mean.backward()
        clip()
        adamw.step()
        return {"loss": mean.item(), "tokens": batch.num_tokens}

    return turn


def contenders(
    flags: Flags,
    tensor_parallel: tuple[int, ...] = (1, 2),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps of a Llama.

    Args:
        tensor_parallel: numbers of ranks; on one the peer is transformers, on several torch's
            tensor parallelism.
        dtypes: dtypes of weights and activations.
        program_flags: flags of pretrain.py --model llama: --program-flags="--num-layers 2".
    """
    for dtype, size in product(dtypes, tensor_parallel):
        words = shlex.split(
            f"{WORDS} {DTYPES[dtype]} --tensor-model-parallel-size {size} {program_flags}"
        )
        ours = partial(steps.ours, settings=PretrainLlamaConfig)
        runs: dict[str, tuple[Callable[..., Turn], list[str]]] = {OURS: (ours, words)}
        if size == 1:
            runs[TRANSFORMERS] = (transformers, words)
        else:
            runs[SEQUENCE_PARALLEL] = (ours, [*words, "--sequence-parallel"])
            runs[ALL_HEADS] = (partial(torchs, own_heads=False), words)
            runs[OWN_HEADS] = (partial(torchs, own_heads=True), words)
        for name, (run, own) in runs.items():
            yield Contender(
                name,
                run,
                {"flags": own},
                group=f"{dtype}, t = {size}",
                ranks=size,
                needs=("transformers",) if name == TRANSFORMERS else (),
                same={"loss": TOLERANCES[dtype]},
            )


def result(found: Results) -> str:
    texts = [
        f"{name} {cell.text('{:.2f}', is_ratio=True)} ({group})"
        for group, name in found.rows
        if name not in (OURS, SEQUENCE_PARALLEL) and (cell := found.cell(group, name, RATIO))
    ]
    return f"Time of a step, of this project's: {'; '.join(texts) or '(not measured)'}."


RATIO, MEMORY = "time / ours", "memory / ours"
COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY, "peak_bytes", "{:.3f}", "its / first"),
)
QUESTION = Question(contenders, COLUMNS, result, drawn=[RATIO])

if __name__ == "__main__":
    QUESTION.run()
