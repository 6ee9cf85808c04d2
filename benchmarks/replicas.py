"""What a check of the replicas costs.

Two gloo processes of one thread share one model (t = 2) or hold one each (d = 2), without dropout;
4 samples of 256 tokens a step on both together. A check hashes all that the two hold in common, and
its time holds the wait for the slower of them. Its share is that of the time of training in which
one step of an interval is checked. Steps and checks have processes of their own and take turns.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.train.replicas import check_replicas

MODELS = {
    "quickstart": "--vocab-size 4096",
    "medium": "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --vocab-size 8192",
}
SHARE = "share of training, %"


def check(rank: Rank, flags: list[str]) -> Turn:
    step = steps.ours(rank, flags)
    state, data = step.state, step.state.mesh.batch
    batch = steps.batch_of(step.config, 0, data.rank, data.size)
    common = sum(x.local.nbytes for x in state.slices() if data.size > 1 or not x.spec.shards)

    def turn() -> Figures:
        check_replicas(state, [batch])
        return {"hashed": common}

    return turn


def contenders(
    flags: Flags, interval: int = 100, models: tuple[str, ...] = tuple(MODELS)
) -> Iterator[Contender]:
    """Time steps, and checks after so many of them, of these models: quickstart, medium."""
    for model, dtype, t in product(models, ("fp32", "bf16"), (1, 2)):
        words = f"--preset quickstart {MODELS[model]} --tensor-model-parallel-size {t} "
        words += f"--micro-batch-size {2 * t} {'--bf16' if dtype == 'bf16' else '--no-bf16'}"
        group, own = f"{model}, {dtype}, t = {t}, d = {2 // t}", {"flags": words.split()}
        yield Contender("step", steps.ours, own, group=group, ranks=2)
        yield Contender("check", check, own, group=group, ranks=2, facts={"interval": interval})


def share(own: Figures, first: Figures) -> float:
    return float(100 * own["wall"] / (own["interval"] * first["wall"] + own["wall"]))


COLUMNS = (
    Column("ms", "wall", "{:.1f}", unit=1e-3),
    Column("CPU ms", "cpu", "{:.1f}", unit=1e-3),
    Column("hashed, MB", "hashed", "{:.1f}", unit=1e6),
    Column(SHARE, share, "{:.3f}"),
)
RESULT = "A check every {} steps takes {} % of the time of training."
QUESTION = Question(
    contenders,
    COLUMNS,
    lambda found: RESULT.format(found.record["interval"], found.range(SHARE)),
    turns=3,
    warm_up=2,
)

if __name__ == "__main__":
    QUESTION.run()
