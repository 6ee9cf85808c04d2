"""Which all-reduces a step does on one rank, and of how many bytes.

Along the tensor axis, of each micro-batch (paper, section 3; each of [n, h] unless it says so):

    forward         g of the embedding, g of attention and of the MLP in every layer,
                    and of the loss a maximum and two sums for each token, in fp32
    recomputation   g of attention in every layer; that of the MLP too where dropout follows it,
                    because the backward needs nothing else behind it
    backward        f of the output layer, f of attention and of the MLP in every layer

Along the data axis the gradients, in fp32, once a step; and along both what ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.planning.parameters import buckets, table
from tools.planning.shape import WIDE, Shape
from tools.planning.software import THIS_PROJECT

AGREED = 8  # bytes of a number that the ranks agree on


@dataclass(frozen=True)
class Call:
    """An all-reduce of `bytes`, so many `times` a step."""

    phase: str  # forward, recomputation, backward or agreement
    bytes: int
    times: int


def tensor_calls(shape: Shape) -> Iterator[Call]:
    if shape.tensor == 1:
        return
    m, layers, stream = shape.micro_batches, shape.layers, _stream(shape, shape.tokens)
    yield Call("forward", stream, m * (1 + 2 * layers))
    yield from _loss_calls(shape)
    if shape.recompute == "full":
        again = 2 if shape.hidden_dropout or shape.post_norm else 1
        yield Call("recomputation", stream, m * again * layers)
    yield Call("backward", _stream(shape, shape.predicted), m)
    yield Call("backward", stream, m * 2 * layers)
    # Gradient norm, wishes to stop, losses that are not finite.
    yield Call("agreement", 3 * AGREED, 1)


def _loss_calls(shape: Shape) -> Iterator[Call]:
    """A maximum, then the sum of exponentials and the label's logit together."""
    for numbers in (1, 2):
        yield Call("forward", numbers * shape.predicted * WIDE, shape.micro_batches)


def _stream(shape: Shape, tokens: int) -> int:
    return tokens * shape.hidden * shape.width


def data_calls(shape: Shape) -> Iterator[Call]:
    if shape.data == 1:
        return
    most = THIS_PROJECT.bucket_bytes // WIDE
    for bucket in buckets(table(shape), most):
        yield Call("backward", WIDE * sum(each.local for each in bucket), 1)
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
