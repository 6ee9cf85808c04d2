"""Which all-reduces a step does on one rank, and of how many bytes.

Along the tensor axis, of each micro-batch (paper, section 3; each of [n, h] unless it says so):

    forward         g of the embedding, g of attention and of the MLP in every layer; of the loss,
                    a chunk of tokens at a time, a maximum and two sums for each token, in fp32,
                    and f of the output layer, whose gradient is computed with the loss
    recomputation   g of attention in every layer; that of the MLP too where dropout follows it,
                    because the backward needs nothing else behind it
    backward        f of attention and of the MLP in every layer

Along the data axis the gradients, in fp32, once a step; and along both what ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.planning.parameters import buckets, padded_numbers, table
from tools.planning.shape import WIDE, Shape
from tools.planning.software import THIS_PROJECT, Software

AGREED = 8  # bytes of a number that the ranks agree on


@dataclass(frozen=True)
class Call:
    """An all-reduce of `bytes`, so many `times` a step."""

    phase: str  # forward, recomputation, backward or agreement
    bytes: int
    times: int


def tensor_calls(shape: Shape, software: Software = THIS_PROJECT) -> Iterator[Call]:
    if shape.tensor == 1:
        return
    m, layers = shape.micro_batches, shape.layers
    stream = shape.tokens * shape.hidden * shape.width
    yield Call("forward", stream, m * (1 + 2 * layers))
    yield from _loss_calls(shape, software)
    if shape.recompute == "full":
        again = 2 if shape.hidden_dropout or shape.post_norm else 1
        yield Call("recomputation", stream, m * again * layers)
    yield Call("backward", stream, m * 2 * layers)
    # Gradient norm, wishes to stop, losses that are not finite.
    yield Call("agreement", 3 * AGREED, 1)


def _loss_calls(shape: Shape, software: Software) -> Iterator[Call]:
    """Of each chunk a maximum, then the sum of exponentials and the label's logit together, and f;
    the chunks are as good as equal."""
    pieces = loss_chunks(shape, software)
    for number in range(pieces):
        start, stop = (shape.scored * each // pieces for each in (number, number + 1))
        for size in (WIDE, 2 * WIDE, shape.hidden * shape.width):
            yield Call("forward", (stop - start) * size, shape.micro_batches)


def loss_chunks(shape: Shape, software: Software = THIS_PROJECT) -> int:
    """Pieces in which the logits of a micro-batch are computed."""
    at_once = max(1, software.chunk_bytes // (shape.padded // shape.tensor * WIDE))
    return max(1, -(-shape.scored // at_once))


def data_calls(shape: Shape) -> Iterator[Call]:
    if shape.data == 1:
        return
    most = THIS_PROJECT.bucket_bytes // WIDE
    for bucket in buckets(table(shape), most):
        yield Call("backward", WIDE * padded_numbers(bucket, shape.data), 1)
    terms = 1 if shape.kind == "gpt2" else 2
    # What the terms of the loss are means over, with the tokens; then the terms, with the wishes.
    yield Call("agreement", (1 + terms) * AGREED, 2)


def totals(calls: Iterator[Call]) -> dict[str, int | dict[str, dict[str, int]]]:
    """JSON: calls and bytes of a step, in all and by phase."""
    phases: dict[str, dict[str, int]] = {}
    for call in calls:
        sums = phases.setdefault(call.phase, {"calls": 0, "bytes": 0})
        sums["calls"] += call.times
        sums["bytes"] += call.times * call.bytes
    return {
        "calls": sum(each["calls"] for each in phases.values()),
        "bytes": sum(each["bytes"] for each in phases.values()),
        "by_phase": phases,
    }
