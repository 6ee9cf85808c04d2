"""LayerNorm, softmax and the loss are computed in fp32, or in the input's dtype where it is wider,
and so are gradients that are sums over tokens.

Each is compared with fp64 on the same rounded inputs. Allowed is one rounding of the result to its
dtype, and beside it, since fp32 has its own, FEW roundings of the dtype that is computed in. In
half precision the same formula step by step has to fail that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel import dropout as dropouts
from megatron.parallel import kernels
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.dropout import BLOCK, head_keys, row_keys
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import (
    AttentionCore,
    LayerNorm,
    PositionEmbedding,
    RMSNorm,
    VocabParallelEmbedding,
)
from megatron.parallel.layers_llama import RotaryEmbedding, rotate
from megatron.parallel.mesh import serial_mesh
from tests import plain
from tests.dist import Pool
from tests.tiny import mesh_of_ranks

CPU = torch.device("cpu")
FEW = 32
HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32, torch.float64]
BY_CPU_KERNELS = pytest.mark.skipif(not kernels.use_cpu_kernels, reason="torch's are less exact")
LARGE = {torch.float16: 30_000.0, torch.bfloat16: 30_000.0}  # the sum of three overflows fp16


def excess(result: Tensor, expected: Tensor, size: Tensor | float, wide: torch.dtype) -> float:
    """The largest error, where 1 is what is allowed.

    size: of the terms that the result is a sum of, which is what FEW roundings are relative to.
    """
    own = torch.finfo(result.dtype)
    one = expected.abs() * own.eps / 2 + own.smallest_normal * own.eps
    few = FEW * torch.finfo(wide).eps * torch.as_tensor(size, dtype=torch.float64)
    return ((result.double() - expected).abs() / (one + few)).max().item()


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_cpu_kernels_are_used_where_they_are_there() -> None:
    assert kernels.use_cpu_kernels == Path(kernels.__file__).with_name("cpu").is_dir()


# Norms


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The formula, each step rounded to the dtype of x."""
    centred = x - x.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * weight + bias


