"""Unmodified models of transformers sharded by a plan, and other ways to train them on two ranks.

Llama and GPT-2 with hidden size 768, 12 heads (Llama: 4 key/value heads), 4 layers, vocabulary
50,000, sequences of 512 tokens, without dropout. By plan: the model as transformers builds it,
sharded by parallelize() as in `--model huggingface`. It is compared with this project's own layers
(native), with transformers' tensor parallelism (DistributedConfig), and with torch's
`parallelize_module` on the same unmodified model with the tutorial's plan and loss parallel; norms
and hidden states between layers stay whole there, since the model derives positions from the length
of its input. The tutorial's whole plan, sequence parallel, runs on a plain Llama, as in llama.py.

On one rank, as on a GPU, the unmodified model is compared with the plan's and the native one. GPT-2
has none of the three peers: transformers has no plan for it, and neither torch nor transformers
shards its Conv1D. All start from the same weights, read the same random tokens and update by AdamW
with clipping; a turn is one update, and losses are compared. In bf16 weights, gradients and moments
are bf16. Memory is that of all ranks from the first turn on, without imported modules.
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
from torch.distributed.tensor import Replicate, Shard, parallel

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import llama, peers, steps
from benchmarks.harness import Contender, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.config.pretrain import PretrainConfig, PretrainGPT2Config, PretrainLlamaConfig
from megatron.huggingface.config import HuggingFaceConfig
from megatron.huggingface.pretrain import PretrainHuggingFaceConfig
from megatron.huggingface.weights import layout_of
from megatron.parallel.sharding import load_whole

BY_PLAN, NATIVE, TRANSFORMERS = "by plan", "native", "transformers"
TORCH, TUTORIAL = "parallelize_module", "parallelize_module, plain Llama"
SIZES = "--num-layers 4 --seq-length 512 --vocab-size 50000 --micro-batch-size 2 --no-compile"
WORDS = {
    "llama": f"{llama.WORDS} {SIZES} --num-query-groups 4",
    "gpt2": f"--preset gpt2_124m {SIZES} --train-iters 3000",
}
SETTINGS: dict[str, type[PretrainConfig]] = {
    "llama": PretrainLlamaConfig,
    "gpt2": PretrainGPT2Config,
}


def by_plan(rank: Rank, flags: Sequence[str], settings: type[PretrainConfig]) -> Turn:
    native = steps.read(flags, rank.size, settings)
    theirs = peers.transformers_model(native)
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
    from transformers.distributed import DistributedConfig

    config = steps.read(flags, rank.size, settings)
    whole = peers.transformers_model(config)
    rank.connect()
    model: Any = type(whole).from_pretrained(
        None,
        config=whole.config,
        state_dict=whole.state_dict(),
        dtype=steps.dtype_of(config),
        distributed_config=DistributedConfig(tp_size=rank.size),
    )
    return peers.Training(rank, config, model.train(), peers.causal_loss(model, dtype=None))


def plan() -> dict[str, Any]:
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


NATIVES: dict[str, Callable[..., Turn]] = {BY_PLAN: by_plan, NATIVE: steps.ours}
UNMODIFIED = partial(peers.transformers_in_dtype, logits=None)
RUNS: dict[tuple[str, int], dict[str, Callable[..., Turn]]] = {
    ("llama", 1): NATIVES | {TRANSFORMERS: UNMODIFIED},
    ("gpt2", 1): NATIVES | {TRANSFORMERS: UNMODIFIED},
    ("llama", 2): NATIVES
    | {
        TRANSFORMERS: transformers,
        TORCH: partial(UNMODIFIED, plan=plan),
        TUTORIAL: partial(llama.torchs, own_heads=True),
    },
    ("gpt2", 2): NATIVES,
}


def contenders(
    flags: Flags,
    models: tuple[Literal["llama", "gpt2"], ...] = ("llama", "gpt2"),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_model_parallel_size: Literal[1, 2] = 2,
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps of models of transformers.

    Args:
        models: models to compare, one group each.
        tensor_model_parallel_size: number of ranks.
        dtypes: dtypes of weights and activations.
        program_flags: flags of pretrain.py --model llama or gpt2: --program-flags="--num-layers 2".
    """
    for kind, dtype in product(models, dtypes):
        words = f"{WORDS[kind]} {llama.DTYPES[dtype]}"
        words += f" --tensor-model-parallel-size {tensor_model_parallel_size}"
        own = shlex.split(f"{words} {program_flags}")
        for name, run in RUNS[kind, tensor_model_parallel_size].items():
            yield Contender(
                name,
                run,
                {"flags": own, "settings": SETTINGS[kind]},
                group=f"{kind}, {dtype}",
                ranks=tensor_model_parallel_size,
                needs=("transformers",),
                memory_of_turns=True,
                same={"loss": llama.TOLERANCES[dtype]},
            )


def result(found: Results) -> str:
    return f"Time of a step over that by plan: {found.ratios(llama.RATIO, {BY_PLAN})}."


# The second loss, too, is compared: it depends on the first update.
QUESTION = Question(
    contenders,
    llama.COLUMNS,
    result,
    turns=3,
    warm_up=2,
    drawn=[llama.RATIO],
    small="",
    small_flags="--num-layers 1 --hidden-size 96 --seq-length 32 --vocab-size 512",
)

if __name__ == "__main__":
    QUESTION.run()
