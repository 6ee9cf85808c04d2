"""Llama, GPT-2 and ViT: own layers and plans compared with transformers and parallelize_module.

    llama_tutorial   of source C of docs/sources.md: 12 layers, hidden size 768, 12 query and 3
                     key/value heads, vocabulary 50,000, sequences of 512 tokens
    llama, gpt2      4 layers of the same size; Llama with 4 key/value heads, GPT-2 with 12
    vit_small        4 layers, hidden size 128, as in the preset vit_small_cpu; images of 32 x 32
                     pixels in patches of 4, 10 classes
    vit_tiny         6 layers, hidden size 512, as in vit_tiny_cifar10; the same images

By plan is the model as transformers builds it, sharded by parallelize() as in `--model
huggingface`. On one rank the peer is the unmodified model with `sdpa`. On two it is transformers'
tensor parallelism (DistributedConfig), and torch's `parallelize_module` on the same unmodified
model with the tutorial's plan and loss parallel; norms and hidden states between layers stay whole
there, since the model derives positions from the length of its input. The tutorial's whole plan
runs on a plain Llama: norms and hidden states are sharded along the sequence, and every rank
computes all heads from gathered queries, keys and values; "own heads" computes those of its rank,
as here. transformers has no plan for GPT-2, and neither torch nor transformers shards its Conv1D.

All start from the same weights, read the same random tokens or images, without dropout, and update
by AdamW with clipping; a turn is one update, and losses are compared. In bf16 weights, gradients
and moments are bf16 (--pure-bf16), as in the tutorial; ViT is in fp32 alone. Memory is that of all
ranks from the first turn on, without imported modules.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.config.model import LlamaConfig
from megatron.config.pretrain import (
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
    PretrainViTConfig,
)
from megatron.huggingface.config import HuggingFaceConfig
from megatron.huggingface.pretrain import PretrainHuggingFaceConfig
from megatron.huggingface.weights import layout_of
from megatron.parallel.layers_llama import RotaryEmbedding
from megatron.parallel.sharding import load_whole
from tools.convert.llama import LLAMA
from tools.convert.weights import resolve, to_theirs
from tools.layouts.job import open_samples

OURS, SEQUENCE_PARALLEL = "this project", "this project, sequence parallel"
BY_PLAN, TRANSFORMERS, TORCH = "by plan", "transformers", "parallelize_module"
ALL_HEADS, OWN_HEADS = f"{TORCH}, plain Llama, all heads", f"{TORCH}, plain Llama, own heads"
DTYPES = {"fp32": "--no-bf16", "bf16": "--pure-bf16"}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
RATIO, MEMORY = "time / ours", "memory / ours"
COMMON = "--train-iters 3000 --no-compile --micro-batch-size"
SIZES = "--num-layers 4 --seq-length 512 --vocab-size 50000"
IMAGES = f"{COMMON} 64 --image-size 32 --patch-size 4 --mock-data"
Model = Literal["llama_tutorial", "llama", "gpt2", "vit_small", "vit_tiny"]
MODELS: dict[Model, tuple[type[PretrainConfig], str, str]] = {  # settings, flags, more with --small
    "llama_tutorial": (
        PretrainLlamaConfig,
        f"--preset llama_tutorial {COMMON} 2",
        steps.SMALL_LLAMA,
    ),
    "llama": (
        PretrainLlamaConfig,
        f"--preset llama_tutorial {COMMON} 2 {SIZES} --num-query-groups 4",
        steps.SMALL_LLAMA,
    ),
    "gpt2": (PretrainGPT2Config, f"--preset gpt2_124m {COMMON} 2 {SIZES}", steps.SMALL),
    "vit_small": (
        PretrainViTConfig,
        f"{IMAGES} --num-layers 4 --hidden-size 128 --num-attention-heads 4",
        "--num-layers 1 --micro-batch-size 4",
    ),
    "vit_tiny": (
        PretrainViTConfig,
        f"{IMAGES} --num-layers 6 --hidden-size 512 --num-attention-heads 8",
        "--num-layers 1 --micro-batch-size 4",
    ),
}


def sequence_parallel(rank: Rank, flags: Sequence[str], settings: type[PretrainConfig]) -> Turn:
    return steps.ours(rank, [*flags, "--sequence-parallel"], settings=settings)


def by_plan(rank: Rank, flags: Sequence[str], settings: type[PretrainConfig]) -> Turn:
    native = steps.read(flags, rank.size, settings)
    theirs = peers.transformers_model(native.model, open_samples(native)[1])
    described = HuggingFaceConfig(
        hf_model=native.model.kind, hf_config=theirs.config.to_json_string()
    )
    same = {name: getattr(native, name) for name in ("optimizer", "parallel", "precision")}
    config = PretrainHuggingFaceConfig(model=described, training=native.training, **same)
    state = steps.build(config, steps.mesh_of(rank, config))
    weights = theirs.state_dict()
    with torch.no_grad():
        for each in state.optimizer.masters():
            whole = weights[each.key.removeprefix("model.")]
            layout = layout_of(state.model, each.key)
            load_whole(each.local, layout.from_original(whole), each.spec)
    state.optimizer.publish()
    return steps.Run(native, state)


def transformers(rank: Rank, flags: Sequence[str], settings: type[PretrainConfig]) -> Turn:
    """Their tensor parallelism."""
    from transformers.distributed import DistributedConfig

    config = steps.read(flags, rank.size, settings)
    whole = peers.transformers_model(config.model, open_samples(config)[1])
    rank.connect()
    model: Any = type(whole).from_pretrained(
        None,
        config=whole.config,
        state_dict=whole.state_dict(),
        dtype=steps.dtype_of(config),
        distributed_config=DistributedConfig(tp_size=rank.size),
    )
    return peers.Training(rank, config, model.train(), peers.causal_loss(model, dtype=None))


def transformers_vit(rank: Rank, flags: Sequence[str], settings: type[PretrainConfig]) -> Turn:
    config = steps.read(flags, 1, settings)
    model = peers.transformers_model(config.model, open_samples(config)[1]).to(rank.device)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(torch.float32).div(255).sub(0.5).div(0.5)
        return F.cross_entropy(model(pixels).logits, labels)

    return peers.Training(rank, config, model, loss)


def plan_of_unmodified() -> dict[str, Any]:
    """The tutorial's plan with loss parallel, without sequence parallelism."""
    whole, columns = Replicate(), parallel.ColwiseParallel()
    return {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=whole),
        "model.layers.*.self_attn.[qkv]_proj": columns,
        "model.layers.*.self_attn.o_proj": parallel.RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": columns,
        "model.layers.*.mlp.up_proj": columns,
        "model.layers.*.mlp.down_proj": parallel.RowwiseParallel(),
        "lm_head": parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


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


