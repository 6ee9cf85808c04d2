"""What a training step takes on paper: arithmetic, memory and communication of one rank.

n = b s tokens   h hidden   L layers   v vocabulary   t tensor-parallel size
"""

from benchmarks.cases import Case


def flops(
    case: Case, tensor_parallel: int = 1, granularity: str = "none", *, causal: bool = True
) -> float:
    """Of the matrix products of a step, and of those that the backward pass computes again.

    causal: half of attention's products are left out, as they may be.
    """
    products = case.products(tensor_parallel)
    logits = sum(each.flops for each in products if each.name.startswith("logits"))
    half = sum(each.flops for each in products if each.name.startswith("attention"))
    attention = half if causal else 2 * half
    layers = sum(each.flops for each in products) - logits - half + attention
    # The forward pass is one product of three, or of attention's two of six.
    again = {"none": 0.0, "selective": attention, "full": layers}[granularity] / 3
    return layers + logits + again


def communicated(case: Case, tensor_parallel: int, granularity: str, width: int) -> float:
    """Bytes that a rank sends in a step; width: bytes of a number.

    All-reduces of [n, h]: four a layer, six where layers are computed again (paper, section 3), one
    of the embedding and one of the head. A ring sends every number 2 (t - 1) / t times.
    """
    per_layer = 6 if granularity == "full" else 4
    numbers = (per_layer * case.num_layers + 2) * case.tokens * case.hidden_size
    return 2 * (tensor_parallel - 1) / tensor_parallel * numbers * width


def parameters(case: Case, tensor_parallel: int = 1) -> float:
    """That one rank holds, the vocabulary's padding included."""
    h, layers, t = case.hidden_size, case.num_layers, tensor_parallel
    multiple = case.divisible_by * t
    vocabulary = -(-case.vocab_size // multiple) * multiple
    cut = layers * (12 * h**2 + 7 * h) + vocabulary * h
    return cut / t + layers * 6 * h + case.sequence * h + 2 * h


def memory(case: Case, tensor_parallel: int = 1) -> float:
    """Bytes in fp32, without recomputation: of weights, gradients and Adam's two moments, of what
    layers keep for the backward pass, and of logits and their gradient.

    A layer keeps [n, h] four times around its two norms, and what is cut: q, k, v, the heads, and
    [n, 4h] before and behind GeLU. Attention's probabilities are left out: not every kernel keeps
    them.
    """
    n, h, t = case.tokens, case.hidden_size, tensor_parallel
    kept = case.num_layers * n * h * (4 + 12 / t)
    logits = 2 * n * case.vocab_size / t
    return 4 * (4 * parameters(case, t) + kept + logits)
