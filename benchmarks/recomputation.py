"""What it costs, and what it saves, that the backward pass computes activations again.

Whole training steps of this project with --recompute-granularity none, selective and full, without
dropout and with the paper's; from the same weights, on the same samples, and the same elements are
dropped, so that every loss has to be the same bit for bit. FLOPs are those of the formulas of
tools/plan.py, of causal attention half. `train_step.py` has the same beside others.
"""

import shlex
import sys
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch._dynamo  # noqa: F401 - here, or the first recomputation would import it

from benchmarks import steps
from benchmarks.growth import on_paper
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli

RATIO = "its time / none's"


def contender(rank: Rank, flags: list[str]) -> Turn:
    step, flops = steps.ours(rank, flags, keeps=True), on_paper(flags, 1)["flops"]
    return lambda: {**(step() or {}), "flops": flops}


def main(
    flags: Flags,
    preset: str = "gpt2_30m",
    dtype: Literal["fp32", "bf16"] = "fp32",
    dropout: tuple[float, ...] = (0.0, 0.1),
    vocab_size: int = 8192,
    more: str = "",
) -> None:
    """Compare steps.

    Args:
        preset: of pretrain_gpt2.py, a name or a file.
        dtype: of weights and activations.
        dropout: each of attention's probabilities, embeddings and residuals alike.
        vocab_size: of the model.
        more: flags of pretrain_gpt2.py, as --more="--seq-length 1024 --micro-batch-size 1".
    """
    contenders = []
    for p in dropout:
        words = ["--preset", preset, "--bf16" if dtype == "bf16" else "--no-bf16"]
        words += ["--attention-dropout", str(p), "--hidden-dropout", str(p)]
        words += ["--vocab-size", str(vocab_size), *shlex.split(more)]
        for each in ("none", "selective", "full"):
            arguments: dict[str, Any] = {"flags": [*words, "--recompute-granularity", each]}
            contenders.append(
                Contender(
                    name=each,
                    group=f"dropout {p:g}",
                    run=contender,
                    arguments=arguments,
                    threads=2,
                    same={"loss": 0},
                )
            )
    ask(
        Question(
            title="Recomputation: what it costs and saves",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column("seconds", "wall", "{:.3f}"),
                Column("CPU seconds", "cpu", "{:.3f}"),
                Column(RATIO, "wall", "{:.3f}", "its / first"),
                Column("its FLOPs / none's", "flops", "{:.3f}", "its / first"),
                Column("kept for the backward, MiB", "kept_bytes", "{:,.0f}", unit=2**20),
                Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
            ),
            result=lambda found: " ".join(
                f"With {group} a step takes {found.median(group, 'full', RATIO):.2f} of its time "
                f"with full recomputation, {found.median(group, 'selective', RATIO):.2f} with "
                "selective."
                for group in dict.fromkeys(group for group, _ in found.rows)
            ),
            turns=3,
            warm_up=2,
            packages=("torch",),
            settings={"preset": Path(preset).name.removesuffix(".toml"), "dtype": dtype},
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
