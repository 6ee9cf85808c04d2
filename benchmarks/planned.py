"""Predicted and measured steps of small models on a CPU.

For 1, 2 and 4 ranks, `tools/plan.py --measure` first times what layouts are made of: a layer and
the edge by tensor-parallel size, sequence parallelism and recomputation, collectives by size, the
optimizer by bytes. It times as many processes as the layouts have, so that 4 of them share 2 cores
in both. From these files tools/plan.py predicts the step of every layout; with --json FILE the
predictions are in FILE.predicted before the first layout runs. Then each layout trains in processes
of its own, one thread each. The model is a GPT-2 in fp32 of hidden size 256 with 8 heads, 256
tokens and a vocabulary of 4,096; a step has 8 samples in micro-batches of 2. It has 4 or 8 layers
where --measure has models of 1 and 3. The order is right in a pair, of layouts of one model and
number of ranks whose times differ by more than 5 %, if the predicted times are in the order of the
measured ones.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, scratch
from benchmarks.processes import ROOT
from benchmarks.report import NOT_MEASURED, Results
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from tools.plan.hardware import load_hardware
from tools.plan.score import in_order
from tools.plan.timing import predict
from tools.plan.trace import Step

CORES = os.cpu_count() or 1
MODEL = """--preset quickstart --hidden-size 256 --num-attention-heads 8 --vocab-size 4096 --no-bf16
--micro-batch-size 2"""
SAMPLES = 8  # of a step
SMALL = "--hidden-size 128 --seq-length 64 --vocab-size 512"
T, P, ROWS = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
ZERO, AGAIN, DEEP = "--zero-stage", "--recompute-granularity full", "--num-layers 8"
MEASURED = {  # what --measure times, by ranks
    1: "--micro-batches 2 4 --recomputations none full",
    2: "--tensor-sizes 1 2 --recomputations none full",
    4: "--tensor-sizes 1 2 4 --recomputations none full",
}
LAYOUTS = {  # flags by ranks; the model has 4 layers
    1: ("", AGAIN, "--micro-batch-size 4", DEEP, f"{DEEP} {AGAIN}"),
    2: (
        "",
        f"{ZERO} 1",
        f"{ZERO} 2",
        f"{ZERO} 3",
        f"{T} 2",
        f"{T} 2 {ROWS}",
        f"{T} 2 {ROWS} {AGAIN}",
        f"{P} 2",
        f"{P} 2 {AGAIN}",
        f"{DEEP} {P} 2 --num-virtual-stages-per-pipeline-rank 2",
        f"{DEEP} {T} 2",
        f"{DEEP} {ZERO} 3 {AGAIN}",
    ),
    4: (
        "",
        f"{ZERO} 1",
        f"{ZERO} 3",
        f"{T} 4",
        f"{T} 4 {ROWS}",
        f"{T} 2",
        f"{T} 2 {ROWS} {ZERO} 1",
        f"{T} 2 {AGAIN}",
        f"{P} 4",
        f"{P} 2 {T} 2",
        f"{P} 2 {ZERO} 1",
        f"{DEEP} {P} 2 {T} 2 {ROWS}",
    ),
}
PREDICTED, ERROR = "predicted seconds", "error, %"


def measured(model: str, ranks: int) -> Path:
    """The file of --measure on so many processes."""
    file = scratch() / f"here_{ranks}.toml"
    start = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}" if ranks > 1 else ""
    words = f"{start} tools/plan.py --measure {file} {model} {MEASURED[ranks]}"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *shlex.split(words)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-5000:]}")
    print(done.stdout, file=sys.stderr, flush=True)
    return file


def contenders(
    flags: Flags,
    ranks: tuple[int, ...] = tuple(LAYOUTS),
    most_layouts: int | None = None,
) -> list[Contender]:
    """Measure, predict, run.

    Args:
        ranks: numbers of ranks.
        most_layouts: of each number of ranks, to try it.
    """
    if flags.device != "cpu":
        works = ("--device", "cpu")
        raise UsageError("--device", flags.device, "cpu: its layouts are small", works=works)
    model = f"{MODEL} --global-batch-size {SAMPLES} {SMALL if flags.small else ''}"
    found, predicted = list[Contender](), []
    for number in ranks:
        hardware = load_hardware(str(measured(model, number)))
        shared = f" on {CORES} cores" if number > CORES else ""
        for layout in LAYOUTS[number][:most_layouts]:
            words = [*shlex.split(model), *layout.split()]
            config = steps.read(words, number, samples=SAMPLES)
            step, depth = Step(config, number, "fp32", hardware.device), config.model.num_layers
            facts = {
                "predicted": predict(step, hardware).total,
                "is_measured": hardware.measures(step),
            }
            predicted.append({"ranks": number, "layout": layout, **facts})
            found.append(
                Contender(
                    layout.replace(DEEP, "").strip()
                    or ("data parallel" if number > 1 else "one rank"),
                    steps.ours,
                    {"flags": words, "samples": SAMPLES},
                    group=f"{number} rank{'s' * (number > 1)}{shared}, {depth} layers",
                    ranks=number,
                    facts=facts,
                    same={"loss": 1e-4},
                )
            )
    print(json.dumps(predicted, indent=1), file=sys.stderr, flush=True)
    if flags.json is not None:
        file = flags.json.with_name(f"{flags.json.name}.predicted")
        write_atomically(file, (json.dumps(predicted, indent=1) + "\n").encode())
    return found


def result(found: Results) -> str:
    errors, groups = dict[str, float](), defaultdict[str, list[tuple[float, float]]](list)
    for group, name in found.rows:
        predicted = found.rounds[group, name][0]["predicted"]
        if (cell := found.cell(group, name, "seconds")) is not None:
            errors[f"{name} ({group})"] = predicted / cell.median - 1
            groups[group].append((cell.median, predicted))
    if not errors:
        return f"Error of a prediction: {NOT_MEASURED}."
    worst = max(errors, key=lambda name: abs(errors[name]))
    right = [*in_order(groups.values())]
    order = f"{sum(right)} of {len(right)} pairs in the right order" if right else "no pairs"
    return (
        f"Mean error of {len(errors)} predicted steps: {fmean(map(abs, errors.values())):.1%}. "
        f"Worst: {errors[worst]:+.1%}, {worst}; {order}."
    )


COLUMNS = (
    Column(PREDICTED, "predicted", "{:.4f}"),
    Column("seconds", "wall", "{:.4f}"),
    Column(ERROR, lambda own, _: 100 * (own["predicted"] / own["wall"] - 1), "{:+.1f}"),
    Column("CPU seconds", "cpu", "{:.4f}"),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    rounds=1,
    turns=7,
    warm_up=2,
    together=False,
    drawn=[ERROR],
    small="--ranks 1 --most-layouts 2",
)

if __name__ == "__main__":
    QUESTION.run()
