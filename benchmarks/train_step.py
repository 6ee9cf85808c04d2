"""Whole training steps beside those of others.

A step is forward, loss, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same samples. A run whose contenders differ in the losses of
their first steps reports nothing. `peers.py` says what each contender is. Memory is that of all
ranks above what their modules take; what Megatron-Core imports late counts as its memory. The floor
is the step's matmuls alone: its ratio is the share of the floor that this project reaches. Against
peers a claim is made for hidden sizes of 768 and sequences of 512 tokens or more alone; smaller
models are shown beside. On gloo nothing is said of NCCL.
"""

import shlex
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question
from benchmarks.report import Results
from tools.planning.trace import Step

OURS, FLOOR = "this project", "floor"
DROPOUT = "this project, dropout 0.1"
VARIANTS = {
    OURS: (),
    "this project, sequence parallel": ("--sequence-parallel",),
    "this project, full recomputation": ("--recompute-granularity", "full"),
    "this project, selective recomputation": ("--recompute-granularity", "selective"),
    "this project, not compiled": ("--no-compile",),
    DROPOUT: ("--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    f"{DROPOUT}, attention's by coordinates": (
        *("--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
        *("--attention-dropout-rng", "coordinates"),
    ),
}
# Function, arguments beside the flags, tensor-parallel sizes (0: any), needed modules.
PEERS: dict[str, tuple[Any, dict[str, Any], int, tuple[str, ...]]] = {
    "plain torch": (peers.plain, {}, 1, ()),
    "transformers": (peers.transformers, {}, 1, ()),
    "transformers, compiled": (peers.transformers, {"compiled": True}, 1, ()),
    "DTensor": (peers.plain, {}, 2, ()),
    "Megatron-Core": (peers.megatron_core, {}, 0, ("megatron.core",)),
    FLOOR: (peers.floor, {}, 0, ()),
}
USUAL = (OURS, "plain torch", "transformers", "DTensor", "Megatron-Core", FLOOR)
SIZES = {  # flags of a preset on a CPU
    "gpt2_124m": ("--seq-length", "512", "--micro-batch-size", "2", "--vocab-size", "50304"),
    "gpt2_30m": ("--vocab-size", "8192"),
    "quickstart": ("--vocab-size", "2048"),
}
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3}  # of the losses
RATIO = "time / the first's"
COLUMNS = (
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("seconds", "wall", "{:.4f}"),
    Column("CPU seconds", "cpu", "{:.4f}"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    *(  # on a known GPU: without and with recomputation; attention counts whole
        Column(name, lambda own, _, key=key: 100 * own[key] / own["wall"] / own["peak"], "{:.1f}")
        for name, key in (("MFU, %", "useful"), ("HFU, %", "executed"))
    ),
)


class Group(NamedTuple):
    """Contenders of one model. threads: of all ranks together. more: flags of the program."""

    preset: str
    dtype: str
    ranks: int
    threads: int
    more: tuple[str, ...]
    peak: float | None  # FLOP/s of the device
    is_stubbed: bool  # one of the ranks is there, and its collectives move nothing

    def contender(self, name: str) -> Contender | None:
        """None where it is none of this group."""
        flags = ["--preset", self.preset, *SIZES.get(self.preset, ()), *self.more]
        flags += ["--no-fp16", "--bf16" if self.dtype == "bf16" else "--no-bf16"]
        flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
        flags += ["--tensor-model-parallel-size", str(self.ranks)]
        flags += VARIANTS.get(name, ())
        run, arguments, sizes, needs = PEERS.get(name, (steps.ours, {}, 0, ()))
        if sizes not in (0, min(self.ranks, 2)) or (self.is_stubbed and name in PEERS):
            return None
        if self.is_stubbed:
            arguments = {"of_ranks": self.ranks, "fast": True}
        facts = {}
        if self.peak and name != FLOOR:
            step = Step(steps.read(flags, self.ranks), self.ranks, self.dtype)
            flops = {"useful": step.flops, "executed": step.executed_flops}
            facts = {key: each / self.ranks for key, each in flops.items()} | {"peak": self.peak}
        is_compared = DROPOUT not in name and name != FLOOR
        return Contender(
            name,
            run,
            {"flags": flags, **arguments},
            group=f"{Path(self.preset).name.removesuffix('.toml')}, {self.dtype}, t = {self.ranks}",
            ranks=1 if self.is_stubbed else self.ranks,
            threads=max(1, self.threads // self.ranks),
            needs=needs,
            same={"loss": TOLERANCES[self.dtype]} if is_compared else {},
            facts=facts,
        )


def result(found: Results) -> str:
    """Of the models that claims are made for."""
    said = []
    for group, name in found.rows:
        cell = found.cell(group, name, RATIO)
        if group.startswith("gpt2_124m") and name in PEERS.keys() - {FLOOR} and cell is not None:
            where = group.partition(", ")[2]
            said.append(f"{name} {cell.text('{:.2f}', is_ratio=True)} ({where})")
    claim = "Time of a step of GPT-2 124M over this project's: "
    return f"{claim}{'; '.join(said)}." if said else "These models are too small for a claim."


def contenders(
    flags: Flags,
    presets: tuple[str, ...] = tuple(SIZES),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_parallel: tuple[int, ...] = (1, 2),
    threads: int = 2,
    program_flags: str = "",
    stub_communication: bool = False,
) -> Iterator[Contender]:
    """Compare steps.

    Args:
        presets: of pretrain_gpt2.py.
        dtypes: of weights and activations; most peers compute under autocast.
        tensor_parallel: ranks that the model is cut over.
        threads: of all ranks of a contender together.
        program_flags: of pretrain_gpt2.py: --program-flags="--num-layers 2 --hidden-size 64".
        stub_communication: run one rank of each layout, whose collectives move nothing.
    """
    names = flags.contenders or USUAL
    if unknown := set(names) - {*VARIANTS, *PEERS}:
        raise ValueError(f"--contenders {sorted(unknown)[0]}: there are {[*VARIANTS, *PEERS]}")
    peak = steps.PEAKS.get(torch.cuda.get_device_name()) if flags.device == "cuda" else None
    more = tuple(shlex.split(program_flags))
    for preset, dtype, ranks in product(presets, dtypes, tensor_parallel):
        group = Group(preset, dtype, ranks, threads, more, peak, stub_communication)
        yield from filter(None, map(group.contender, names))


QUESTION = Question(contenders, COLUMNS, result, turns=3, warm_up=3, picture="bars")

if __name__ == "__main__":
    QUESTION.run()
