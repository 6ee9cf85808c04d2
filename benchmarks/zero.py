"""ZeRO compared with torch's fully_shard and ZeroRedundancyOptimizer.

GPT-2 with hidden size 768, 12 layers and vocabulary 50,257, on two ranks that read different
samples of 256 tokens. At stage 3 the peer is a GPT-2 in plain torch under `fully_shard` (FSDP2),
with one unit per block and one for the rest; at stage 2 the same with reshard_after_forward=False,
which keeps gathered weights after the forward; at stage 1 DistributedDataParallel with
ZeroRedundancyOptimizer. This project keeps freed memory (glibc's mallopt), at stage 3 only blocks
of up to 4 MB; a second row of stage 3 has fully_shard keep all of it, too. Stage 3 is also compared
with this project's stage 0 on the same samples: its extra time is communication that no computation
hides. All start from the same weights, read the same random tokens and update by AdamW with
clipping. A turn is one update; losses of two are compared. In bf16, weights are used in bf16, and
masters, moments and gradient sums are fp32: fully_shard by MixedPrecisionPolicy,
DistributedDataParallel under autocast. Memory is the ranks' mean peak from the first turn on,
without imported modules.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.plain_gpt2 import PlainGPT2
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


def sharded(rank: Rank, flags: Sequence[str], *, keeps: bool = False) -> Turn:
    """keeps: see `keep_freed_memory`."""
    if keeps:
        keep_freed_memory()
    config: PretrainGPT2Config = steps.read(flags, rank.size)
    rank.connect()
    vocab_size = open_samples(config)[1]
    weights = peers.in_parts(peers.initial_weights(config.model, vocab_size), 1)
    with torch.device("meta"):
        model = PlainGPT2(config.model, vocab_size)
    model.head.weight = model.word_embedding.weight
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(rank.device_type, (rank.size,)),
        "reshard_after_forward": config.parallel.stage_of_zero == 3,
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
    # No autocast: the units' policy casts.
    return peers.MasterTraining(
        rank, config, model, model, models=rank.size, is_cut=lambda parameter: True
    )


def redundancy(rank: Rank, flags: Sequence[str]) -> Turn:
    config: PretrainGPT2Config = steps.read(flags, rank.size)
    rank.connect()
    model = peers.plain_gpt2(config, rank.device)
    return Redundancy(
        rank,
        config,
        model,
        DistributedDataParallel(model, gradient_as_bucket_view=True),
        models=rank.size,
        autocast=steps.precision_of(config) == "bf16",
    )


class Redundancy(peers.Training):
    """The optimizer state is sharded over the ranks."""

    def optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.groups(self.parameters), torch.optim.AdamW, fused=True, **self.options()
        )

    def update(self) -> None:
        clip_grad_norm_(self.parameters, self.config.optimizer.clip_grad)
        self.adamw.step()


PEERS: dict[int, dict[str, Callable[..., Turn]]] = {
    1: {REDUNDANCY: redundancy},
    2: {FULLY_SHARD: sharded},
    3: {FULLY_SHARD: sharded, KEEPING: partial(sharded, keeps=True), WHOLE: steps.ours},
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
        small = steps.SMALL if flags.small else ""
        words = f"{WORDS} {steps.DTYPE_FLAGS[dtype]} {small} {program_flags} --zero-stage "
        for name, run in ({OURS: steps.ours} | PEERS[stage]).items():
            yield Contender(
                name,
                run,
                {"flags": shlex.split(words + str(0 if name == WHOLE else stage))},
                group=f"{dtype}, stage {stage}",
                ranks=RANKS,
                memory_of_turns=True,
                same={"loss": TOLERANCES[dtype]},
            )


def result(found: Results) -> str:
    text = f"Tokens/s of this project over those of others: {found.ratios(SPEED, {OURS, WHOLE})}."
    return f"{text} Peak memory: {found.ratios(MEMORY, {OURS, WHOLE})}."


SPEED, MEMORY = "speed of ours / its", "memory of ours / its"
COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(SPEED, "wall", "{:.3f}", "its / first"),
    Column("peak MiB of a rank", "peak_bytes", "{:,.0f}", unit=RANKS * 2**20),
    Column(MEMORY, "peak_bytes", "{:.3f}", "first / its"),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    warm_up=2,
    drawn=[SPEED],
    small="--dtypes fp32",
)

if __name__ == "__main__":
    QUESTION.run()
