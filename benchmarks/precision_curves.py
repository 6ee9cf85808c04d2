"""One training run in fp32, bf16 and fp16: whether the narrow formats follow the fp32 loss.

At t = 1 and 2 tensor-parallel processes, without dropout and with; every run is the program itself,
from the same initial weights on the same batches, and is compared with fp32 at t = 1. bf16 and fp16
are the formats of weights and activations; master weights, gradient sums, LayerNorm, softmax and
the loss are in fp32, and the loss scale of fp16 is dynamic. Neither format nor t changes what
dropout drops. A gap is the absolute difference of the losses of one step; the tolerance of the
largest is 2^-6 in bf16 and 2^-9 in fp16, half the distance of two neighbouring numbers of the
format between 4 and 8, where the losses are: no loss is further from fp32 than rounding the fp32
loss to the format could take it. That of the mean gap is a quarter of it. Where a run is outside,
the exit status is 1. The model is small, as CPUs multiply fp16 matrices some fifty times slower.
"""

import math
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import learning_curves
from benchmarks.harness import Column, Contender, Flags, Question, ask, cli
from benchmarks.learning_curves import LARGEST, LOSSES, SO_FAR, T, gap_column
from benchmarks.program import TEXT, training
from benchmarks.report import Results
from megatron.data.sources import open_corpus

# At higher rates, or the default beta of 0.999, gradients of this small model spike on some texts,
# and any rounding grows there.
FLAGS = """\
--num-layers 2 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 64 \
--split 1,0,0 --seq-length 64 --lr 5e-4 --min-lr 1e-4 --lr-warmup-iters 50 --adam-beta2 0.95 \
--micro-batch-size 4 --global-batch-size 8 --eval-iters 0"""
FORMATS = {"fp32": "--no-bf16", "bf16": "--bf16", "fp16": "--fp16"}
TOLERANCES = {"bf16": 2**-6, "fp16": 2**-9}
MEAN, SKIPPED = "mean gap", "steps skipped"
COLUMNS = (
    *learning_curves.COLUMNS[:4],
    gap_column(MEAN, fmean),
    Column(SKIPPED, "skipped_steps", "{:.0f}"),
    Column("loss scale at the end", "loss_scale", "{:g}"),
)


def largest(found: Results, format: str, title: str) -> float:
    """Of all runs in this format, however it is cut; NaN where there is none."""
    cells = [found.cell(*row, title) for row in found.rows if row[1].startswith(format)]
    return max((each.median for each in cells if each is not None), default=math.nan)


def result(found: Results) -> str:
    said = [
        f"{largest(found, name, LARGEST):.1e} in {name} (tolerance {tolerance:.1e})"
        for name, tolerance in TOLERANCES.items()
    ]
    return (
        f"The loss leaves that of fp32 by at most {' and '.join(said)} in {found.record['steps']} "
        "steps, at either t, with dropout and without; fp16 skipped "
        f"{largest(found, 'fp16', SKIPPED):.0f} steps."
    )


def failure(found: Results) -> str:
    outside = [
        name
        for name, tolerance in TOLERANCES.items()
        if largest(found, name, LARGEST) > tolerance or largest(found, name, MEAN) > tolerance / 4
    ]
    return f"outside the tolerance: {', '.join(outside)}" if outside else ""


def main(flags: Flags, data_path: Path = TEXT, steps: int = 500) -> None:
    """Compare losses.

    Args:
        data_path: prefix of a data set; by default that of a finished scripts/quickstart.sh.
        steps: of each run.
    """
    vocabulary = open_corpus([str(data_path)], tokenizer=None).vocab_size
    common = [*FLAGS.split(), "--train-iters", str(steps), "--data-path", str(data_path.resolve())]
    contenders = []
    for dropout, (name, switch), t in product(("0", "0.1"), FORMATS.items(), (1, 2)):
        start = [*common, switch, T, str(t)]
        start += ["--attention-dropout", dropout, "--hidden-dropout", dropout]
        group, arguments = f"dropout {dropout}", {"starts": [(t, start)]}
        contenders.append(
            Contender(name=f"{name}, t = {t}", group=group, run=training, arguments=arguments)
        )
    ask(
        Question(
            title="Training in bf16 and fp16 beside fp32",
            method=__doc__,
            contenders=contenders,
            columns=COLUMNS,
            result=result,
            failure=failure,
            rounds=1,
            warm_up=0,
            together=False,
            packages=("torch",),
            settings={"vocabulary": vocabulary, "steps": steps, "flags": FLAGS},
            picture="curves",
            curves=(LOSSES, SO_FAR),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
