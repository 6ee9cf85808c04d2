"""Whole training steps of one GPT-2, by this project and by what people would use instead.

A step is forward, loss, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same samples; the losses of the first steps are compared
before anything is timed. `peers.py` says what each contender is. Memory is that of all ranks above
what their modules take. The floor is the step's matmuls alone: its ratio is the share of the floor
that this project reaches. Against peers a claim is made for hidden sizes of 768 and sequences of
512 tokens or more alone; smaller models are shown beside. On gloo nothing is said of NCCL.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Flags, Question, ask, cli
from benchmarks.report import Results

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
RATIO = "its time / this project's"
COLUMNS = (
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("seconds", "wall", "{:.4f}"),
    Column("CPU seconds", "cpu", "{:.4f}"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
)


def group(
    preset: str, dtype: str, ranks: int, more: Sequence[str], names: Sequence[str], threads: int
) -> Iterator[Contender]:
    """more: flags. threads: of all ranks together."""
    flags = ["--preset", preset, *SIZES.get(preset, ()), *more]
    flags += ["--bf16" if dtype == "bf16" else "--no-bf16", "--tensor-model-parallel-size"]
    flags += [str(ranks), "--attention-dropout", "0", "--hidden-dropout", "0"]
    common: dict[str, Any] = {
        "group": f"{Path(preset).name.removesuffix('.toml')}, {dtype}, t = {ranks}"
    }
    common |= {"ranks": ranks, "threads": max(1, threads // ranks)}
    for name in names:
        if name in VARIANTS:
            run, arguments = steps.ours, {"flags": [*flags, *VARIANTS[name]]}
            needs: tuple[str, ...] = ()
        else:
            run, arguments, sizes, needs = PEERS[name]
            if sizes not in (0, min(ranks, 2)):
                continue
            arguments = {"flags": flags, **arguments}
        same = {} if DROPOUT in name or name == FLOOR else {"loss": TOLERANCES[dtype]}
        yield Contender(name=name, run=run, arguments=arguments, needs=needs, same=same, **common)


def result(found: Results) -> str:
    """Of the models that claims are made for."""
    said = []
    for group in dict.fromkeys(group for group, _ in found.rows if group.startswith("gpt2_124m")):
        for name in PEERS.keys() - {FLOOR}:
            if (group, name) in found.rows and (cell := found.cell(group, name, RATIO)):
                said.append(
                    f"{name} {cell.text('{:.2f}', is_ratio=True)} ({group.partition(', ')[2]})"
                )
    return f"A step of GPT-2 124M takes this project's time x: {'; '.join(said)}." if said else ""


def main(
    flags: Flags,
    presets: tuple[str, ...] = tuple(SIZES),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_parallel: tuple[int, ...] = (1, 2),
    more: tuple[str, ...] = (),
    threads: int = 2,
) -> None:
    """Compare steps.

    Args:
        presets: of pretrain_gpt2.py, names or files.
        dtypes: of weights and activations; most peers compute under autocast.
        tensor_parallel: ranks that the model is cut over.
        more: flags of pretrain_gpt2.py, last on the line.
        threads: of all ranks of a contender together.
    """
    names = flags.contenders or USUAL
    if unknown := set(names) - {*VARIANTS, *PEERS}:
        raise ValueError(f"--contenders {sorted(unknown)[0]}: there are {[*VARIANTS, *PEERS]}")
    ask(
        Question(
            title="Speed of a training step",
            method=__doc__,
            contenders=[
                each
                for preset in presets
                for dtype in dtypes
                for ranks in tensor_parallel
                for each in group(preset, dtype, ranks, more, names, threads)
            ],
            columns=COLUMNS,
            result=result,
            rounds=5,
            turns=3,
            warm_up=3,
            packages=("torch", "transformers", "megatron-core"),
            settings={"threads": threads},
            picture="bars",
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
