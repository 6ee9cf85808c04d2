"""Learning curves.

One training run at several layouts, in half precision and in transformers: how far their losses
drift apart. Runs of this project use the program itself: sharded over tensor-parallel ranks (t);
with data parallelism (d) in addition; resumed at another layout; and with a smaller model, as CPUs
multiply fp16 matrices slowly, in bf16 and fp16, with and without dropout. The independent loop is
transformers' model and schedule with torch's AdamW and clipping, by a norm with squares summed in
fp64. All runs of a group have the same weights, batches and learning rates; a gap is the absolute
difference from the first run's loss at the same step. In fp32 only the rounding of sums differs.
The tolerance of the largest gap is 2^-6 in bf16 and 2^-9 in fp16: half the distance of adjacent
numbers of the format between 4 and 8, where the losses are; that of the mean is a quarter of it.

The quickstart's model with dropout 0.1 by coordinates is compared with the same with torch's masks.
Each round has its own seed, also of weights and samples; the validation loss is over 400 samples
after 1,000 steps: --steps 1000 --rounds 5 --contenders "torch's dropout" "dropout by coordinates".
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.nn.utils import get_total_norm
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from benchmarks import peers
from benchmarks.harness import Column, Contender, Figures, Flags, Rank, Turn
from benchmarks.program import FILE, TEXT, WholeRuns, training
from benchmarks.report import Results

COMMON = """--split 1,0,0 --min-lr 1e-4 --lr-warmup-iters 50 --micro-batch-size 4
--global-batch-size 8 --eval-iters 0"""
LAYOUTS = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 128
--seq-length 128 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --no-bf16"""
# At higher rates, or the default beta of 0.999, gradients of this small model spike on some texts,
# and any rounding grows there.
FORMATS = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 64
--seq-length 64 --lr 5e-4 --adam-beta2 0.95"""
DROPOUT = """--preset quickstart --split 90,10,0 --attention-dropout 0.1 --hidden-dropout 0.1
--train-iters {0} --eval-interval {0} --lr-warmup-iters {1} --eval-iters {1}"""
# Masks by F.dropout, and by F.scaled_dot_product_attention.
TORCHS = """-c
import runpy
from torch.nn.functional import dropout
from megatron.parallel.dropout import Dropout
Dropout.forward = lambda self, x, rows: dropout(x, self.p, self.training)
runpy.run_path("pretrain_gpt2.py", run_name="__main__")"""
COORDINATES = "dropout by coordinates"
MASKS = {"torch's dropout": ("kernel", TORCHS), COORDINATES: ("coordinates", FILE)}
T, LARGEST, SHARE = "--tensor-model-parallel-size", "largest gap", "share of the tolerance"
RATIO = "its validation loss / the first's"
TOLERANCES = {"no-bf16": {}, "bf16": {"tolerance": 2**-6}, "fp16": {"tolerance": 2**-9}}


def gaps(own: Figures, first: Figures) -> list[float]:
    return [abs(a - b) for a, b in zip(own["losses"], first["losses"], strict=True)]


def share(own: Figures, first: Figures) -> float:
    found = gaps(own, first)
    return max(max(found), 4 * fmean(found)) / float(own["tolerance"])


def independent(rank: Rank, flags: Sequence[str], steps: int) -> Turn:
    step: Any = peers.transformers(rank, flags)
    step.norm = lambda gradients: get_total_norm([x.double() for x in gradients]).float()
    schedule = get_cosine_with_min_lr_schedule_with_warmup(step.adamw, 50, steps, min_lr=1e-4)

    def turn() -> Figures:
        losses, rates = [], []
        for _ in range(steps):
            schedule.step()  # before the update, as its first rate is 0
            rates += schedule.get_last_lr()[:1]
            losses.append(step()["loss"].item())
        return {"losses": losses, "rates": rates}

    return turn


def reseeded(rank: Rank, flags: Sequence[str], program: str) -> Turn:
    run = training(rank, [(1, [*flags, "--seed", str(1 + rank.round)])], program)

    def turn() -> Figures:
        figures = run()
        losses = figures.pop("losses")  # gaps between runs with different masks mean nothing
        return figures | {"first_loss": losses[0]}

    return turn


def contenders(flags: Flags, data_path: Path = TEXT, steps: int = 500) -> Iterator[Contender]:
    """Compare losses, on the text of a finished scripts/quickstart.sh or on data_path."""
    text = ["--data-path", str(data_path.resolve())]
    common = [*COMMON.split(), "--train-iters", str(steps), *text]
    serial, half = [*common, *LAYOUTS.split()], ["--exit-interval", str(steps // 2)]
    two, same = [*serial, T, "2"], {"rates": 1e-9}
    for name, starts in {
        "serial": [(1, serial)],
        "t = 2": [(2, two)],
        "t = 4": [(4, [*serial, T, "4"])],
        "t = 2, d = 2": [(4, two)],
        "t = 2, resumed as d = 2": [(2, two + half), (2, serial)],
    }.items():
        yield Contender(name, training, {"starts": starts}, group="layouts", same=same)
    own = {"flags": [*serial, "--micro-batch-size", "8"], "steps": steps}
    yield Contender("transformers", independent, own, group="layouts", same=same)
    for p, kind, t in product(("0", "0.1"), TOLERANCES, (1, 2)):
        words = f"{FORMATS} --{kind} {T} {t} --attention-dropout {p} --hidden-dropout {p}"
        own = {"starts": [(t, common + words.split())]}
        name, facts = f"{kind.replace('no-bf16', 'fp32')}, t = {t}", TOLERANCES[kind]
        yield Contender(name, training, own, group=f"dropout {p}", facts=facts)
    for name, (rng, program) in MASKS.items():
        words = f"{DROPOUT} --attention-dropout-rng {rng}".format(steps, steps // 10)
        own = {"flags": words.split() + text, "program": program}
        yield Contender(name, reseeded, own, group="masks of dropout")


def result(found: Results) -> str:
    cells = [found.cell("layouts", name, LARGEST) for _, name in found.rows]
    parts, masks = [], found.cell("masks of dropout", COORDINATES, RATIO)
    if largest := max((each.median for each in cells if each), default=0.0):
        parts.append(f"no loss leaves the serial one by more than {largest:.1e}")
    if SHARE in found.columns:
        parts.append(f"bf16 and fp16 take {found.range(SHARE)} of their tolerance")
    if masks:
        ratio = masks.text("{:.4f}", is_ratio=True)
        parts.append(f"the validation loss is {ratio} times that with torch's masks of dropout")
    return f"In {found.record['steps']} steps {'; '.join(parts) or 'nothing was compared'}."


def failure(found: Results) -> str:
    outside = [each for each in found.rows if found.median(*each, SHARE) > 1]
    return f"outside the tolerance: {outside}" if outside else ""


COLUMNS = (
    Column("first loss", lambda own, _: own["losses"][0], "{:.3f}"),
    Column("last loss", lambda own, _: own["losses"][-1], "{:.4f}"),
    Column(LARGEST, lambda *runs: max(gaps(*runs)), "{:.1e}"),
    Column("at step", lambda *runs: gaps(*runs).index(max(gaps(*runs))) + 1, "{:.0f}"),
    Column("mean gap", lambda *runs: fmean(gaps(*runs)), "{:.1e}"),
    Column(SHARE, share, "{:.2f}"),
    Column("validation loss", "validation_loss", "{:.4f}"),
    Column(RATIO, "validation_loss", "{:.4f}", "its / first"),
    Column("steps skipped", "skipped_steps", "{:.0f}"),
    Column("loss scale at the end", "loss_scale", "{:g}"),
)
DRAWN = (
    Column("training loss", lambda own, _: own["losses"]),
    Column("largest gap so far", lambda *runs: [*accumulate(gaps(*runs), max)]),
)
QUESTION = WholeRuns(contenders, COLUMNS, result, failure=failure, picture="curves", drawn=DRAWN)

if __name__ == "__main__":
    QUESTION.run()
