"""What a check of the replicas costs beside a training step.

Two gloo processes of one thread share one model (t = 2) or hold one each (d = 2), without dropout;
4 samples of 256 tokens a step on both together. A check hashes all that the two hold in common, and
its time holds the wait for the slower of them. Its share is that of the time of training in which
one step of an interval is checked. Steps and checks have processes of their own and take turns.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from megatron.train.replicas import check_replicas

SHARE = "share of training, %"
MODELS = {
    "quickstart": ("--vocab-size", "4096"),
    "medium": (
        *("--num-layers", "6", "--hidden-size", "384", "--num-attention-heads", "6"),
        *("--vocab-size", "8192"),
    ),
}


def check(rank: Rank, flags: list[str]) -> Turn:
    config = steps.read(flags, rank.size)
    mesh = steps.mesh_of(rank, config)
    state, data = steps.build(config, mesh), mesh.batch
    batch = steps.batch_of(config, 0, data.rank, data.size)
    common = [x.local.nbytes for x in state.slices() if data.size > 1 or not x.spec.shards]

    def turn() -> Figures:
        check_replicas(state, [batch])
        return {"hashed": sum(common)}

    return turn


def main(
    flags: Flags,
    interval: int = 100,
    models: tuple[str, ...] = tuple(MODELS),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
) -> None:
    """Time steps and checks.

    Args:
        interval: steps between checks; the default is that of --check-replicas-interval.
        models: quickstart, medium.
        dtypes: of weights and activations.
    """
    contenders = []
    for model, dtype, t in product(models, dtypes, (1, 2)):
        words = ["--preset", "quickstart", *MODELS[model], "--micro-batch-size", str(2 * t)]
        words += ["--tensor-model-parallel-size", str(t)]
        words.append("--bf16" if dtype == "bf16" else "--no-bf16")
        group = f"{model}, {dtype}, t = {t}, d = {2 // t}"
        common: dict[str, Any] = {"group": group, "ranks": 2, "arguments": {"flags": words}}
        contenders += [
            Contender(name="step", run=steps.ours, **common),
            Contender(name="check", run=check, **common),
        ]

    def share(own: Figures, first: Figures) -> float | None:
        if own is first or not first:
            return None
        return float(100 * own["wall"] / (interval * first["wall"] + own["wall"]))

    ask(
        Question(
            title="What a check of the replicas costs",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column("ms", "wall", "{:.1f}", unit=1e-3),
                Column("hashed, MB", "hashed", "{:.1f}", unit=1e6),
                Column(SHARE, share, "{:.3f}"),
            ),
            result=lambda found: (
                f"A check every {interval} steps takes {found.range(SHARE)} % of the time of "
                "training."
            ),
            turns=3,
            warm_up=2,
            packages=("torch",),
            settings={"interval": interval},
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
