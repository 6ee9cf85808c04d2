"""What a step takes on one rank, by formulas: what the counts of the matrix have to equal.

h hidden   a heads   f MLP's width   s tokens   b samples of a micro-batch   n = b s
t tensor-parallel size   v padded vocabulary   k masked tokens   w bytes of a number
m micro-batches   r ranks that hold rows of the stream: t under sequence parallelism, else 1
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MASKED_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    kind: str  # gpt2, bert
    post_norm: bool
    untied: bool
    recompute: str
    dropout: bool
    layers: int
    h: int
    a: int
    f: int
    s: int
    b: int
    m: int
    t: int
    r: int
    d: int
    v: int
    vocabulary: int  # without padding
    positions: int
    w: int  # bytes
    k: int  # masked tokens of BERT, of a micro-batch, filled up
    blocks: bool  # attention keeps its probabilities, else it is torch's kernel
    documents: bool
    whole_logits: bool  # a loss of one's own, in place of the fused one

    @property
    def n(self) -> int:
        return self.b * self.s

    @property
    def wide(self) -> int:
        return max(4, self.w)


def matmul_flops(x: Shape) -> int:
    """3 products where the forward has one, and the layers' once more where they are recomputed."""
    n, h, t = x.n, x.h, x.t
    core = 4 * n * x.s * h // t
    layer = (2 * n * h * 4 * h + 2 * n * h * 2 * x.f) // t + core
    again = {"none": 0, "selective": core, "full": layer}[x.recompute]
    again += 0 if x.blocks else core // 2  # the kernel's backward computes the scores again
    if x.kind == "gpt2":
        heads = 2 * n * h * x.v // t
    else:  # all but the logits is small, and whole on every rank
        heads = 2 * x.k * h * x.v // t + 2 * x.k * h * h + 2 * x.b * h * (h + 2)
    return x.m * (x.layers * (3 * layer + again) + 3 * heads)


def parameters(x: Shape) -> list[tuple[int, bool]]:
    """(numbers on this rank, whether the gradient is partial over the ranks of the stream)."""
    h, f, t = x.h, x.f, x.t
    norm = [(h, True)] * 2
    layer = [
        *norm,
        (3 * h * h // t, False),
        (3 * h // t, False),
        (h * h // t, False),
        (h, True),
        *norm,
        (f * h // t, False),
        (f // t, False),
        (h * f // t, False),
        (h, True),
    ]
    words = (x.v * h // t, False)
    found = [words, (x.positions * h, True), *(x.layers * layer), *([words] if x.untied else [])]
    if x.kind == "gpt2":
        return [*found, *norm]
    found += [(2 * h, True), *norm]  # token types; the final norm, or that of the embeddings
    square = [(h * h, False), (h, False)]
    return [
        *found,
        *square,
        (2 * h, False),
        (2, False),
        *square,
        *[(h, False)] * 2,
        (x.v // t, False),
    ]


def parameter_bytes(x: Shape) -> int:
    return x.w * sum(size for size, _ in parameters(x))


def saved_bytes(x: Shape) -> int:
    """Of one micro-batch, to the loss."""
    n, t, r, w, size = x.n, x.t, x.r, x.w, x.n * x.h
    keys = 8 * n * x.dropout  # of the rows, for dropout
    norm = (size * w + 2 * n * x.wide) // r  # input, mean and deviation
    core = 3 * size * w // t  # q, k and v
    if x.recompute == "none" and x.blocks:  # the probabilities
        core += x.b * x.a * x.s * x.s // t * w + keys * x.a // t
    elif x.recompute == "none":  # the logarithms of sums, and a mask
        core += n * x.a // t * x.wide + n * w * (x.s if x.documents else 1)
    inside = (
        core + size * w // t + 2 * n * x.f * w // t
    )  # heads; MLP before and after its activation
    layer = 2 * norm + 2 * size * w // r + inside + 2 * keys // r
    if x.recompute == "full":
        layer = size * w // r
    if x.whole_logits:
        heads = size * w // r + n * x.vocabulary * x.wide + 12 * n  # labels and their mask
    elif x.kind == "gpt2":
        heads = 2 * size * w // r + n * (8 + x.wide)  # input and its gradient; labels, scales
    else:  # the whole stream; of masked tokens what dense, GeLU, norm and head keep; a bias
        masked = x.k * (5 * x.h * w + 3 * x.wide + 16)
        heads = size * w + masked + x.v // t * x.wide + x.b * x.h * w
    ids = (17 if x.kind == "gpt2" else 25) * n  # of words, positions and types
    if x.recompute == "selective":  # what else the core is called with: rows and a mask
        ids += 8 * n + n * (1 if x.kind == "bert" else x.s * x.documents)
    return x.layers * layer + norm + heads + ids + keys // r


def traffic(x: Shape) -> tuple[Counter[str], Counter[str]]:
    """(calls, bytes sent) by axis, of forward and backward of all micro-batches."""
    calls, sent = Counter[str](), Counter[str]()

    def add(axis: str, size: int, passes: int, whole: int, times: int) -> None:
        if size > 1 and times:
            calls[axis] += times
            sent[axis] += times * (passes * (size - 1) * whole // size)

    t, layers, m, stream = x.t, x.layers, x.m, x.n * x.h * x.w
    scored = x.n if x.kind == "gpt2" else x.k
    again = 0
    if x.recompute == "full":  # the last sum of a layer only where something behind it is kept
        again = 2 if x.dropout or x.post_norm else 1
    if x.r == 1:
        sums = 1 + (4 + again) * layers
        add("tensor", t, 2, stream, m * sums)
        add("tensor", t, 2, scored * x.h * x.w, m)  # f of the head
    else:
        again_in = 2 if again else 0
        gathers = 1 + (2 + again_in) * layers + (2 + 2) * layers
        scatters = 1 + (2 + again + 2) * layers
        add("tensor", t, 1, stream, m * (gathers + scatters))
        if x.kind == "gpt2":  # the head; its backward gathers again, but not that of the fused loss
            add("tensor", t, 1, stream, (2 + x.whole_logits) * m)
        else:  # what the encoder returns, and f of the head on masked tokens
            add("tensor", t, 1, stream, m)
            add("tensor", t, 2, scored * x.h * x.w, m)
    if x.whole_logits:
        add("tensor", t, 1, x.n * x.v * x.w, m)
    else:  # a maximum, then two sums
        add("tensor", t, 2, scored * x.wide, m)
        add("tensor", t, 2, 2 * scored * x.wide, m)
    for is_of_stream in (True, False):
        sizes = [size for size, of_stream in parameters(x) if of_stream == is_of_stream or x.r == 1]
        if x.r == 1 and not is_of_stream:
            continue
        axes = {"data": x.d, "tensor": x.r if is_of_stream else 1}
        total = sum(-(-size // 64) * 64 for size in sizes)
        unit = 64 * axes["data"] * axes["tensor"]
        for axis, size in axes.items():
            add(axis, size, 2, -(-total // unit) * unit * x.wide, 1)
    return calls, sent
