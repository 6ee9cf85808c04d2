"""The matrix products of a step on one rank, and the FLOPs that follow.

Forward, of a layer:                    FLOPs of all t ranks
    queries, keys, values   [n, h] x [h, 3h/t]      6 n h^2
    output of attention     [n, h/t] x [h/t, h]     2 n h^2
    MLP                     [n, h] x [h, 4h/t], [n, 4h/t] x [4h/t, h]     16 n h^2
    scores and their use    b a/t times [s, h/a] x [h/a, s] and [s, s] x [s, h/a]     4 n s h
and of the output layer     [n, h] x [h, v/t]       2 n h v

The backward has two products for each of the forward; recomputation repeats the layers' forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tools.planning.shape import Shape

FORMULA = "6 n (12 L h^2 + V h) + 12 n s h L"
FORMULA_BERT = "6 (n 12 L h^2 + k (h^2 + V h) + b (h^2 + 2 h)) + 12 n s h L, of k masked tokens"
RECOMPUTED = "the same with v for V, and once more the layers' forward where it is recomputed"


@dataclass(frozen=True)
class Product:
    """`batch` times [m, k] x [k, n], all of it so many `times` a step."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    times: float

    @property
    def flops(self) -> float:
        """Of a step."""
        return 2.0 * self.batch * self.m * self.k * self.n * self.times

    @property
    def numbers(self) -> int:
        """Read and written by one product that keeps its factors at hand."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


def linear(shape: Shape) -> Iterator[Product]:
    """Of the forward of a layer's weights."""
    n, h, t, times = shape.tokens, shape.hidden, shape.tensor, shape.layers * shape.micro_batches
    yield Product("qkv", 1, n, h, 3 * h // t, times)
    yield Product("output", 1, n, h // t, h, times)
    yield Product("up", 1, n, h, 4 * h // t, times)
    yield Product("down", 1, n, 4 * h // t, h, times)


def attention(shape: Shape) -> Iterator[Product]:
    """Of the forward of attention's core."""
    s, size = shape.sequence, shape.hidden // shape.heads
    many, times = shape.batch * shape.heads // shape.tensor, shape.layers * shape.micro_batches
    yield Product("scores", many, s, size, s, times)
    yield Product("values", many, s, s, size, times)


def heads(shape: Shape) -> Iterator[Product]:
    """Of the forward of what follows the layers; BERT's small ones are whole on every rank."""
    h, k, m = shape.hidden, shape.scored, shape.micro_batches
    yield Product("logits", 1, k, h, shape.padded // shape.tensor, m)
    if shape.kind == "bert":
        yield Product("masked tokens", 1, k, h, h, m)
        yield Product("pooler", 1, shape.batch, h, h, m)
        yield Product("order", 1, shape.batch, h, 2, m)


def backward(forward: Product) -> Iterator[Product]:
    """The gradients of the left and of the right factor."""
    b, m, k, n, times = forward.batch, forward.m, forward.k, forward.n, forward.times
    yield Product(f"{forward.name}, gradient of the input", b, m, n, k, times)
    yield Product(f"{forward.name}, gradient of the weight", b, k, m, n, times)


def forward_again(shape: Shape) -> list[Product]:
    """What recomputation repeats."""
    again = {
        "none": [],
        "selective": list(attention(shape)),
        "full": [*linear(shape), *attention(shape)],
    }[shape.recompute]
    return [replace(each, name=f"{each.name}, again") for each in again]


def model_flops(shape: Shape) -> float:
    """FLOPs of a step on all ranks as MFU counts them: recomputation and padding are of no use,
    attention is counted whole (FORMULA, FORMULA_BERT)."""
    n, h, s, layers = shape.tokens, shape.hidden, shape.sequence, shape.layers
    weights = n * 12 * layers * h**2 + shape.predicted * shape.vocabulary * h
    if shape.kind == "bert":
        weights += shape.predicted * h**2 + shape.batch * (h**2 + 2 * h)
    each = 6.0 * weights + 12.0 * n * s * h * layers
    return each * shape.micro_batches * shape.data


def executed_flops(shape: Shape) -> float:
    """The same with recomputation and the padded vocabulary, as the authors count TFLOP/s."""
    layers = sum(each.flops for each in (*linear(shape), *attention(shape)))
    again = sum(each.flops for each in forward_again(shape))
    logits, *small = (each.flops for each in heads(shape))
    of_group = shape.tensor * (3 * layers + again + 3 * logits) + 3 * sum(small)
    return of_group * shape.data
