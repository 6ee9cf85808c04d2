"""One training run at several layouts and in transformers: how far their losses drift apart.

Each of this project's runs is the program itself, under torchrun where it has several processes:
serial; cut over tensor-parallel ranks (t); with data parallelism (d) beside it; stopped in the
middle and resumed at another layout; in bf16. The independent loop is GPT2LMHeadModel with torch's
AdamW, schedulers and clipping, from the same initial weights on the same batches; one of two clips
by a norm whose squares are added up in fp64. Dropout is 0 and all but one run compute in fp32, so
that nothing differs but the order in which sums are rounded. A gap is the absolute difference to
the serial run's training loss of the same step; the picture has the largest so far.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.program import TEXT, training
from benchmarks.report import Results
from megatron.data.sources import open_corpus

FLAGS = """\
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 128 \
--attention-dropout 0 --hidden-dropout 0 --split 1,0,0 --seq-length 128 --lr 1e-3 --min-lr 1e-4 \
--lr-warmup-iters 50 --micro-batch-size 4 --global-batch-size 8 --eval-iters 0"""
T, LARGEST, STEP = "--tensor-model-parallel-size", "largest gap", "at step"
PEERS = {"transformers": False, "transformers, exact norm": True}


def gap_column(title: str, of: Callable[[list[float]], Any], form: str = "{:.1e}") -> Column:
    """Of the gaps to the first contender of the group, step by step."""

    def figure(own: Figures, first: Figures) -> Any:
        if own is first or not first:
            return None
        return of([abs(a - b) for a, b in zip(own["losses"], first["losses"], strict=True)])

    return Column(title, figure, form)


COLUMNS = (
    Column("first loss", lambda own, _: own["losses"][0], "{:.3f}"),
    Column("last loss", lambda own, _: own["losses"][-1], "{:.4f}"),
    gap_column(LARGEST, max),
    gap_column(STEP, lambda gaps: gaps.index(max(gaps)) + 1, "{:.0f}"),
    gap_column("largest of steps 1 to 10", lambda gaps: max(gaps[:10])),
    gap_column("of 11 to 100", lambda gaps: max(gaps[10:100], default=None)),
    gap_column("mean of the last 100", lambda gaps: fmean(gaps[-100:])),
)
LOSSES = Column("training loss", lambda own, _: own["losses"])
SO_FAR = gap_column("largest gap so far", lambda gaps: [*accumulate(gaps, max)])


def independent(rank: Rank, flags: Sequence[str], *, exact: bool) -> Turn:
    from torch.nn.utils import get_total_norm
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    from benchmarks import peers

    step: Any = peers.transformers(rank, flags)
    if exact:
        step.norm = lambda gradients: get_total_norm([x.double() for x in gradients]).float()
    settings, steps = step.config.optimizer, step.config.training.train_iters
    warm_up = settings.lr_warmup_iters
    rise = LinearLR(step.adamw, start_factor=1 / warm_up, total_iters=warm_up - 1)
    fall = CosineAnnealingLR(step.adamw, T_max=steps - warm_up, eta_min=settings.min_lr)
    schedule = SequentialLR(step.adamw, [rise, fall], milestones=[warm_up - 1])

    def turn() -> Figures:
        figures: Figures = {"losses": [], "rates": []}
        for _ in range(steps):
            figures["rates"] += schedule.get_last_lr()[:1]
            figures["losses"].append(step()["loss"])
            schedule.step()
        return figures

    return turn


def result(found: Results) -> str:
    gaps = {name: found.median("", name, LARGEST) for _, name in found.rows[1:]}
    name = max((name for name in gaps if "t =" in name), key=gaps.__getitem__, default="")
    theirs = " and ".join(f"{gaps[each]:.1e} ({each})" for each in PEERS if each in gaps)
    return name and (
        f"In fp32 no layout's loss leaves the serial run's by more than {gaps[name]:.1e} in "
        f"{found.record['steps']} steps ({name}, step {found.median('', name, STEP):.0f}). The "
        f"independent loop leaves it by {theirs}."
    )


def failure(found: Results) -> str:
    """Learning rates that differ, torch's schedulers included."""
    rates = zip(*(each[-1]["rates"] for each in found.rounds.values() if each), strict=True)
    differs = any(max(each) - min(each) > 1e-9 * min(each) for each in rates)
    return "the runs do not have the same learning rates" if differs else ""


def main(flags: Flags, data_path: Path = TEXT, steps: int = 500) -> None:
    """Compare losses.

    Args:
        data_path: prefix of a data set; by default that of a finished scripts/quickstart.sh.
        steps: of each run.
    """
    vocabulary = open_corpus([str(data_path)], tokenizer=None).vocab_size  # and whether it is there
    common = [*FLAGS.split(), "--train-iters", str(steps), "--data-path", str(data_path.resolve())]
    fp32 = [*common, "--no-bf16"]
    half = [*fp32, T, "2", "--exit-interval", str(steps // 2)]
    routes = {
        "serial": [(1, fp32)],
        "t = 2": [(2, [*fp32, T, "2"])],
        "t = 4": [(4, [*fp32, T, "4"])],
        "t = 2, d = 2": [(4, [*fp32, T, "2"])],
        "t = 2, resumed as d = 2": [(2, half), (2, fp32)],
        "bf16": [(1, [*common, "--bf16"])],
    }
    contenders = [
        Contender(name=name, run=training, arguments={"starts": starts})
        for name, starts in routes.items()
    ]
    whole = [*fp32, "--micro-batch-size", "8"]  # which a step of theirs reads
    contenders += [
        Contender(name=name, run=independent, arguments={"flags": whole, "exact": exact})
        for name, exact in PEERS.items()
    ]
    ask(
        Question(
            title="Learning curves",
            method=__doc__,
            contenders=contenders,
            columns=COLUMNS,
            result=result,
            failure=failure,
            rounds=1,
            warm_up=0,
            together=False,
            packages=("torch", "transformers"),
            settings={"vocabulary": vocabulary, "steps": steps, "flags": FLAGS},
            picture="curves",
            curves=(LOSSES, SO_FAR),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
