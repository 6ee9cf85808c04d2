"""A step of the output layer alone, for `output_layer.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.cases import SEED, Case
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megatron.parallel.mesh import Mesh
from megatron.parallel.sharding import materialize
from megatron.train.state import DTYPES


def output_layer(case: Case, mesh: Mesh, dtype: str, in_chunks: bool) -> Callable[[int], float]:
    """Of a batch's number, to its loss; the stream [n, h] is always the same."""
    with torch.device("meta"):
        h, v, rows = case.hidden_size, case.vocab_size, case.divisible_by
        embedding = VocabParallelEmbedding(mesh, v, h, divisible_by=rows, std=0.02)
        head = VocabParallelHead(mesh, v, h, divisible_by=rows)
    parts = nn.ModuleList([embedding, head])
    materialize(parts, device=mesh.device, dtype=DTYPES[dtype], seed=SEED)
    buckets = GradientBuckets(parts)
    numbers = torch.Generator().manual_seed(SEED)
    stream = torch.randn(case.tokens, h, generator=numbers).to(mesh.device, DTYPES[dtype])
    stream.requires_grad_()
    factors = torch.full((case.tokens,), 1 / case.tokens, device=mesh.device)

    def loss(labels: Tensor) -> Tensor:
        if in_chunks:
            total: Tensor = head(stream, embedding, labels, factors)
            return total
        return (head(stream, embedding, labels) * factors).sum()

    def step(number: int) -> float:
        labels = torch.from_numpy(case.text(number)[:, 1:].copy()).flatten()
        buckets.start()
        with buckets.accumulate(is_last=True):
            found = loss(labels.to(mesh.device))
            found.backward()
        stream.grad = None
        return found.item()

    return step