def norm_case(
    kind: type[LayerNorm] | type[RMSNorm], dtype: torch.dtype, offset: float, spread: float
) -> tuple[Any, Tensor]:
    norm = kind(serial_mesh(), 256, epsilon=1e-5)
    materialize(norm, device=CPU, dtype=dtype, seed=None)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters(), 1):
            parameter.copy_((seed == 1) + 0.1 * random(seed, 256))
    return norm, (offset + spread * random(3, 512, 256)).to(dtype).requires_grad_()


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (30_000.0, 1_000.0), (0.0, 1e-3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype, offset: float, spread: float) -> None:
    norm, x = norm_case(LayerNorm, dtype, offset, spread)
    weight, bias = norm.weight.double(), norm.bias.double()
    expected = layer_norm(x.double(), weight, bias)
    # The mean that is subtracted from x is as inexact as x is large.
    size = ((expected - bias).abs() + weight.abs()) * (1 + offset / spread) + bias.abs()
    assert excess(norm(x), expected, size, wide_of(dtype)) <= 1
    if dtype in HALF:
        narrow = layer_norm(x, norm.weight, norm.bias)
        assert not excess(narrow, expected, size, torch.float32) <= 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(LayerNorm, each, marks=BY_CPU_KERNELS) for each in HALF),
        *((LayerNorm, each) for each in DTYPES[2:]),
        *((RMSNorm, each) for each in DTYPES),
    ],
)
def test_gradients_of_norms(kind: type[LayerNorm] | type[RMSNorm], dtype: torch.dtype) -> None:
    """Those of weight and bias are sums over 512 tokens."""
    norm, x = norm_case(kind, dtype, 0.0, 1.0)
    leaves = [x, *norm.parameters()]
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    dy = random(4, 512, 256).to(dtype)
    found = norm(x)
    expected = layer_norm(*doubles) if kind is LayerNorm else plain.rms_norm(*doubles)
    found.backward(dy)
    expected.backward(dy.double())
    assert kind is LayerNorm or excess(found, expected, expected.abs(), wide_of(dtype)) <= 1
    terms = dy.double().abs().sum(0)  # normalised inputs are below 5
    sizes = [4 * 5.0, 5 * terms, terms][: len(leaves)]
    for leaf, double, size in zip(leaves, doubles, sizes, strict=True):
        assert excess(leaf.grad, double.grad, size, wide_of(dtype)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_heads(dtype: torch.dtype) -> None:
    cos, sin = RotaryEmbedding(8)(torch.arange(50)[None], dtype)
    x = random(6, 1, 2, 50, 8).to(dtype).requires_grad_()
    one, two = x.detach().double().chunk(2, dim=-1)
    c, s = cos.double(), sin.double()
    found, dy = rotate(x, cos, sin), random(7, 1, 2, 50, 8).to(dtype)
    found.backward(dy)
    d_one, d_two = dy.double().chunk(2, dim=-1)
    for result, expected in (
        (found, torch.cat([one * c - two * s, two * c + one * s], dim=-1)),
        (x.grad, torch.cat([d_one * c + d_two * s, d_two * c - d_one * s], dim=-1)),
    ):
        assert excess(result, expected, 2 * 5.0, wide_of(dtype)) <= 1


# Embeddings


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_embeddings(dtype: torch.dtype) -> None:
    """A row's is a sum over 2048 tokens, of gradients that have one sign."""
    mesh = serial_mesh()
    for layer in (
        VocabParallelEmbedding(mesh, 3, 16, divisible_by=1, std=1.0),
        PositionEmbedding(mesh, 3, 16, std=1.0),
    ):
        materialize(layer, device=CPU, dtype=dtype, seed=0)
        index = torch.arange(2048) % 2
        dy = (1 + 0.1 * random(5, 2048, 16)).to(dtype)
        layer(index).backward(dy)
        expected = torch.zeros(3, 16, dtype=torch.float64).index_add_(0, index, dy.double())
        assert layer.weight.grad.dtype == dtype
        assert excess(layer.weight.grad, expected, expected, wide_of(dtype)) <= 1


# Softmax, in attention


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
    """The formula, each step rounded to the dtype of q; kept: factors of dropout."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) * kept) @ v


def attention_case(dtype: torch.dtype, large: bool, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [2, 3, s, 16]; with large, scores near 2^18 whose differences fp32 still holds.

    fp16 would overflow at 2^16, and bf16 would round all scores to the same number.
    """
    q, k, v = (random(seed, 2, 3, length, 16) for seed in range(3))
    if large:
        q, k = ((2 * each).round().clamp(-2, 2) / 2 for each in (q, k))
        q[..., 0] = k[..., 0] = 1024.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def documents(length: int) -> Tensor:
    """The mask [2, 1, s, s] of samples of two and three documents."""
    starts = torch.zeros(2, length, dtype=torch.int64)
    starts[0, 17:], starts[1, 5:], starts[1, 30:] = 17, 5, 30
    return plain.document_mask(starts)


@pytest.mark.parametrize(
    ("dropout", "in_blocks"),
    [(0.0, False), pytest.param(0.0, True, marks=BY_CPU_KERNELS), (0.5, False)],
)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(
    dtype: torch.dtype, large: bool, is_cut: bool, dropout: float, in_blocks: bool
) -> None:
    """One rounding of the probabilities too: they are the softmax's result, and meet v rounded."""
    n = BLOCK + 8 if in_blocks else 40
    q, k, v = attention_case(dtype, large, n)
    q.requires_grad_(in_blocks)  # where that pays, which tests of their own say
    core = AttentionCore(serial_mesh(), 1, dropout, "core").train()
    rows = row_keys(torch.arange(2), torch.arange(n))
    mask = documents(n) if is_cut else None
    result = core(q, k, v, mask, not is_cut, rows)
    result, q = result.detach(), q.detach()
    keys = head_keys(rows, core.key, range(3), 2).flatten()
    ones = torch.ones(len(keys), n, dtype=torch.float64)
    kept = dropouts.dropout(ones, keys, dropout).view(2, 3, n, n)
    mask = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
    expected = attend(q.double(), k.double(), v.double(), mask, kept)
    terms = attend(q.double(), k.double(), v.double().abs(), mask, kept)
    wide = wide_of(dtype)
    probabilities = torch.finfo(dtype).eps / 2 / (FEW * torch.finfo(wide).eps)
    assert excess(result, expected, terms * (1 + probabilities), wide) <= 1
    if dtype in HALF and large:
        narrow = attend(q, k, v, mask, kept.to(dtype))
        assert not excess(narrow, expected, terms * (1 + probabilities), wide) <= 1


# Loss


def check_loss(dtype: torch.dtype, spread: float) -> None:
    axis = mesh_of_ranks(dist.get_world_size() if dist.is_initialized() else 1).tensor
    whole, labels = (spread * random(0, 64, 128)).to(dtype), torch.arange(64)
    double = whole.double().clone().requires_grad_()
    expected = F.cross_entropy(double, labels, reduction="none")
    expected.sum().backward()
    own = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(own, labels, axis, 128)
    losses.sum().backward()
    wide = wide_of(dtype)
    assert losses.dtype == wide
    assert excess(losses, expected.detach(), 1 + expected.detach(), wide) <= 1
    gradient = double.grad.chunk(axis.size, 1)[axis.rank]
    # Loss and largest logit cancel in the exponent, where their size is what is rounded.
    assert excess(own.grad, gradient, 1.0, wide) <= 1
    if dtype in HALF:
        narrow = -(whole - whole.logsumexp(1, keepdim=True))[torch.arange(64), labels]
        assert not excess(narrow.float(), expected.detach(), 1 + expected.detach(), wide) <= 1


def check_losses() -> None:
    for dtype in DTYPES:
        for spread in (1.0, 1e4):
            check_loss(dtype, spread)


def test_the_loss(gloo: Pool) -> None:
    check_losses()
    gloo.run(2, check_losses)
