"""A step's work on one rank, by formulas: the counts of the matrix have to equal them.

h hidden   a heads   g of keys and values   f MLP's width
s tokens   b samples of a micro-batch   t tensor-parallel size   v padded vocabulary
c context-parallel size   n = b s / c tokens of a micro-batch on a rank
k masked tokens   w bytes of a number   q numbers of a patch of an image
m micro-batches   r ranks that hold rows of the stream: t under sequence parallelism, else 1
p pipeline ranks   stages: the virtual ones of this rank   d ranks that hold the same shards
Of grids, 2D, 2.5D and 3D, t is a side, and e ranks hold the stream of different samples: 1 in 1D.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import lcm

from tests.layouts import grids


@dataclass(frozen=True, kw_only=True)
class Shape:
    kind: str  # gpt2, bert, llama, vit; of transformers qwen3 and gpt_neox, too
    of_a_user: bool  # a model of transformers, by a plan, or one of our layers
    post_norm: bool
    untied: bool
    recompute: str
    dropout: bool
    layers: int  # of this rank
    h: int
    a: int
    g: int
    f: int
    s: int
    b: int
    m: int
    t: int
    mode: str  # of tensor parallelism
    rank: int  # along the axis of heads
    c: int
    is_ring: bool  # context parallelism is ring attention (p2p); else it is Ulysses (a2a)
    r: int
    d: int
    replicas: str  # the axis of these
    zero: int  # the stage of ZeRO, whose parts the d ranks have
    p: int
    stages: int
    is_first: bool  # the rank has the first stage: the embedding
    is_last: bool  # the rank has the last stage: the head and the loss
    v: int
    vocabulary: int  # without padding
    positions: int
    w: int  # bytes
    k: int  # masked tokens of BERT, of a micro-batch, filled up
    q: int
    class_token: bool  # of ViT
    blocks: bool  # attention keeps its probabilities, else it is torch's kernel
    head: int  # elements of a head, filled up to what that kernel multiplies
    documents: bool
    whole_logits: bool  # a loss of one's own, in place of the fused one

    @property
    def n(self) -> int:
        return self.b * self.s // self.c

    @property
    def is_causal(self) -> bool:
        return self.kind not in ("bert", "vit")

    @property
    def is_grid(self) -> bool:
        return self.mode != "1d"

    @property
    def columns(self) -> int:
        """Ranks that the columns of the stream are cut over."""
        return self.t if self.is_grid else 1

    @property
    def e(self) -> int:
        return {"1d": 1, "3d": self.t * self.t}.get(self.mode, self.t)

    @property
    def wide(self) -> int:
        return max(4, self.w)

    @property
    def is_llama(self) -> bool:
        return self.kind in ("llama", "qwen3")

    @property
    def shared(self) -> Counter[int]:
        """The number of query heads for each key/value head that this rank needs."""
        first = self.rank * self.a // self.t
        return Counter(head * self.g // self.a for head in range(first, first + self.a // self.t))

    @property
    def is_uneven(self) -> bool:
        return len({*self.shared.values()}) > 1

    @property
    def keys_width(self) -> int:
        """Columns of the keys that this rank computes, and as many of the values."""
        return len(self.shared) * self.h // self.a

    @property
    def attended(self) -> int:
        """Keys that a kernel of attention multiplies a query with, on average. A causal ring has c
        blocks: one counts whole, each other one by half."""
        return self.s * (self.c + 1) // (2 * self.c) if self.is_ring and self.is_causal else self.s

    @property
    def repeats(self) -> int:
        """Times that each key/value head is there when Ulysses shares them out: the fewest that c
        divides."""
        heads = self.a // self.t if self.is_uneven else len(self.shared)
        return 1 if self.is_ring else lcm(heads, self.c) // heads

    @property
    def has_norm(self) -> bool:
        """Has it the norm outside layers: after the last one, or after the embedding."""
        return self.is_first if self.post_norm else self.is_last


def matmul_flops(x: Shape) -> int:
    """3 matmuls where the forward has one, and the layers' once more where they are recomputed."""
    n, h, t = x.n, x.h, x.t
    core = 4 * n * x.attended * x.a * x.head // t
    wide = 3 if x.is_llama else 2  # the MLP has a gate
    layer = 2 * n * h * (2 * h + wide * x.f) // t + 2 * n * h * 2 * x.keys_width + core
    again = {"none": 0, "selective": core, "full": layer}[x.recompute]
    # The backward of the kernel, and that of the ring, computes the scores again.
    again += 0 if x.blocks else core // 2
    if x.kind == "vit":  # both ends are whole on every rank, and pixels have no gradient
        patches = 2 * (2 * n * x.q * h // (x.columns * x.r)) * x.is_first
        of_head = 3 * (2 * x.b * h * x.v // x.columns) * x.is_last
        return x.m * (x.layers * (3 * layer + again) + patches + of_head)
    if x.kind != "bert":
        heads = 2 * n * h * x.v // t
    elif x.of_a_user:  # which transforms all tokens, and of which no head tells pairs apart
        heads = 2 * x.k * h * x.v // t + 2 * n * h * h
    else:  # in 1D all but the logits is small, and whole on every rank
        heads = 2 * x.k * h * x.v // t + (2 * x.k * h * h + 2 * x.b * h * (h + 2)) // x.columns
    return x.m * (x.layers * (3 * layer + again) + 3 * heads * x.is_last)


Parameters = list[tuple[int, str]]


def parameters(x: Shape) -> tuple[Parameters, Parameters, Parameters]:
    """For the modules before the layers, for one layer, and for the modules after them: (numbers on
    this rank, key of `summed_over` for the ranks of the model that add up the gradient)."""
    h, f, t, own = x.h, x.f, x.t, x.h // x.columns
    shares = t * x.e  # of a weight
    norm = [(own, "stream")] * (1 if x.is_llama else 2)
    key_value = 2 * h * x.g * h // x.a // x.e  # of all heads, where ranks cannot share these
    layer = [
        *norm,
        (h * h // shares, ""),
        (key_value, "heads") if x.g % t else (key_value // t, ""),
        (h * h // shares, ""),
        *norm,
        (2 * f * h // shares, ""),
        (h * f // shares, ""),
        *[(h // x.a, "heads")] * 2 * (x.kind == "qwen3"),  # norms of a query's and a key's head
    ]
    is_split = x.of_a_user and x.kind == "bert"
    biased = [
        *norm,
        (3 * h * h // shares, ""),
        *([(h // t, "inside")] * 3 if is_split else [(3 * h // t, "inside")]),
        (h * h // shares, ""),
        (own, "stream"),
        *norm,
        (f * h // shares, ""),
        (f // t, "inside"),
        (h * f // shares, ""),
        (own, "stream"),
    ]
    before: Parameters = []
    after: Parameters = []
    if x.has_norm:
        (before if x.post_norm else after).extend(norm)
    if x.kind == "vit":
        if x.is_first:  # patches; positions; class token and bias, or the bias alone
            before += [(each * own, "stream") for each in (x.q, x.positions, 1 + x.class_token)]
        if x.is_last:
            after += [(x.v * own, "heads of BERT"), (x.v, "heads of BERT")]
        return before, biased, after
    is_tied = not x.untied and x.p > 1
    words = (x.v * h // shares, "ends" if is_tied else "")
    if x.is_first:
        before += [words] + [(x.positions * own, "stream")] * (x.kind in ("gpt2", "bert"))
        before += [(2 * own, "stream")] if x.kind == "bert" else []  # token types
    if x.is_last and (x.untied or not x.is_first):
        after.append(words)
    if x.is_last and x.kind == "bert":
        square = [(h * own // x.e, ""), (own, "heads of BERT")]
        after += [*square, *[(own, "heads of BERT")] * 2, (x.v // t, "heads of BERT")]
        order = [*square, (2 * own, "heads of BERT"), (2, "heads of BERT")]
        after += [] if x.of_a_user else order
    return before, layer if x.is_llama else biased, after


def summed_over(x: Shape) -> dict[str, tuple[str, int]]:
    """(axis, ranks) over which gradients are partial beside the replicas: of parameters that act
    on the stream, on it inside the parallel region, on key/value heads that several ranks use."""
    if x.mode == "1d":
        return {"stream": ("tensor", x.r), "heads": ("tensor", x.t)}
    stream, inside, heads = {
        "2d": ("row", "row", "column"),
        "2.5d": ("row", "row", "column"),
        "3d": ("tokens", "inner_tokens", "input"),
    }[x.mode]
    rows = (stream, x.e)
    return {"stream": rows, "heads of BERT": rows, "inside": (inside, x.e), "heads": (heads, x.t)}


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed at once."""

    size: int  # numbers, padded
    axis: str  # beside the replicas
    ranks: int  # of this axis
    stages: int  # pipeline stages that hold copies
    layer: int | None  # whose weights alone it has (ZeRO stage 3)


def buckets(x: Shape) -> list[Bucket]:
    """One for each sum that parameters need; in ZeRO stage 3 also for each layer, for what comes
    before all of them and for what comes after."""
    before, layer, after = parameters(x)
    units = [(None, before), *((number, layer) for number in range(x.layers)), (None, after)]
    if x.zero < 3:
        units = [(None, [each for _, unit in units for each in unit])]
    found = []
    for number, unit in units:
        totals = Counter[tuple[str, int, int]]()
        for size, partial in unit:
            axis, ranks = summed_over(x).get(partial, ("", 1))
            axis = axis if ranks > 1 else ""
            totals[axis, ranks, 2 if partial == "ends" else 1] += -(-size // 64) * 64
        for (axis, ranks, stages), total in totals.items():
            multiple = 64 * x.d * ranks * stages
            found.append(Bucket(-(-total // multiple) * multiple, axis, ranks, stages, number))
    return found


def parameter_bytes(x: Shape) -> int:
    """Between steps."""
    if x.zero == 3:  # there are masters alone
        return 0
    before, layer, after = parameters(x)
    return x.w * sum(size for size, _ in [*before, *x.layers * layer, *after])


def saved_bytes(x: Shape) -> int:
    """Bytes of one micro-batch, to the loss."""
    n, t, r, w, size = x.n, x.t, x.r, x.w, x.n * x.h
    of_stream = size * w // (r * x.columns)
    keys = 8 * n * x.dropout  # of the rows, for dropout
    # Input, mean and deviation; or the root mean square, beside which that of grids keeps zeros.
    norm = of_stream + (1 if x.is_llama and not x.is_grid else 2) * n * x.wide // r
    core = size * w // t + keys_and_values(x) * w  # q, k and v
    core += 8 * x.a // t * (x.recompute == "none" and x.is_uneven)  # which heads they are
    # A mask of all tokens, of which the ring makes blocks anew.
    mask = 0 if x.kind == "vit" or x.is_ring else x.s if x.documents else 1
    # Several heads come back as the queries lie, and are copied; Ulysses returns own tokens.
    is_copied = (x.is_llama and x.a > t) or (x.c > 1 and not x.is_ring)
    if x.recompute == "none" and x.blocks:  # the probabilities
        core += n * x.a // t * x.s * w + keys * x.a // t
    elif x.recompute == "none":  # the logarithms of sums, and a mask
        core += n * x.a // t * x.wide + x.c * n * w * mask + x.is_ring * keys * x.a // t
        core += size * w // t * is_copied
    # Heads; MLP before and after its activation, of a gate, too.
    inside = core + size * w // t + (3 if x.is_llama else 2) * n * x.f * w // t
    layer = 2 * norm + 2 * of_stream + inside + 2 * keys // r
    if x.recompute == "full":
        layer = of_stream
    if x.whole_logits:
        heads = of_stream + n * x.vocabulary * x.wide + 12 * n  # labels and their mask
    elif x.kind == "vit":  # the whole stream, of which a row is read; scores and labels
        pooled = size * w // x.columns if x.class_token else x.b * x.h // x.columns * w
        heads = pooled + x.b * (x.v * x.wide + 8)
    elif x.kind != "bert":
        heads = 2 * of_stream + n * (8 + x.wide)  # input and its gradient; labels, scales
    else:  # the whole stream; of masked tokens what dense, GeLU, norm and head keep; a bias
        masked = x.k * (5 * x.h // x.columns * w + 3 * x.wide + 16)
        heads = size * w // x.columns + masked + x.v // t * x.wide + x.b * x.h // x.columns * w
    # Ids of words, of all samples that a grid reads, of positions and types; rows, for dropout.
    # Own rows are a view of the patches of all ranks.
    of_patches = x.q * w + 8 + 8 * x.class_token
    kinds = {"llama": 9 * x.e, "gpt2": 9 * x.e + 8, "bert": 9 * x.e + 16, "vit": of_patches}
    embedding = kinds[x.kind] * n
    embedding += keys // r
    others = norm * x.has_norm + heads * x.is_last + embedding * x.is_first
    if x.recompute == "selective":  # what else the core is called with: rows and a mask, of all
        others += x.stages * x.c * (keys + n * (1 if x.kind == "bert" else x.s * x.documents))
        others += x.layers * x.is_uneven * 8 * x.a // t
    if x.is_llama and x.recompute != "full":  # cosine and sine of half a head, for all layers
        others += x.stages * n * x.h // x.a * x.wide
    if x.is_ring and x.recompute == "none":  # where its documents begin; the length of a sample
        others += x.stages * 8 * (n * x.documents + x.b * (x.kind == "bert"))
    return x.layers * layer + others


def keys_and_values(x: Shape) -> int:
    """Numbers of k and v that attention keeps in one micro-batch: all tokens of 1/c of the repeated
    heads under Ulysses, else own tokens of all heads. Uneven heads are kept once for each query
    head. A recomputed core keeps its arguments."""
    if x.is_uneven and x.recompute == "none":
        return 2 * x.n * x.h // x.t
    repeats = x.repeats if x.recompute == "none" else 1
    return 2 * x.n * x.keys_width * repeats


class Traffic:
    """Collectives over axes, as tools/layouts/meters.py counts them."""

    def __init__(self) -> None:
        self.calls, self.sent = Counter[str](), Counter[str]()

    def add(self, axis: str, size: int, passes: int, whole: int, times: int = 1) -> None:
        """whole: bytes of the tensor. passes: over a ring."""
        if size > 1 and times:
            self.calls[axis] += times
            self.sent[axis] += times * (passes * (size - 1) * whole // size)


def traffic(x: Shape) -> tuple[Counter[str], Counter[str]]:
    """(calls, bytes sent) by axis, of forward and backward of all micro-batches."""
    found = Traffic()
    (of_layers_1d if x.mode == "1d" else grids.of_layers)(x, found)
    of_context(x, found)
    if x.p > 1:  # each stage sends to the next one, and gradients to the one before
        messages = x.m * (2 * x.stages - x.is_first - x.is_last)
        found.calls["pipeline"] += messages
        found.sent["pipeline"] += messages * x.n * x.h * x.w // (x.r * x.columns)
    ends = "pipeline" if x.p == 2 else "embedding_group"
    for bucket in buckets(x):
        whole = bucket.size * x.wide
        if not x.zero:
            found.add(x.replicas, x.d, 2, whole)
        else:  # reduce-scatter; from stage 2 on in every micro-batch
            found.add(x.replicas, x.d, 1, whole, 1 if x.zero == 1 else x.m)
        own = whole // x.d if x.zero else whole
        found.add(bucket.axis, bucket.ranks, 2, own)
        found.add(ends, bucket.stages, 2, own)
        if x.zero == 3:  # all else than layers once in a step, the last layer once in forward and
            # backward, as its weights stay
            times = {None: 1, x.layers - 1: x.m}.get(bucket.layer, 2 * x.m)
            found.add(x.replicas, x.d, 1, bucket.size * x.w, times)
    return found.calls, found.sent


def of_context(x: Shape, found: Traffic) -> None:
    """The traffic of attention along the context axis, and the figures that count once a sample.

    a2a: q, k and v in one all-to-all, the result in another; their gradients go back as they came.
    p2p: a message of k and v in each step but the last, and of dk and dv, in fp32, in each one.
    """
    if x.c == 1:
        return
    times, stream = x.layers * x.m, x.n * x.h * x.w // x.t
    forwards = 1 if x.recompute == "none" else 2
    key_value = 2 * x.n * (x.h // x.t if x.is_uneven else x.keys_width * x.repeats)
    if x.is_ring:
        messages = times * (x.c - 1) * (forwards + 1)
        found.calls["context"] += messages + times * x.c
        found.sent["context"] += messages * key_value * x.w + times * x.c * key_value * x.wide
    else:
        # Recomputation of the core ends with the kernel.
        results = 3 if x.recompute == "full" else 2
        found.add("context", x.c, 1, stream + key_value * x.w, times * (forwards + 1))
        found.add("context", x.c, 1, stream, times * results)
        # Keys of all rows, for dropout.
        found.add("context", x.c, 1, 8 * x.c * x.n, x.m * x.stages * x.dropout)
    if x.kind == "vit":  # the mean over all tokens, and its gradient
        found.add("context", x.c, 2, x.b * x.h * x.w, 2 * x.m * x.is_last)


def of_layers_1d(x: Shape, found: Traffic) -> None:
    """The traffic of layers, embedding and head of all micro-batches along the tensor axis."""
    add, t, layers, m, stream = found.add, x.t, x.layers, x.m, x.n * x.h * x.w
    scored = x.k if x.kind == "bert" else x.n
    again = 0
    if x.recompute == "full":  # the last sum of a layer only where something after it is kept
        again = 2 if x.dropout or x.post_norm else 1
    of_head, is_text = m * x.is_last, x.kind != "vit"  # whose ends are whole on every rank
    if x.r == 1:
        sums = x.is_first * is_text + (4 + again) * layers
        add("tensor", t, 2, stream, m * sums)
        add("tensor", t, 2, scored * x.h * x.w, of_head * is_text)  # f of the head
    else:
        again_in = 2 if again else 0
        gathers = x.is_first * is_text + (2 + again_in) * layers + (2 + 2) * layers
        scatters = x.is_first * is_text + (2 + again + 2) * layers
        add("tensor", t, 1, stream, m * (gathers + scatters))
        if not is_text:
            add("tensor", t, 1, stream, of_head)
        elif x.kind != "bert":
            # The head; its backward gathers again, but not that of the fused loss.
            add("tensor", t, 1, stream, (2 + x.whole_logits) * of_head)
        else:  # what the encoder returns, and f of the head on masked tokens
            add("tensor", t, 1, stream, of_head)
            add("tensor", t, 2, scored * x.h * x.w, of_head)
    if x.whole_logits:
        add("tensor", t, 1, x.n * x.v * x.w, of_head)
    elif is_text:  # a maximum, then two sums
        add("tensor", t, 2, scored * x.wide, of_head)
        add("tensor", t, 2, 2 * scored * x.wide, of_head)
