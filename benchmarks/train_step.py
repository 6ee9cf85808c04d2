"""Whole training steps beside those of others.

A step is forward, loss, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same samples. A run whose contenders differ in the losses of
their first steps reports nothing; on a CPU those with recomputation have the same bit for bit.
`peers.py` says what each contender is. Memory is that of all ranks above what their modules take;
what Megatron-Core imports late counts as its memory. FLOPs, with recomputation and all of
attention, and what a rank keeps for the backward are those of tools/plan.py. The floor is the
step's matmuls alone: its ratio is the share of the floor that this project reaches. Against peers a
claim is made for hidden sizes of 768 and sequences of 512 tokens or more alone; smaller models are
shown beside. On gloo nothing is said of NCCL.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import shlex
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question
from benchmarks.report import Results
from tools.planning.trace import Step

OURS, FLOOR = "this project", "floor"
DROPOUT = "this project, dropout 0.1"
DROPPED = "--attention-dropout 0.1 --hidden-dropout 0.1"
VARIANTS = {  # and their flags
    OURS: "",
    "this project, sequence parallel": "--sequence-parallel",
    "this project, full recomputation": "--recompute-granularity full",
    "this project, selective recomputation": "--recompute-granularity selective",
    "this project, not compiled": "--no-compile",
    DROPOUT: DROPPED,
    f"{DROPOUT}, attention's by coordinates": f"{DROPPED} --attention-dropout-rng coordinates",
    f"{DROPOUT}, attention's by flex": f"{DROPPED} --attention-dropout-rng coordinates-flex",
}
ALONE, SEVERAL, ANY = range(1, 2), range(2, 1000), range(1, 1000)
PEERS: dict[str, tuple[Any, range]] = {  # and their tensor-parallel sizes
    "plain torch": (peers.plain, ALONE),
    "transformers": (peers.transformers, ALONE),
    "transformers, compiled": (partial(peers.transformers, compiled=True), ALONE),
    "DTensor": (peers.plain, SEVERAL),
    "Megatron-Core": (peers.megatron_core, ANY),
    FLOOR: (peers.floor, ANY),
}
NEEDS = {
    "transformers": (peers.TRANSFORMERS,),
    "transformers, compiled": (peers.TRANSFORMERS,),
    "Megatron-Core": ("megatron.core",),
}
USUAL = (OURS, "plain torch", "transformers", "DTensor", "Megatron-Core", FLOOR)
SIZES = {  # flags of a preset on a CPU
    "gpt2_124m": "--seq-length 512 --micro-batch-size 2 --vocab-size 50304",
    "gpt2_30m": "--vocab-size 8192",
    "quickstart": "--vocab-size 2048",
}
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3}  # of the losses
RATIO = "time / the first's"


def result(found: Results) -> str:
    """Of the models that claims are made for."""
    claims = [
        f"{name} {cell.text('{:.2f}', is_ratio=True)} ({group.partition(', ')[2]})"
        for group, name in found.rows
        if group.startswith("gpt2_124m") and name in PEERS and name != FLOOR
        if (cell := found.cell(group, name, RATIO))
    ]
    if not claims:
        return "These models are too small for a claim."
    return f"Time of a step of GPT-2 124M over this project's: {'; '.join(claims)}."


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
    names = list(dict.fromkeys(flags.contenders or USUAL))
    if unknown := set(names) - {*VARIANTS, *PEERS}:
        raise ValueError(f"--contenders {sorted(unknown)[0]}: there are {[*VARIANTS, *PEERS]}")
    for preset, dtype, ranks, name in product(presets, dtypes, tensor_parallel, names):
        run, sizes = PEERS.get(name, (steps.ours, ANY))
        if ranks not in sizes or (stub_communication and name in PEERS):
            continue
        words = f"{SIZES.get(preset, '')} --no-fp16 {'--bf16' if dtype == 'bf16' else '--no-bf16'} "
        words += f"--attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size {ranks} "
        words += f"{program_flags} {VARIANTS.get(name, '')}"
        given, facts = ["--preset", preset, *shlex.split(words)], {}
        if name != FLOOR:
            step = Step(steps.read(given, ranks), ranks, dtype, flags.device)
            executed, useful = step.executed_flops / ranks, step.flops / ranks
            if name in VARIANTS:
                facts = {"executed": executed, "kept": step.trace.kept}
            if (peak := steps.peak_of(flags.device)) and dtype == "bf16":
                # HFU and MFU of a step of a second, in %
                facts |= {"hfu": 100 * executed / peak, "mfu": 100 * useful / peak}
        tolerance = TOLERANCES[dtype]
        if flags.device == "cpu" and "recomputation" in name and names[0] == OURS:
            tolerance = 0.0
        yield Contender(
            name,
            run,
            {"flags": given, **({"of_ranks": ranks, "fast": True} if stub_communication else {})},
            group=f"{Path(preset).name.removesuffix('.toml')}, {dtype}, t = {ranks}",
            ranks=1 if stub_communication else ranks,
            threads=max(1, threads // ranks),
            needs=NEEDS.get(name, ()),
            same={} if name == FLOOR or DROPOUT in name else {"loss": tolerance},
            facts=facts,
        )


COLUMNS = (
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("seconds", "wall", "{:.4f}"),
    Column("CPU seconds", "cpu", "{:.4f}"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column("kept for the backward, MiB", "kept", "{:,.0f}", unit=2**20),
    Column("FLOPs / the first's", "executed", "{:.3f}", "its / first"),
    Column("MFU, %", "mfu", "{:.1f}", per="wall"),
    Column("HFU, %", "hfu", "{:.1f}", per="wall"),
)
QUESTION = Question(contenders, COLUMNS, result, turns=3, warm_up=3)

if __name__ == "__main__":
    QUESTION.run()
