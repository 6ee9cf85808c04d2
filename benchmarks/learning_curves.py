"""Learning curves.

One training run at several layouts and in transformers: how far their losses drift apart. Runs of
this project are the program's own: serial; cut over tensor-parallel ranks (t); with data
parallelism (d) beside it; resumed at another layout; in bf16. The independent loop is transformers'
model and schedule with torch's AdamW and clipping, from the same weights on the same batches; one
of two clips by a norm whose squares are added up in fp64. Without dropout nothing differs in
fp32 but how sums are rounded. Learning rates have to agree. A gap is the absolute difference to the
serial run's loss of the same step.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.nn.utils import get_total_norm
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from benchmarks import peers
from benchmarks.harness import Column, Contender, Figures, Flags, Rank, Turn
from benchmarks.program import TEXT, WholeRuns, training

FLAGS = """\
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 128 \
--attention-dropout 0 --hidden-dropout 0 --split 1,0,0 --seq-length 128 --lr 1e-3 --min-lr 1e-4 \
--lr-warmup-iters 50 --micro-batch-size 4 --global-batch-size 8 --eval-iters 0"""
T, LARGEST = "--tensor-model-parallel-size", "largest gap"


def gaps(own: Figures, first: Figures) -> list[float]:
    base = {} if own is first else first
    return [abs(a - b) for a, b in zip(own["losses"], base["losses"], strict=True)]


def independent(rank: Rank, flags: Sequence[str], steps: int, exact: bool) -> Turn:
    step: Any = peers.transformers(rank, flags)
    if exact:
        step.norm = lambda gradients: get_total_norm([x.double() for x in gradients]).float()
    rates = get_cosine_with_min_lr_schedule_with_warmup(step.adamw, 50, steps, min_lr=1e-4)

    def turn() -> Figures:
        figures: Figures = {"losses": [], "rates": []}
        for _ in range(steps):
            rates.step()  # before the update, as its first rate is 0
            figures["rates"] += rates.get_last_lr()[:1]
            figures["losses"].append(step()["loss"])
        return figures

    return turn


def contenders(flags: Flags, data_path: Path = TEXT, steps: int = 500) -> Iterator[Contender]:
    """Compare losses. Reads the text of a finished scripts/quickstart.sh, or data_path."""
    common = [*FLAGS.split(), "--train-iters", str(steps), "--data-path", str(data_path.resolve())]
    fp32, same = [*common, "--no-bf16"], {"rates": 1e-9}
    two, four, half = [*fp32, T, "2"], [*fp32, T, "4"], ["--exit-interval", str(steps // 2)]
    for name, starts in {
        "serial": [(1, fp32)],
        "t = 2": [(2, two)],
        "t = 4": [(4, four)],
        "t = 2, d = 2": [(4, two)],
        "t = 2, resumed as d = 2": [(2, two + half), (2, fp32)],
        "bf16": [(1, [*common, "--bf16"])],
    }.items():
        yield Contender(name, training, {"starts": starts}, same=same)
    whole = {"flags": [*fp32, "--micro-batch-size", "8"], "steps": steps}
    for name, exact in {"transformers": False, "transformers, exact norm": True}.items():
        yield Contender(name, independent, {**whole, "exact": exact}, same=same)


QUESTION = WholeRuns(
    contenders,
    (
        Column("first loss", lambda own, _: own["losses"][0], "{:.3f}"),
        Column("last loss", lambda own, _: own["losses"][-1], "{:.4f}"),
        Column(LARGEST, lambda *runs: max(gaps(*runs)), "{:.1e}"),
        Column("at step", lambda *runs: gaps(*runs).index(max(gaps(*runs))) + 1, "{:.0f}"),
        Column("mean of the last 100", lambda *runs: fmean(gaps(*runs)[-100:]), "{:.1e}"),
    ),
    lambda found: (
        f"In {found.record['steps']} steps the loss leaves the serial run's by at most "
        + ", ".join(f"{found.median(*row, LARGEST):.1e} ({row[1]})" for row in found.rows[1:])
    ),
    picture="curves",
    drawn=(
        Column("training loss", lambda own, _: own["losses"]),
        Column("largest gap so far", lambda *runs: [*accumulate(gaps(*runs), max)]),
    ),
)

if __name__ == "__main__":
    QUESTION.run()
