"""The output layer and its loss.

Compares forward and backward with the logits of one chunk of tokens at a time, as in training, and
with all logits at once. Both are code of this project, with the weight's gradient in its buffer,
and have the same loss. As in a run, the softmax of a chunk is two compiled functions on a GPU and
works in place on a CPU. Memory is the peak of a step on all ranks, without the weight, the hidden
states and the gradients of both.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.steps import SEED
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megatron.train.compiled import compile_layers
from megatron.train.machine import choose_compile
from megatron.train.state import DTYPES

CHUNKED, AT_ONCE = "logits in chunks", "all logits at once"
RATIO, MEMORY = "its time / at once", "its extra memory / at once"
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}  # of the losses


def contender(rank: Rank, name: str, dtype: str, vocab: int, hidden: int, tokens: int) -> Turn:
    mesh = rank.mesh()
    with torch.device("meta"):
        embedding = VocabParallelEmbedding(mesh, vocab, hidden, std=0.02, divisible_by=128)
        head = VocabParallelHead(mesh, vocab, hidden, divisible_by=128)
    layers = nn.ModuleList([embedding, head])
    materialize(layers, device=mesh.device, dtype=DTYPES[dtype], seed=SEED)
    compiled, warnings = choose_compile(None, mesh)
    rank.notes += warnings
    if compiled:
        compile_layers(layers)
    buckets = GradientBuckets.for_master_weights(layers)
    numbers = torch.Generator().manual_seed(SEED)
    stream = torch.randn(tokens, hidden, generator=numbers).to(mesh.device, DTYPES[dtype])
    stream.requires_grad_()
    scales = torch.full((tokens,), 1 / tokens, device=mesh.device)
    held = sum(x.nbytes + 4 * x.numel() for x in layers.parameters()) + 2 * stream.nbytes

    def turn() -> Figures:
        labels = torch.randint(vocab, (tokens,), generator=numbers).to(mesh.device)
        buckets.start()
        with buckets.accumulate(is_last=True):
            if name == CHUNKED:
                loss = head(stream, embedding, labels, scales)
            else:
                loss = (head(stream, embedding, labels) * scales).sum()
            loss.backward()
        stream.grad = None
        return {"loss": loss.item(), "held": held * rank.size}

    return turn


def contenders(
    flags: Flags,
    vocab_size: int = 50304,
    hidden_size: int = 768,
    tokens: int = 4096,
    tensor_model_parallel_size: tuple[int, ...] = (1, 2),
) -> Iterator[Contender]:
    """Compare the two. The vocabulary is sharded over the tensor-parallel ranks."""
    sizes = {"vocab": vocab_size, "hidden": hidden_size, "tokens": tokens}
    for dtype, t, name in product(TOLERANCES, tensor_model_parallel_size, (AT_ONCE, CHUNKED)):
        own, group = {"name": name, "dtype": dtype, **sizes}, f"{dtype}, t = {t}"
        same, threads = {"loss": TOLERANCES[dtype]}, max(1, 2 // t)
        yield Contender(name, contender, own, group=group, ranks=t, threads=threads, same=same)


def extra(figures: Figures) -> float:
    return float(figures["peak_bytes"] - figures["held"]) / 2**20


RESULT = "Logits in chunks take {} of the time of all at once and {} of the memory."
QUESTION = Question(
    contenders,
    (
        Column("seconds", "wall", "{:.3f}"),
        Column(RATIO, "wall", "{:.3f}", "its / first"),
        Column("CPU seconds", "cpu", "{:.3f}"),
        Column("extra MiB", lambda own, _: extra(own), "{:,.0f}"),
        Column(MEMORY, lambda own, first: extra(own) / extra(first)),
    ),
    lambda found: RESULT.format(found.range(RATIO), found.range(MEMORY)),
    small="--hidden-size 32 --tokens 64 --vocab-size 512",
)

if __name__ == "__main__":
    QUESTION.run()
