"""How many bytes a rank holds when it holds the most, by kind.

All of a step: weights, their gradients and Adam's two moments, and in narrow precision masters.
A micro-batch adds what the layers keep for the backward, N = n h numbers being the stream:

    none        norms' inputs and results 4 N, q, k, v and heads 4 N/t, around GeLU 8 N/t
    selective   the same without what attention's core keeps
    full        the layer's input N; of one layer at a time all of the above

and beside that, at one time, either the logits or the layer whose backward is going on.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.config.model import RecomputeGranularity
from tools.planning.communication import loss_chunks
from tools.planning.hardware import Hardware
from tools.planning.parameters import local
from tools.planning.shape import WIDE, Shape

GRANULARITIES: tuple[RecomputeGranularity, ...] = ("none", "selective", "full")
BLOCK = 128  # queries of attention on the CPU
SHORT = 512  # tokens up to which attention on the CPU goes in blocks without dropout, too


def memory(shape: Shape, hardware: Hardware) -> dict[str, int]:
    """Bytes by kind, and the most of them at a time as "total"."""
    parameters, is_narrow = local(shape), shape.width < WIDE
    lasting = {
        "weights": shape.width * parameters,
        "gradients": WIDE * parameters,
        "masters": WIDE * parameters * is_narrow,
        "moments": 2 * WIDE * parameters,
    }
    passing = {
        "activations": activations(shape, hardware),
        "logits": logits(shape),
        "one_layer": one_layer(shape, hardware),
    }
    most = passing["activations"] + max(passing["logits"], passing["one_layer"])
    return {**lasting, **passing, "total": sum(lasting.values()) + most}


def fits(total: int, hardware: Hardware) -> bool:
    return total <= hardware.memory - hardware.reserved_memory


def activations(shape: Shape, hardware: Hardware) -> int:
    """What layers and final norm keep from forward to backward."""
    stream = shape.tokens * shape.hidden
    layer = shape.width * stream if shape.recompute == "full" else kept(shape, hardware)
    return shape.layers * layer + _norm(shape)


def by_granularity(shape: Shape, hardware: Hardware) -> dict[str, int]:
    """Activations as they would be with each kind of recomputation."""
    return {each: activations(replace(shape, recompute=each), hardware) for each in GRANULARITIES}


def kept(shape: Shape, hardware: Hardware) -> int:
    """By one layer that is not recomputed as a whole."""
    n, h, t, width = shape.tokens, shape.hidden, shape.tensor, shape.width
    cut = (3 + 1 + 4 + 4) * width * n * h // t
    core = 0 if shape.recompute == "selective" else _core(shape, hardware)
    return 2 * _norm(shape) + cut + core


def _norm(shape: Shape) -> int:
    """Its input, mean and deviation, and its result, which a product keeps; of the last norm in
    place of the result its gradient."""
    return 2 * shape.width * shape.tokens * shape.hidden + 2 * WIDE * shape.tokens


def _core(shape: Shape, hardware: Hardware) -> int:
    """What attention keeps beside q, k, v and its result."""
    many, s = shape.batch * shape.heads // shape.tensor, shape.sequence
    if not hardware.is_cpu:
        return WIDE * many * s  # logarithms of sums
    causal = shape.kind == "gpt2"
    is_narrow = shape.width < WIDE
    if not (shape.attention_dropout or (s <= SHORT and (causal or is_narrow))):
        return WIDE * many * s
    seen = sum(min(start + BLOCK, s) if causal else s for start in range(0, s, BLOCK)) * BLOCK
    return many * min(seen, s * s) * shape.width


def logits(shape: Shape) -> int:
    """Of a chunk of the tokens with a loss, [k, v/t] in fp32 and where weights are narrow in their
    width too, or then in that alone and its product, the weight's gradient; beside them the output
    layer's input."""
    is_narrow = shape.width < WIDE
    chunk, columns = -(-shape.scored // loss_chunks(shape)), shape.padded // shape.tensor
    loss = (WIDE + shape.width * is_narrow) * chunk * columns
    products = shape.width * (chunk + shape.hidden * is_narrow) * columns
    return max(loss, products) + shape.width * shape.scored * shape.hidden


def one_layer(shape: Shape, hardware: Hardware) -> int:
    """What the backward of one layer needs beside what is kept anyway: the layer's own activations
    where they are computed again, gradients of the stream and behind GeLU, and of a weight."""
    n, h, t, width = shape.tokens, shape.hidden, shape.tensor, shape.width
    again = 0
    if shape.recompute == "full":
        again = kept(shape, hardware) - width * n * h
    elif shape.recompute == "selective":
        again = _core(shape, hardware)
    passing = width * 4 * n * h // t
    weight = width * 4 * h * h // t * (width < WIDE)  # else computed where it belongs
    return again + passing + 2 * width * n * h + weight
