"""Whole training steps compared with those of others.

A step is forward, loss, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same samples. A run whose contenders differ in the losses of
their first steps reports nothing; on a CPU, losses with recomputation have to be equal bit for bit.
`peers.py` describes the contenders. Memory is that of all ranks without their imported modules;
late imports of Megatron-Core count as its memory. Beside contenders with the optimizer's state or
the activations on the host it is that from the first turn on; on a CPU nothing is copied. FLOPs,
with recomputation and all of attention, and the memory that a rank keeps for the backward are those
of tools/plan.py. The floor is only the step's matmuls: its ratio is the share of the floor that
this project reaches. Claims against peers are made only for hidden sizes from 768 and sequences
from 512 tokens up; smaller models are also shown. Figures over gloo say nothing about NCCL.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import shlex
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks import peers, profiles, steps
from benchmarks.harness import Column, Contender, Flags, Question
from benchmarks.report import NOT_MEASURED, Results
from megatron.config.pretrain import PretrainGPT2Config, PretrainLlamaConfig, PretrainTextConfig
from megatron.errors import UsageError
from tools.plan.software import find_hardware
from tools.plan.timing import predict
from tools.plan.trace import Step

OURS, FLOOR = "this project", "floor"
DROPOUT, ON_HOST = "this project, dropout 0.1", "on the host"
DROPPED = "--attention-dropout 0.1 --hidden-dropout 0.1"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
AS_WRITTEN = "--no-compile --no-cuda-graph"
VARIANTS = {  # name: flags
    OURS: "",
    "this project, sequence parallel": "--sequence-parallel",
    "this project, full recomputation": "--recompute-granularity full",
    "this project, selective recomputation": "--recompute-granularity selective",
    "this project, no CUDA graph": "--no-cuda-graph",
    "this project, compiled update": "--optimizer-impl compiled",
    "this project, not compiled": AS_WRITTEN,
    DROPOUT: DROPPED,
    f"{DROPOUT}, attention's by coordinates": f"{DROPPED} --attention-dropout-rng coordinates",
    f"{DROPOUT}, attention's by flex": f"{DROPPED} --attention-dropout-rng coordinates-flex",
    f"this project, optimizer {ON_HOST}": f"{AS_WRITTEN} --optimizer-cpu-offload",
    f"this project, activations {ON_HOST}": f"{AS_WRITTEN} --cpu-offload-activations",
    f"this project, optimizer and activations {ON_HOST}": f"{AS_WRITTEN} --optimizer-cpu-offload "
    "--cpu-offload-activations",
}
ALONE, SEVERAL, ANY = range(1, 2), range(2, 1000), range(1, 1000)
PEERS: dict[str, tuple[Any, range]] = {  # name: (function, tensor-parallel sizes)
    "plain torch": (peers.plain, ALONE),
    "plain torch, compiled": (partial(peers.plain, compiled=True), ALONE),
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
MADE_OF = {"llama_1b": "llama_tutorial"}  # presets for models without their own
SIZES = {  # flags added to a preset
    "gpt2_124m": "--seq-length 512 --micro-batch-size 2 --vocab-size 50304",
    "gpt2_30m": "--vocab-size 8192",
    "quickstart": "--vocab-size 2048",
    "llama_1b": "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --vocab-size 128256 "
    "--num-attention-heads 32 --num-query-groups 8 --rotary-base 500000 --seq-length 2048 "
    "--train-iters 3000 --micro-batch-size 4 --no-decay-biases-and-norms",
}
TOLERANCES = {  # of the losses
    PretrainGPT2Config: {"fp32": 1e-5, "bf16": 3e-3},
    PretrainLlamaConfig: {"fp32": 1e-5, "bf16": 2e-2},
}
RATIO = "time / the first's"


def result(found: Results) -> str:
    """Figures of the models for which claims are made."""
    if not any(rounds[0]["is_large"] for rounds in found.rounds.values()):
        return "These models are too small for a claim."
    texts = found.ratios(RATIO, {*VARIANTS, FLOOR}, of="is_large")
    if texts != NOT_MEASURED:
        return f"Time of a step over this project's: {texts}."
    return f"MFU {found.range('MFU, %', '{:.1f}')} %; no peer was measured."


def contenders(
    flags: Flags,
    presets: tuple[str, ...] = ("gpt2_124m", "gpt2_30m", "quickstart"),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_model_parallel_size: tuple[int, ...] = (1, 2),
    threads: int = 2,
    program_flags: str = "",
    stub_communication: bool = False,
    fast_weights: bool = False,
    hardware: str | None = None,
) -> Iterator[Contender]:
    """Compare steps.

    Args:
        presets: presets of pretrain_gpt2.py or of pretrain.py --model llama, or llama_1b.
        dtypes: dtypes of weights and activations; most peers compute under autocast.
        tensor_model_parallel_size: numbers of ranks that the model is sharded over.
        threads: threads of all ranks of a contender together.
        program_flags: flags of the program: --program-flags="--num-layers 2 --hidden-size 64".
        stub_communication: run one rank of each layout, with collectives that move nothing.
        fast_weights: draw initial weights with the device's generator; else the host draws those of
            a training run, in 10 seconds per billion.
        hardware: name in scripts/hardware/ or a file, for the times that tools/plan.py predicts.
    """
    names = list(dict.fromkeys(flags.contenders or USUAL))
    if unknown := set(names) - {*VARIANTS, *PEERS}:
        known = ", ".join([*VARIANTS, *PEERS])
        raise UsageError("--contenders", sorted(unknown)[0], f"one of: {known}")
    if fast_weights and max(tensor_model_parallel_size) > 1 and not stub_communication:
        allowed = "left out with several ranks, which would differ"
        raise UsageError("--fast-weights", None, allowed, works=("--no-fast-weights",))
    machine = find_hardware(hardware) if hardware else None
    for preset, dtype, ranks, name in product(presets, dtypes, tensor_model_parallel_size, names):
        run, sizes = PEERS.get(name, (steps.ours, ANY))
        if ranks not in sizes or (stub_communication and name in PEERS):
            continue
        model = Path(preset).name.removesuffix(".toml")
        kind: type[PretrainTextConfig] = PretrainGPT2Config
        kind = PretrainLlamaConfig if model.startswith("llama") else kind
        words = f"{SIZES.get(preset, '')} {steps.DTYPE_FLAGS[dtype]} "
        words += NO_DROPOUT if kind is PretrainGPT2Config else ""
        words += f" --tensor-model-parallel-size {ranks} "
        if flags.small:
            words += f"{steps.SMALL if kind is PretrainGPT2Config else steps.SMALL_LLAMA} "
        words += f"{program_flags} {VARIANTS.get(name, '')}"
        given = ["--preset", MADE_OF.get(preset, preset), *shlex.split(words)]
        own: dict[str, Any] = {"flags": given}
        if stub_communication:
            own |= {"of_ranks": ranks, "fast": True}
        elif fast_weights and name not in (FLOOR, "Megatron-Core"):
            own["fast"] = True
        missing = ""
        if kind is not PretrainGPT2Config:
            own["settings"] = kind
            if name in PEERS and not name.startswith("transformers"):
                missing = "is of GPT-2 alone"
        config = steps.read(given, ranks, kind)
        is_large = config.model.hidden_size >= 768 and config.data.seq_length >= 512
        facts: dict[str, Any] = {"is_large": is_large}
        if name != FLOOR and "--cpu-offload-activations" not in given:  # which a plan cannot count
            step = Step(config, ranks, dtype, flags.device)
            executed, useful = step.executed_flops / ranks, step.flops / ranks
            if name in VARIANTS:
                facts |= {"executed": executed, "kept": step.trace.kept}
                facts |= {"planned_bytes": step.memory["total"]} if machine else {}
                facts |= {"predicted": predict(step, machine).total} if machine else {}
            if (peak := steps.peak_of(flags.device)) and dtype == "bf16":
                # HFU and MFU in % if a step took one second
                facts |= {"hfu": 100 * executed / peak, "mfu": 100 * useful / peak}
        tolerance = TOLERANCES[kind][dtype]
        if flags.device == "cpu" and "recomputation" in name and names[0] == OURS:
            tolerance = 0.0
        if ON_HOST in name and names[0] == f"{OURS}, not compiled":  # where it is computed alone
            tolerance = min(tolerance, 1e-4)
        yield Contender(
            name,
            run,
            own,
            group=f"{model}, {dtype}, t = {ranks}",
            ranks=1 if stub_communication else ranks,
            threads=max(1, threads // ranks),
            needs=NEEDS.get(name, ()),
            missing=missing,
            memory_of_turns=any(ON_HOST in each for each in names),
            same={} if name == FLOOR or DROPOUT in name else {"loss": tolerance},
            facts=facts,
        )


COLUMNS = (
    Column("tokens/s", "tokens", "{:,.0f}", per="wall"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("seconds", "wall", "{:.4f}"),
    Column("predicted", "predicted", "{:.4f}"),
    Column("predicted / measured", "predicted", "{:.3f}", per="wall"),
    Column("CPU seconds", "cpu", "{:.4f}"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column("memory / the first's", "peak_bytes", "{:.3f}", "its / first"),
    Column("planned MiB", "planned_bytes", "{:,.0f}", unit=2**20),
    Column("kept for the backward, MiB", "kept", "{:,.0f}", unit=2**20),
    Column("FLOPs / the first's", "executed", "{:.3f}", "its / first"),
    Column("MFU, %", "mfu", "{:.1f}", per="wall"),
    Column("HFU, %", "hfu", "{:.1f}", per="wall"),
    *profiles.COLUMNS,
)
SMALL = "--presets gpt2_124m --dtypes fp32 --tensor-model-parallel-size 1"
QUESTION = Question(contenders, COLUMNS, result, turns=3, in_a_row=4, warm_up=3, small=SMALL)

if __name__ == "__main__":
    QUESTION.run()
