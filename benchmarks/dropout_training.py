"""Training with dropout by coordinates.

The quickstart's model with dropout 0.1, by the program itself, beside the same program with
F.dropout and what F.scaled_dot_product_attention draws. Both have the same weights and samples; a
seed changes these, too. The validation loss is that of 400 samples after the last step, the
training loss the mean of the last 100 steps.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Figures, Flags
from benchmarks.program import FILE, TEXT, WholeRuns, training
from benchmarks.report import Results

FLAGS = """\
--preset quickstart --split 90,10,0 --attention-dropout 0.1 --hidden-dropout 0.1"""
TORCHS = """-c
import runpy
from torch.nn.functional import dropout
from megatron.parallel.dropout import Dropout
Dropout.forward = lambda self, x, rows: dropout(x, self.p, self.training)
runpy.run_path("pretrain_gpt2.py", run_name="__main__")"""
LOSS = "validation loss"


def difference(own: Figures, first: Figures) -> float:
    base = {} if own is first else first
    return float(own["validation_loss"] - base["validation_loss"])


def result(found: Results) -> str:
    losses = [found.median(*row, LOSS) for row in found.rows]
    torchs, ours = (f"{mean(x):.3f} +- {stdev(x):.3f}" for x in (losses[::2], losses[1::2]))
    apart = [found.median(*row, "difference") for row in found.rows[1::2]]
    return (
        f"By coordinates the {LOSS} is {ours}, with torch's own dropout {torchs}: over "
        f"{len(apart)} seeds the difference is {mean(apart):+.3f} with the standard error "
        f"{stdev(apart) / len(apart) ** 0.5:.3f}."
    )


def contenders(
    flags: Flags, data_path: Path = TEXT, seeds: int = 5, steps: int = 1000
) -> Iterator[Contender]:
    """Compare losses. Reads the text of a finished scripts/quickstart.sh, or data_path."""
    if seeds < 2 or flags.contenders:
        raise ValueError("takes both contenders and two or more --seeds, to say how they spread")
    words = [*FLAGS.split(), "--data-path", str(data_path.resolve()), "--train-iters", str(steps)]
    words += ["--eval-interval", str(steps), "--eval-iters", str(steps // 10)]
    words += ["--lr-warmup-iters", str(steps // 10)]
    for seed in range(1, seeds + 1):
        for name, rng, program in (
            ("torch's", "kernel", TORCHS),
            ("by coordinates", "coordinates", FILE),
        ):
            start = [*words, "--seed", str(seed), "--attention-dropout-rng", rng]
            arguments = {"starts": [(1, start)], "program": program}
            yield Contender(name, training, arguments, group=f"seed {seed}")


COLUMNS = (
    Column(LOSS, "validation_loss", "{:.4f}"),
    Column("difference", difference, "{:+.4f}"),
    Column("training loss", lambda own, _: mean(own["losses"][-100:]), "{:.4f}"),
)
QUESTION = WholeRuns(contenders, COLUMNS, result)

if __name__ == "__main__":
    QUESTION.run()