def plan_of_tutorial(own_heads: bool) -> dict[str, Any]:
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


def tutorial(
    rank: Rank, flags: Sequence[str], settings: type[PretrainLlamaConfig], *, own_heads: bool
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
    mesh = rank.mesh().device_mesh()["tensor"]
    parallel.parallelize_module(model, mesh, plan_of_tutorial(own_heads))
    return peers.Training(rank, config, model, model)


UNMODIFIED = peers.transformers_in_dtype
ONE = {OURS: steps.ours, TRANSFORMERS: UNMODIFIED}
TUTORIAL = {
    SEQUENCE_PARALLEL: sequence_parallel,
    ALL_HEADS: partial(tutorial, own_heads=False),
    OWN_HEADS: partial(tutorial, own_heads=True),
}
RUNS: dict[tuple[Model, int], dict[str, Callable[..., Turn]]] = {  # by model and number of ranks
    ("llama_tutorial", 1): ONE,
    ("llama_tutorial", 2): {OURS: steps.ours, **TUTORIAL},
    ("llama", 1): {**ONE, BY_PLAN: by_plan},
    ("llama", 2): {
        OURS: steps.ours,
        BY_PLAN: by_plan,
        TRANSFORMERS: transformers,
        TORCH: partial(UNMODIFIED, plan=plan_of_unmodified),
        **TUTORIAL,
    },
    ("gpt2", 1): {**ONE, BY_PLAN: by_plan},
    ("gpt2", 2): {OURS: steps.ours, BY_PLAN: by_plan},
    ("vit_small", 1): {OURS: steps.ours, TRANSFORMERS: transformers_vit},
    ("vit_tiny", 1): {OURS: steps.ours, TRANSFORMERS: transformers_vit},
}


def contenders(
    flags: Flags,
    models: tuple[Model, ...] = tuple(MODELS),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_model_parallel_size: tuple[Literal[1, 2], ...] = (1, 2),
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps.

    Args:
        models: models to compare.
        dtypes: dtypes of weights and activations.
        tensor_model_parallel_size: numbers of ranks; on two the peers are tensor-parallel.
        program_flags: flags of pretrain.py for all the models: --program-flags="--num-layers 2".
    """
    for model, dtype, size in product(models, dtypes, tensor_model_parallel_size):
        settings, words, small = MODELS[model]
        if settings is PretrainViTConfig and dtype != "fp32":
            continue
        words += f" {DTYPES[dtype]} --tensor-model-parallel-size {size} "
        own = shlex.split(f"{words} {small if flags.small else ''} {program_flags}")
        for name, run in RUNS.get((model, size), {}).items():
            yield Contender(
                name,
                run,
                {"flags": own, "settings": settings},
                group=f"{model}, {dtype}, t = {size}",
                ranks=size,
                needs=("transformers",),
                memory_of_turns=True,
                same={"loss": TOLERANCES[dtype]},
            )


def result(found: Results) -> str:
    return f"Time of a step over this project's: {found.ratios(RATIO, {OURS, SEQUENCE_PARALLEL})}."


# The second loss, too, is compared: it depends on the first update.
QUESTION = Question(
    contenders,
    (
        Column("seconds", "wall", "{:.3f}"),
        Column("CPU seconds", "cpu", "{:.3f}"),
        Column("tokens or images/s", "tokens", "{:,.0f}", per="wall"),
        Column(RATIO, "wall", "{:.3f}", "its / first"),
        Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
        Column(MEMORY, "peak_bytes", "{:.3f}", "its / first"),
    ),
    result,
    turns=3,
    warm_up=2,
    drawn=[RATIO],
    small="--dtypes fp32",
)

if __name__ == "__main__":
    QUESTION.run()
