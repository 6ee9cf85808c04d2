"""Training in bf16 and fp16 beside fp32.

The program itself, at t = 1 and 2 tensor-parallel processes, without dropout and with, from the
same weights on the same batches, beside fp32 at t = 1. Master weights, gradient sums, LayerNorm,
softmax and the loss are in fp32, and the loss scale of fp16 is dynamic. A gap is the absolute
difference of the losses of one step. The tolerance of the largest is 2^-6 in bf16 and 2^-9 in fp16,
half the distance of two neighbouring numbers of the format between 4 and 8, where the losses are;
that of the mean is a quarter of it. The model is small, as CPUs multiply fp16 matrices slowly.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import nan
from pathlib import Path
from statistics import fmean

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Flags
from benchmarks.learning_curves import LARGEST, T, gaps
from benchmarks.learning_curves import QUESTION as CURVES
from benchmarks.program import TEXT, training
from benchmarks.report import Results

# At higher rates, or the default beta of 0.999, gradients of this small model spike on some texts,
# and any rounding grows there.
FLAGS = """\
--num-layers 2 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 64 \
--split 1,0,0 --seq-length 64 --lr 5e-4 --min-lr 1e-4 --lr-warmup-iters 50 --adam-beta2 0.95 \
--micro-batch-size 4 --global-batch-size 8 --eval-iters 0"""
TOLERANCES, MEAN = {"bf16": 2**-6, "fp16": 2**-9}, "mean gap"


def worst(found: Results, format: str, title: str) -> float:
    return max((found.median(*row, title) for row in found.rows if format in row[1]), default=nan)


def failure(found: Results) -> str:
    for name, most in TOLERANCES.items():
        if max(worst(found, name, LARGEST), 4 * worst(found, name, MEAN)) > most:
            return f"{name} is outside the tolerance"
    return ""


def contenders(flags: Flags, data_path: Path = TEXT, steps: int = 500) -> Iterator[Contender]:
    """Compare losses. Reads the text of a finished scripts/quickstart.sh, or data_path."""
    common = [*FLAGS.split(), "--train-iters", str(steps), "--data-path", str(data_path.resolve())]
    for p, kind, t in product(("0", "0.1"), ("no-bf16", "bf16", "fp16"), (1, 2)):
        dropped = f"--attention-dropout {p} --hidden-dropout {p}"
        words = [*common, *f"--{kind} {T} {t} {dropped}".split()]
        name = f"{kind.replace('no-bf16', 'fp32')}, t = {t}"
        yield Contender(name, training, {"starts": [(t, words)]}, group=f"dropout {p}")


QUESTION = replace(
    CURVES,
    contenders=contenders,
    columns=(
        *CURVES.columns[:4],
        Column(MEAN, lambda *runs: fmean(gaps(*runs)), "{:.1e}"),
        Column("steps skipped", "skipped_steps", "{:.0f}"),
        Column("loss scale at the end", "loss_scale", "{:g}"),
    ),
    result=lambda found: (
        f"The loss leaves that of fp32 by at most {worst(found, 'bf16', LARGEST):.1e} in "
        f"bf16 and {worst(found, 'fp16', LARGEST):.1e} in fp16."
    ),
    failure=failure,
)

if __name__ == "__main__":
    QUESTION.run()
