"""The output layer and its loss, forward and backward: logits of a chunk of the tokens at a time,
as training computes them, beside all logits at once.

Both are this project's, with the gradient of the weight in its buffer, and have the same loss.
Memory is the most that a step takes beside the weight, its gradient, the stream and the stream's
gradient, on all ranks.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.steps import SEED
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megatron.parallel.sharding import materialize
from megatron.train.state import DTYPES

CHUNKED, AT_ONCE = "logits in chunks", "all logits at once"
RATIO, MEMORY = "its time / at once", "its extra memory / at once"
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}  # of the losses


def contender(
    rank: Rank, vocab_size: int, hidden_size: int, tokens: int, dtype: str, in_chunks: bool
) -> Turn:
    mesh = rank.mesh()
    with torch.device("meta"):
        sizes = mesh, vocab_size, hidden_size
        embedding = VocabParallelEmbedding(*sizes, divisible_by=128, std=0.02)
        head = VocabParallelHead(*sizes, divisible_by=128)
    layers = nn.ModuleList([embedding, head])
    materialize(layers, device=mesh.device, dtype=DTYPES[dtype], seed=SEED)
    buckets, numbers = GradientBuckets(layers), torch.Generator().manual_seed(SEED)
    stream = torch.randn(tokens, hidden_size, generator=numbers).to(mesh.device, DTYPES[dtype])
    stream.requires_grad_()
    scales = torch.full((tokens,), 1 / tokens, device=mesh.device)
    weights = list(layers.parameters())
    held = sum(x.nbytes + 4 * x.numel() for x in weights) + 2 * stream.nbytes

    def turn() -> Figures:
        labels = torch.randint(vocab_size, (tokens,), generator=numbers).to(mesh.device)
        buckets.start()
        with buckets.accumulate(is_last=True):
            if in_chunks:
                loss = head(stream, embedding, labels, scales)
            else:
                loss = (head(stream, embedding, labels) * scales).sum()
            loss.backward()
        stream.grad = None
        return {"loss": loss.item(), "held": held * rank.size}

    return turn


def extra(figures: Figures) -> float:
    return float(figures["peak_bytes"] - figures["held"])


def part(own: Figures, first: Figures) -> float | None:
    return extra(own) / extra(first) if first and own is not first else None


def main(
    flags: Flags,
    vocab_size: int = 50304,
    hidden_size: int = 768,
    tokens: int = 4096,
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    tensor_parallel: tuple[int, ...] = (1, 2),
) -> None:
    """Compare the two.

    Args:
        vocab_size: rows of the weight, cut over the ranks.
        hidden_size: width of the stream.
        tokens: of a step.
        dtypes: of weight, stream and logits.
        tensor_parallel: ranks that the vocabulary is cut over.
    """
    given = {"vocab_size": vocab_size, "hidden_size": hidden_size, "tokens": tokens}
    ask(
        Question(
            title="The output layer and its loss",
            method=__doc__,
            contenders=[
                Contender(
                    name=name,
                    group=f"{dtype}, t = {t}",
                    run=contender,
                    arguments={**given, "dtype": dtype, "in_chunks": name == CHUNKED},
                    ranks=t,
                    threads=max(1, 2 // t),
                    same={"loss": TOLERANCES[dtype]},
                )
                for dtype, t, name in product(dtypes, tensor_parallel, (AT_ONCE, CHUNKED))
            ],
            columns=(
                Column("seconds", "wall", "{:.3f}"),
                Column(RATIO, "wall", "{:.3f}", "its / first"),
                Column("CPU seconds", "cpu", "{:.3f}"),
                Column("extra MiB", lambda own, _: extra(own) / 2**20, "{:,.0f}"),
                Column(MEMORY, part),
            ),
            result=lambda found: (
                f"Logits in chunks take {found.range(RATIO)} of the time of all at once and "
                f"{found.range(MEMORY)} of the memory."
            ),
            rounds=5,
            packages=("torch",),
            settings=given,
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
