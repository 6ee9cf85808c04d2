"""Scaling measured: section 5.1 of the paper, or each form of parallelism or size by itself.

    torchrun --nproc-per-node 8 benchmarks/scaling.py --device cuda    # or python: starts the ranks

Section 5.1 has weak scaling, strong scaling and the number of heads.
The share of linear is 100 P_t / (t P_1) x T_1 / T_t for P parameters and T seconds per step; t
counts only tensor-parallel ranks, as the batch grows with the copies. The speed-up is T_1 / T_t. A
step is the program's own, on random tokens, with every layer recomputed and dropout as in the
paper, and a batch of 8 per copy. FLOP/s are counted as in the paper: 4 x the layers' forward and
3 x the logits, with the padded vocabulary; MFU excludes recomputation and padding. Communication is
measured in one step under the profiler: the share of time in which an axis communicates or waits
for its ranks, and the exposed share, without concurrent computation; not on a CPU where both axes
communicate. On a CPU the models are miniatures, unlike the paper's: 1/8 of the width, 1/4 of the
layers, 1/2 of the heads, 1/8 of the sequence, 1/32 of the vocabulary, 2 copies. CPU ranks lose
efficiency that GPUs keep, as they share memory bandwidth and caches that a single rank has alone.

With --axes each axis is measured by itself instead, on 2 and 4 ranks beside one alone: 8 samples a
rank and step, in micro-batches of 2, of one miniature. CPU seconds are those of all ranks over
their number, in which they do not wait. Bytes are those that rank 0 sends in a step, counted, and
planned by tools/plan.py; predicted seconds count ranks that share a core as one after another.
Memory is the peak of a rank's model, without what the first steps of any model load and never free.

An axis may be a size of the GPT-2 of 30 million parameters, too, in fp32 on one rank with two
threads: layers, width (with heads of fixed size), sequence or vocabulary. Its time on paper is the
step's FLOPs (half for causal attention) at the speed of the first point, which is nearest to the
original model; its memory on paper is that of tools/plan.py.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.processes import peak_memory
from benchmarks.profiles import shares_by_axis
from benchmarks.report import Results
from megatron.config.launch import world_size
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.train.launch import default_precision
from tools.layouts.meters import counting
from tools.plan.figure5 import COPIES, HEADS, MODELS, ROWS, STRONG
from tools.plan.hardware import Hardware
from tools.plan.software import find_hardware
from tools.plan.timing import predict
from tools.plan.trace import Step

LINEAR, SPEED_UP = "share of linear", "speed-up"
PRECISIONS = {
    "fp32": "--no-fp16 --no-bf16",
    "bf16": "--no-fp16 --bf16",
    "fp16": "--initial-loss-scale 4096",  # no search for the loss scale while timing
}
TENSOR, PIPELINE = "--tensor-model-parallel-size {n}", "--pipeline-model-parallel-size {n}"
CONTEXT = "--context-parallel-size {n} --cp-comm-type"
SAMPLES = 8  # of a rank and step
MINIATURE = """--preset quickstart --num-layers 8 --hidden-size 256 --num-attention-heads 8
--seq-length 256 --max-position-embeddings 256 --vocab-size 4096 --micro-batch-size 2
--no-compile"""
AxisName = Literal[
    "data", "zero-1", "zero-2", "zero-3", "tensor", "sequence", "2d", "context", "ring", "1f1b",
    "interleaved", "zb-h1", "layers", "width", "tokens", "vocabulary",
]  # fmt: skip
AXES: dict[AxisName, str] = {  # flags on n ranks
    "data": "",
    "zero-1": "--zero-stage 1",
    "zero-2": "--zero-stage 2",
    "zero-3": "--zero-stage 3",
    "tensor": TENSOR,
    "sequence": f"{TENSOR} --sequence-parallel",
    "2d": f"{TENSOR} --tensor-parallel-mode 2d",
    "context": f"{CONTEXT} a2a",
    "ring": f"{CONTEXT} p2p",
    "1f1b": PIPELINE,
    "interleaved": f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": f"{PIPELINE} --pipeline-schedule zb-h1",
}
TINY = """--preset quickstart --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
--vocab-size 8 --no-bf16"""
ORIGINAL = """--preset gpt2_30m --vocab-size 8192 --attention-dropout 0 --hidden-dropout 0 --no-bf16
--no-compile"""
SIZES: dict[AxisName, tuple[str, tuple[int, ...]]] = {  # flags of a size, and sizes
    "layers": ("--num-layers {n}", (8, 1, 2, 4, 16)),
    "width": ("--hidden-size {n} --num-attention-heads {heads}", (512, 128, 256, 1024)),
    "tokens": ("--seq-length {n} --max-position-embeddings {n}", (256, 128, 512, 1024, 2048)),
    "vocabulary": ("--vocab-size {n}", (4096, 1024, 16384, 65536)),
}
OF_ONE = "CPU seconds of a rank / one alone"
TIME, MEMORY = "time / on paper", "memory / on paper"
FOUR = ", 4 ranks"  # end of a contender's name


@dataclass(frozen=True)
class Point:
    """A model of table 1 on tensor x copies ranks. heads: those of the preset if None."""

    preset: str
    tensor: int
    copies: int = 1
    heads: int | None = None

    def flags(self, precision: str, *, is_small: bool) -> list[str]:
        """Flags of pretrain_gpt2.py."""
        model = parse(PretrainGPT2Config, ["--preset", self.preset], {}).model
        heads, padded = self.heads or model.num_attention_heads, ROWS
        words = f"--preset {self.preset} --tensor-model-parallel-size {self.tensor} "
        if is_small:
            heads, padded = heads // 2, padded // 32
            words += f"--num-layers {model.num_layers // 4} --hidden-size {model.hidden_size // 8} "
            words += f"--seq-length 128 --max-position-embeddings 128 --vocab-size {padded} "
        words += f"--make-vocab-size-divisible-by {padded // self.tensor} "
        return f"{words} --num-attention-heads {heads} {PRECISIONS[precision]}".split()


def studies(ranks: int, *, is_small: bool) -> dict[Point, dict[str, float]]:
    """The paper's figures for every point of section 5.1; the first point is the base of all.

    In miniature, the (halved) numbers of heads are compared on as many ranks as are available.
    """
    small, large = MODELS[0].preset, MODELS[-1].preset
    copies, tensor = COPIES, MODELS[-1].tensor
    if is_small:
        copies, tensor = 2, max(size for size in (1, 2, 4) if size <= ranks)
    found = {Point(each.preset, each.tensor): {LINEAR: each.model_parallel} for each in MODELS}
    for each in MODELS:
        found[Point(each.preset, each.tensor, copies)] = {LINEAR: each.model_and_data_parallel}
    for size, speed_up in STRONG.items():
        found.setdefault(Point(small, size), {})[SPEED_UP] = speed_up
    for heads, share in HEADS.items():
        if is_small or heads < max(HEADS):  # the largest is the preset's, a point of figure 5
            found[Point(large, tensor, heads=heads)] = {LINEAR: share}
    return found


def train(rank: Rank, flags: list[str]) -> Turn:
    step = steps.ours(rank, flags, fast=True)
    step()
    shares = shares_by_axis(step, rank, step.state.mesh)
    return lambda: step() | shares


def along(rank: Rank, flags: list[str], samples: int | None) -> Turn:
    steps.ours(Rank(device_type=rank.device_type, local=rank.local), TINY.split())()
    peak, run = peak_memory(rank.device_type), steps.ours(rank, flags, samples=samples)
    ties = [axis for bucket in run.state.gradients.tied for axis in bucket.axes]
    with counting(run.state.mesh, ties) as counts:
        run()
    sent = sum(counts.sent_bytes.values())
    return lambda: run() | {"sent": sent, "rank_bytes": peak()}


def by_axis(
    flags: Flags, axes: Sequence[AxisName], precision: str, machine: Hardware | None
) -> Iterator[Contender]:
    """One rank alone, then each axis on 2 and 4 ranks."""
    cores = (os.cpu_count() or 1) if flags.device == "cpu" else sys.maxsize
    model = f"{MINIATURE} {steps.SMALL} --num-layers 8" if flags.small else MINIATURE
    for axis, ranks in [("data", 1), *product(axes, (2, 4))]:
        if axis == "2d" and ranks == 2:  # no square
            continue
        words = f"{model} {AXES[axis].format(n=ranks)} {PRECISIONS[precision]}".split()
        config = steps.read(words, ranks, samples=SAMPLES * ranks)
        step = Step(config, ranks, precision, flags.device)
        used = {call.axis for calls in step.calls.values() for call in calls}
        facts = {"ranks": ranks, "planned": sum(map(step.sent, used))}
        facts["paper_bytes"] = step.memory["total"]
        if machine:
            facts["planned_seconds"] = predict(step, machine).total * max(1, ranks / cores)
        name = f"{axis}, {ranks} ranks" if ranks > 1 else "one rank"
        own = {"flags": words, "samples": SAMPLES * ranks}
        yield Contender(name, along, own, facts=facts, ranks=ranks)


def by_size(flags: Flags, axes: Sequence[AxisName]) -> Iterator[Contender]:
    """One rank at the sizes of each axis."""
    for axis, n in [(name, n) for name in axes for n in SIZES[name][1]]:
        small = steps.SMALL if flags.small else ""
        words = f"{ORIGINAL} {small} {SIZES[axis][0]}".format(n=n, heads=n // 64).split()
        config = steps.read(words)
        # A GPU's attention computes the counted FLOPs, except for the scores in the backward.
        step, on_gpu = (Step(config, 1, "fp32", each) for each in (flags.device, "cuda"))
        matmuls = [pair for work in on_gpu.work.values() for pair in work.matmuls.items()]
        work = sum(times * each.flops * each.share for each, times in matmuls if not each.again)
        facts = {"work": work, "paper_bytes": step.memory["total"]}
        own = {"flags": words, "samples": None}
        yield Contender(f"{axis} {n:,}", along, own, group=axis, threads=2, facts=facts)


def result(found: Results) -> str:
    """The last measured point of each kind, or each axis on 4 ranks."""
    said = []
    if OF_ONE in found.columns:
        pairs = ((row, found.cell(*row, OF_ONE)) for row in found.rows if row[1].endswith(FOUR))
        shares = "; ".join(
            f"{row[1].removesuffix(FOUR)} {cell.text('{:.2f}', is_ratio=True)}"
            for row, cell in pairs
            if cell
        )
        said.append(f"{OF_ONE}, on 4 ranks: {shares or 'not measured'}.")
    if TIME in found.columns:
        times, memory = found.range(TIME), found.range(MEMORY)
        said.append(f"A step takes {times} of its seconds on paper, {memory} of its memory.")
    if said:
        return " ".join(said)
    cells = ((row, found.cell(*row, LINEAR)) for row in found.rows)
    last = {
        found.rounds[row][0]["kind"]: f"{cell.text('{:.1%}', is_ratio=True)} ({row[1]})"
        for row, cell in cells
        if cell
    }
    shares = "; ".join(f"{kind} {share}" for kind, share in last.items())
    return f"Share of linear: {shares or 'not measured'}."


def contenders(
    flags: Flags, hardware: str | None = None, axes: tuple[AxisName, ...] = ()
) -> Iterator[Contender]:
    """Measure scaling; on a CPU in miniature.

    Args:
        hardware: name in scripts/hardware/ or a file, for predictions of tools/plan.py and MFU.
        axes: axes and sizes to measure by themselves, in place of section 5.1.
    """
    is_small = flags.device == "cpu"
    most = max(world_size(os.environ), 2 if is_small else torch.cuda.device_count())
    precision = default_precision(torch.device("cpu")) if is_small else "fp16"
    machine = find_hardware(hardware) if hardware else None
    if axes:
        if parallel := [axis for axis in axes if axis in AXES]:
            yield from by_axis(flags, parallel, precision, machine)
        yield from by_size(flags, [axis for axis in axes if axis in SIZES])
        return
    peak = machine.peak(precision) if machine else steps.peak_of(flags.device)
    for point, paper in studies(most, is_small=is_small).items():
        size, words = point.tensor * point.copies, point.flags(precision, is_small=is_small)
        step = Step(steps.read(words, size), size, precision, flags.device)
        heads, parameters = step.config.model.num_attention_heads, step.parameters
        kind = "model parallel" if point.copies == 1 else "model and data parallel"
        facts = {"parameters": parameters, "executed": step.executed_flops / size}
        facts["kind"] = "number of heads" if point.heads else kind
        if peak:  # MFU in % if a step took one second
            facts["mfu"] = 100 * step.flops / size / peak
        if machine:
            facts["predicted"] = predict(step, machine).total
        done = {LINEAR: parameters / point.tensor, SPEED_UP: 1.0}  # work per step
        for study, value in paper.items():
            facts |= {study: done[study], f"{study}, paper": value}
        model = point.preset.rpartition("_")[2].upper()
        yield Contender(
            f"{model}, {heads} heads, t x d = {point.tensor} x {point.copies}",
            train,
            {"flags": words},
            facts=facts,
            ranks=size,
            missing=f"takes {size} ranks, there are {most}" if size > most else "",
        )


def seconds_on_paper(own: Figures, first: Figures) -> float:
    return float(first["wall"] * own["work"] / first["work"])


COLUMNS = (
    Column("M parameters", "parameters", "{:,.1f}", unit=1e6),
    Column("seconds", "wall"),
    Column("seconds, predicted", "planned_seconds"),
    Column("CPU seconds of a rank", "cpu", per="ranks"),
    Column(OF_ONE, "cpu", "{:.2f}", "its / first", per="ranks"),
    Column("MB sent", "sent", "{:,.2f}", unit=1e6),
    Column("MB, planned", "planned", "{:,.2f}", unit=1e6),
    Column("seconds on paper", seconds_on_paper, "{:.3f}"),
    Column(TIME, lambda own, first: own["wall"] / seconds_on_paper(own, first), "{:.2f}"),
    Column("MiB of a rank", "rank_bytes", "{:,.0f}", unit=2**20),
    Column("MiB on paper", "paper_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY, "rank_bytes", "{:.2f}", per="paper_bytes"),
    Column("TFLOP/s of a rank", "executed", per="wall", unit=1e12),
    Column("MFU, %", "mfu", "{:.1f}", per="wall"),
    Column("tensor axis", "tensor", "{:.1%}"),
    Column("tensor, exposed", "tensor, exposed", "{:.1%}"),
    Column("data axis", "data", "{:.1%}"),
    Column("data, exposed", "data, exposed", "{:.1%}"),
    Column(LINEAR, LINEAR, "{:.1%}", "its / first", per="wall"),
    Column(f"{LINEAR}, predicted", LINEAR, "{:.1%}", "its / first", per="predicted"),
    Column(f"{LINEAR}, paper", f"{LINEAR}, paper", "{:.0%}", unit=100),
    Column(SPEED_UP, SPEED_UP, "{:.2f}", "its / first", per="wall"),
    Column(f"{SPEED_UP}, predicted", SPEED_UP, "{:.2f}", "its / first", per="predicted"),
    Column(f"{SPEED_UP}, paper", f"{SPEED_UP}, paper", "{:.2f}"),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    rounds=6,
    turns=4,
    warm_up=2,
    together=False,
    drawn=(LINEAR, f"{LINEAR}, predicted", f"{LINEAR}, paper", SPEED_UP, OF_ONE, TIME, MEMORY),
    small="--axes data",
)

if __name__ == "__main__":
    QUESTION.run()
