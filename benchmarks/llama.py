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
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
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


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, kv_head_index: Tensor | None) -> None:
        """kv_head_index: index of the key/value head that each query head of this rank uses."""
        super().__init__()
        h, self.size, self.kv_head_index = config.hidden_size, config.head_size, kv_head_index
        groups = config.query_groups * self.size
        self.q_proj, self.o_proj = (nn.Linear(h, h, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(h, groups, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.kv_head_index is not None:
            k, v = k[:, self.kv_head_index], v[:, self.kv_head_index]
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
    def __init__(self, config: LlamaConfig, kv_head_index: Tensor | None) -> None:
        super().__init__()
        h, epsilon = config.hidden_size, config.layernorm_epsilon
        self.input_layernorm = nn.RMSNorm(h, epsilon)
        self.self_attn = Attention(config, kv_head_index)
        self.post_attention_layernorm = nn.RMSNorm(h, epsilon)
        self.mlp = MLP(h, config.ffn_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """Llama in a tutorial's style; parameters have transformers' names without "model."."""

    def __init__(
        self, config: LlamaConfig, vocab_size: int, kv_head_index: Tensor | None = None
    ) -> None:
        super().__init__()
        h, self.rotary = config.hidden_size, RotaryEmbedding(config.head_size)
        self.embed_tokens = nn.Embedding(vocab_size, h)
        self.layers = nn.ModuleList(Layer(config, kv_head_index) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(h, config.layernorm_epsilon)
        self.lm_head = nn.Linear(h, vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over int64 [b, s] tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.embed_tokens(tokens)
        tables = self.rotary(positions, x.dtype)
        cos, sin = (torch.cat([each, each], dim=-1).to(x.dtype) for each in tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


def plan(own_heads: bool) -> dict[str, Any]:
    """The tutorial's plan; with own_heads, queries are not gathered."""
    whole, cut = Replicate(), Shard(1)
    columns = parallel.ColwiseParallel
    gathered = columns(output_layouts=whole)
    return {
        "embed_tokens": parallel.RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "layers.*.input_layernorm": parallel.SequenceParallel(),
        "layers.*.self_attn": parallel.PrepareModuleInput(
            input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
        ),
        "layers.*.self_attn.q_proj": columns() if own_heads else gathered,
        "layers.*.self_attn.k_proj": gathered,
        "layers.*.self_attn.v_proj": gathered,
        "layers.*.self_attn.o_proj": parallel.RowwiseParallel(
            input_layouts=Shard(-1) if own_heads else whole, output_layouts=cut
        ),
        "layers.*.post_attention_layernorm": parallel.SequenceParallel(),
        "layers.*.mlp": parallel.PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(whole,)
        ),
        "layers.*.mlp.gate_proj": columns(),
        "layers.*.mlp.up_proj": columns(),
        "layers.*.mlp.down_proj": parallel.RowwiseParallel(output_layouts=cut),
        "norm": parallel.SequenceParallel(),
        "lm_head": columns(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
    }


def torchs(
    rank: Rank,
    flags: Sequence[str],
    *,
    own_heads: bool,
    settings: type[PretrainLlamaConfig] = PretrainLlamaConfig,
) -> Turn:
    config = steps.read(flags, rank.size, settings)
    ours, vocab_size = config.model, open_samples(config)[1]
    kv_head_index = None
    if own_heads:
        each = ours.num_attention_heads // rank.size
        own = torch.arange(rank.rank * each, (rank.rank + 1) * each)
        kv_head_index = own * ours.query_groups // ours.num_attention_heads
    model = PlainLlama(ours, vocab_size, kv_head_index)
    weights = to_theirs(
        LLAMA, resolve(LLAMA, ours, vocab_size), peers.initial_weights(ours, vocab_size)
    )
    model.load_state_dict({name.removeprefix("model."): x for name, x in weights.items()})
    del weights
    model.to(rank.device, steps.dtype_of(config))
    parallel.parallelize_module(model, rank.mesh().device_mesh()["tensor"], plan(own_heads))
    return peers.Training(rank, config, model, model)


def contenders(
    flags: Flags,
    tensor_model_parallel_size: tuple[int, ...] = (1, 2),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps of a Llama.

    Args:
        tensor_model_parallel_size: numbers of ranks; on one the peer is transformers, on several
            torch's tensor parallelism.
        dtypes: dtypes of weights and activations.
        program_flags: flags of pretrain.py --model llama: --program-flags="--num-layers 2".
    """
    for dtype, size in product(dtypes, tensor_model_parallel_size):
        words = shlex.split(
            f"{WORDS} {DTYPES[dtype]} --tensor-model-parallel-size {size} {program_flags}"
        )
        settings = PretrainLlamaConfig
        ours = partial(steps.ours, settings=settings)
        runs: dict[str, tuple[Callable[..., Turn], list[str]]] = {OURS: (ours, words)}
        if size == 1:
            theirs = partial(peers.transformers_in_dtype, settings=settings)
            runs[TRANSFORMERS] = (theirs, words)
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
    return f"Time of a step over this project's: {found.ratios(RATIO, {OURS, SEQUENCE_PARALLEL})}."


RATIO, MEMORY = "time / ours", "memory / ours"
COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY, "peak_bytes", "{:.3f}", "its / first"),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    drawn=[RATIO],
    small="--dtypes fp32",
    small_flags=steps.SMALL_LLAMA,
)

if __name__ == "__main__":
    QUESTION.run()
