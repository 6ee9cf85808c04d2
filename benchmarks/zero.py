"""ZeRO compared with torch's fully_shard and ZeroRedundancyOptimizer.

GPT-2 with hidden size 768, 12 layers and vocabulary 50,257, on two ranks that read different
samples of 256 tokens. At stage 3 the peer is a GPT-2 in plain torch under `fully_shard` (FSDP2),
with one unit per block and one for the rest; at stage 2 the same with reshard_after_forward=False,
which keeps gathered weights after the forward; at stage 1 DistributedDataParallel with
ZeroRedundancyOptimizer. This project does not return freed memory to the system (glibc's mallopt);
a second row of stage 3 runs fully_shard like that, too. Stage 3 is also compared with this
project's stage 0 on the same samples: its extra time is communication that no computation hides.
All start from the same weights, read the same random tokens and update by AdamW with clipping. A
turn is one update; losses of two are compared. In bf16, weights are used in bf16, and masters,
moments and gradient sums are fp32: fully_shard by MixedPrecisionPolicy, DistributedDataParallel
under autocast. Memory is the ranks' mean peak from the first turn on, without imported modules.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.processes import forget_peak
from benchmarks.report import Results
from megatron.config.pretrain import PretrainGPT2Config
from megatron.train.machine import keep_freed_memory
from tools.layouts.job import open_samples

OURS, WHOLE = "this project", "this project, stage 0"
FULLY_SHARD, KEEPING = "fully_shard", "fully_shard, freed memory kept"
REDUNDANCY = "ZeroRedundancyOptimizer"
WORDS = (
    "--preset gpt2_124m --seq-length 256 --vocab-size 50257 --micro-batch-size 1 "
    "--train-iters 3000 --no-compile"
)
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
RANKS = 2


def ours(rank: Rank, flags: Sequence[str], stage: int) -> Turn:
    turn = steps.ours(rank, [*flags, "--zero-stage", str(stage)])
    forget_peak(rank.device_type)
    return turn


def without(rank: Rank, flags: Sequence[str], stage: int) -> Turn:
    return ours(rank, flags, 0)


def whole_weights(config: PretrainGPT2Config) -> tuple[int, dict[str, Tensor]]:
    """(unpadded vocabulary size, weights of PlainGPT2 by name)"""
    vocab_size = open_samples(config)[1]
    weights = peers.initial_weights(config.model, vocab_size)
    return vocab_size, peers.in_parts(weights, 1)


def sharded(rank: Rank, flags: Sequence[str], stage: int, *, keeps: bool = False) -> Turn:
    """keeps: see `keep_freed_memory`."""
    if keeps:
        keep_freed_memory()
    config: PretrainGPT2Config = steps.read(flags, rank.size)
    rank.connect()
    vocab_size, weights = whole_weights(config)
    with torch.device("meta"):
        model = peers.PlainGPT2(config.model, vocab_size)
    model.head.weight = model.word_embedding.weight
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(rank.device_type, (rank.size,)),
        "reshard_after_forward": stage == 3,
    }
    if steps.precision_of(config) == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units: list[Any] = [*model.transformer.layers.children(), model]
    for each in units:
        fully_shard(each, **settings)
    for each in units:
        each.set_force_sum_reduction_for_comms(True)  # gloo has no average
    model.to_empty(device=rank.device)
    with torch.no_grad():
        parameters: Iterator[tuple[str, Any]] = model.named_parameters()
        for name, own in parameters:
            whole = weights.pop(name).to(rank.device)
            own.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None))
    turn = Sharded(rank, config, model, model, is_cut=lambda _: True, models=rank.size)
    del weights, whole
    forget_peak(rank.device_type)
    return turn


class Sharded(peers.Training):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_cast = False  # no autocast: the units' policy casts


def redundancy(rank: Rank, flags: Sequence[str], stage: int) -> Turn:
    """stage: 1."""
    config: PretrainGPT2Config = steps.read(flags, rank.size)
    rank.connect()
    vocab_size, weights = whole_weights(config)
    model = peers.PlainGPT2(config.model, vocab_size)
    model.load_state_dict(weights | {"head.weight": weights["word_embedding.weight"]})
    model.head.weight = model.word_embedding.weight
    turn = Redundancy(rank, config, model.to(rank.device))
    del weights
    forget_peak(rank.device_type)
    return turn


class Redundancy(peers.Training):
    """The optimizer state is sharded over the ranks."""

    def __init__(self, rank: Rank, config: PretrainGPT2Config, model: nn.Module) -> None:
        self.parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(rank, config, model, self.parallel, models=rank.size)

    def __post_init__(self) -> None:
        own, parameters = self.config.optimizer, list(self.model.parameters())
        groups = [
            {"params": [x for x in parameters if (x.dim() > 1) is decays], "weight_decay": decay}
            for decays, decay in ((True, own.weight_decay), (False, 0.0))
        ]
        self.is_cast = steps.precision_of(self.config) == "bf16"
        self.adamw: Any = ZeroRedundancyOptimizer(
            groups,
            torch.optim.AdamW,
            lr=steps.LEARNING_RATE,
            betas=(own.adam_beta1, own.adam_beta2),
            eps=own.adam_eps,
            fused=True,
        )

    def update(self) -> None:
        clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.adamw.step()


PEERS: dict[int, dict[str, Callable[..., Turn]]] = {
    1: {REDUNDANCY: redundancy},
    2: {FULLY_SHARD: sharded},
    3: {FULLY_SHARD: sharded, KEEPING: partial(sharded, keeps=True), WHOLE: without},
}


def contenders(
    flags: Flags,
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare training steps under ZeRO.

    Args:
        stages: ZeRO stages, each compared with the nearest equivalent in torch.
        dtypes: dtypes of weights and activations.
        program_flags: flags of pretrain_gpt2.py: --program-flags="--num-layers 2".
    """
    for dtype, stage in product(dtypes, stages):
        precision = "--bf16" if dtype == "bf16" else "--no-bf16"
        words = shlex.split(f"{WORDS} {precision} {program_flags}")
        for name, run in ({OURS: ours} | PEERS[stage]).items():
            yield Contender(
                name,
                run,
                {"flags": words, "stage": stage},
                group=f"{dtype}, stage {stage}",
                ranks=RANKS,
                same={"loss": TOLERANCES[dtype]},
            )


def result(found: Results) -> str:
    texts = []
    for group, name in found.rows:
        speed, memory = (found.cell(group, name, column) for column in (SPEED, MEMORY))
        if name != OURS and speed and memory:
            text = (
                f"{speed.text('{:.2f}', is_ratio=True)} and {memory.text('{:.2f}', is_ratio=True)}"
            )
            texts.append(f"{text} of {name} ({group})")
    listed = "; ".join(texts) or "(not measured)"
    return f"Tokens/s and peak memory of this project, over those of others: {listed}."


SPEED, MEMORY = "speed of ours / its", "memory of ours / its"
COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(SPEED, "wall", "{:.3f}", "its / first"),
    Column("peak MiB of a rank", "peak_bytes", "{:,.0f}", unit=RANKS * 2**20),
    Column(MEMORY, "peak_bytes", "{:.3f}", "first / its"),
)
QUESTION = Question(contenders, COLUMNS, result, warm_up=2, drawn=[SPEED])

if __name__ == "__main__":
    QUESTION.run()
