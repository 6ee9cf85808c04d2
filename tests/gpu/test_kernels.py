"""Kernels that a GPU alone has, beside fp64 on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.optim.adam import FlatWeights, TorchAdam
from megatron.optim.compiled import CompiledAdam
from megatron.parallel import kernels
from megatron.parallel.dropout import fold, head_keys, kept_mask, layer_key, row_keys
from megatron.parallel.fused_softmax import fused_softmax
from megatron.parallel.mesh import ALONE, serial_mesh
from tests.tiny import tiny_state

pytestmark = pytest.mark.gpu
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def eager_on_cpu(device: torch.device) -> Iterator[None]:
    """Functions are compiled on a GPU alone: on a CPU that takes half a minute each."""
    with torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext():
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of norms."""
    wanted = wanted.double()
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_a_product_is_added_to_a_wider_bucket(device: torch.device, dtype: torch.dtype) -> None:
    """On a GPU it is not rounded to the dtype of its factors on the way: 2e-3 in bf16."""
    out_dtype = torch.promote_types(dtype, torch.float32)
    dy, x = (random(96, size, seed=size).to(device, dtype) for size in (48, 64))
    flat = torch.full((48 * 64 + 192,), torch.nan, dtype=out_dtype, device=device)
    out, wanted = flat[64:-128].view(48, 64), dy.cpu().double().T @ x.cpu().double()
    rounded = device.type == "cpu" and dtype in HALF
    tolerance = 4e-3 if rounded else 100 * torch.finfo(out_dtype).eps
    for times, strided in ((1, dy), (2, dy), (3, dy.T.contiguous().T)):
        kernels.add_matmul_(out, strided, x, accumulate=times > 1)
        assert error(out, times * wanted) < tolerance
    assert flat[:64].isnan().all()
    assert flat[-128:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_squares_are_added_up_in_fp64(device: torch.device, dtype: torch.dtype) -> None:
    pieces = [scale * random(size, seed=size) for size, scale in ((2**16, 1e-3), (640, 1.0))]
    pieces = [each.to(dtype) for each in pieces]
    wanted = sum(each.double().square().sum() for each in pieces)
    found = kernels.squares([each.to(device) for each in pieces])
    assert (found.dtype, found.device.type) == (torch.float64, device.type)
    assert float(found) == pytest.approx(
        float(wanted), rel=1e-6 if dtype != torch.float64 else 1e-13
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_added_in_one_order(device: torch.device, dtype: torch.dtype) -> None:
    index, rows = torch.arange(3000) ** 2 % 7, random(3000, 16).to(dtype)
    wanted = torch.zeros(7, 16, dtype=torch.float64).index_add_(0, index, rows.double())
    found = []
    for _ in range(2):
        table = torch.zeros(7, 16, device=device)
        found.append(kernels.add_rows_(table, index.to(device), rows.to(device)))
    assert torch.equal(*found)
    assert error(found[0], wanted) < 1e-5


def test_a_compiled_backward_hands_over_what_a_gpu_computed(device: torch.device) -> None:
    """By handles, which stay on the host."""
    state = tiny_state(serial_mesh(device), dtype=torch.bfloat16)
    buckets = state.gradients
    buckets.start()
    view = next(each for each in buckets.views if each.name.endswith("mlp.up.weight"))
    bias = next(each for each in buckets.views if each.name.endswith("mlp.up.bias"))
    dy, x = (
        random(24, size, seed=size).to(device, torch.bfloat16) for size in view.parameter.shape
    )
    wanted = dy.cpu().double().T @ x.cpu().double()
    for times in (1, 2):
        zero = torch.ops.megatron.add_matmul(view.handle, dy, x).detach()
        assert (zero.device.type, zero.item()) == ("cpu", 0.0)
        assert view.gradient.device.type == device.type
        assert error(view.gradient, times * wanted) < (4e-3 if device.type == "cpu" else 1e-5)
    torch.ops.megatron.add_gradient(bias.handle, dy[0])
    assert torch.equal(bias.gradient, dy[0].float())
    with buckets.backward(is_last=False, is_deferred=True) as deferred:
        torch.ops.megatron.add_matmul(view.handle, dy, x)
    dy.zero_()  # as a graph does with its memory
    buckets.add_deferred(deferred, is_last=True)
    assert error(view.gradient, 3 * wanted) < (4e-3 if device.type == "cpu" else 1e-5)
    buckets.finish()


@pytest.mark.parametrize(
    ("dtype", "of_losses", "of_gradients"),
    [
        (torch.bfloat16, 1e-5, 3e-3),  # losses are of logits as they are rounded
        (torch.float32, 1e-6, 1e-5),
        (torch.float64, 1e-12, 1e-12),
    ],
)
def test_the_softmax_of_the_loss_is_fused(
    device: torch.device, dtype: torch.dtype, of_losses: float, of_gradients: float
) -> None:
    """Padded columns may hold anything, and get no gradient."""
    vocabulary, rows = 101, 40
    logits = (4 * random(rows, 104)).to(dtype)
    logits[:, vocabulary:] = 1e4
    labels, scales = torch.arange(rows) * 7 % vocabulary, random(rows, seed=1).abs()
    real = logits[:, :vocabulary].double().requires_grad_()
    losses = F.cross_entropy(real, labels, reduction="none")
    (losses * scales).sum().backward()
    found = fused_softmax(logits.to(device), labels.to(device), ALONE, vocabulary)
    assert error(found.losses, losses.detach()) < of_losses
    gradient = found.gradient(scales.to(device, torch.promote_types(dtype, torch.float32)))
    assert gradient.dtype == dtype
    assert real.grad is not None
    assert error(gradient[:, :vocabulary], real.grad) < of_gradients
    assert not gradient[:, vocabulary:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [TorchAdam, CompiledAdam])
def test_a_list_of_weights_is_updated(
    device: torch.device, dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    config, sizes = OptimizerConfig(), (64, 640, 6400)
    segments = [
        FlatWeights(decay, *(random(size).to(device, dtype) for _ in range(2)), *moments, half)
        for decay, size in zip((0.1, 0.1, 0.0), sizes, strict=True)
        for moments in [[torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]]
        for half in [torch.zeros(size, dtype=torch.bfloat16, device=device)]
    ]
    plain = [random(size).requires_grad_() for size in sizes]
    groups = [{"params": plain[:2], "weight_decay": 0.1}, {"params": plain[2:], "weight_decay": 0}]
    betas = config.adam_beta1, config.adam_beta2
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=betas, eps=config.adam_eps)
    adam = make(segments, config)
    for step, factor in enumerate((1.0, 0.5, 0.0, 0.25)):  # of 0: a step that is skipped
        for segment, each in zip(segments, plain, strict=True):
            segment.gradient.copy_(gradient := random(len(each), seed=step) / (factor > 0))
            each.grad = factor * gradient
        adam.step(1e-2, torch.full((), factor, dtype=torch.float64, device=device))
        if factor:  # one for all steps would change nothing
            theirs.step()
    for segment, each in zip(segments, plain, strict=True):
        assert error(segment.weight, each.detach()) < 100 * torch.finfo(dtype).eps
        if make is CompiledAdam:
            assert torch.equal(segment.half, segment.weight.bfloat16())


def test_masks_of_dropout_are_those_of_a_cpu(device: torch.device) -> None:
    """Bit for bit: of the stream and of attention's probabilities."""
    key, masks = layer_key(1234, "layer"), []
    for where in (torch.device("cpu"), device):
        rows = row_keys(torch.arange(2**40, 2**40 + 2).to(where), torch.arange(8).to(where))
        heads = head_keys(rows, key, range(4, 8), 2)
        masks.append(
            [
                kept_mask(keys, first, 9, 0.3, torch.bool).cpu()
                for keys in (fold(key, rows), heads.flatten())
                for first in (0, 3)
            ]
        )
    for ours, theirs in zip(*masks, strict=True):
        assert torch.equal(ours, theirs)
        assert 0.5 < ours.double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_shares_heads(
    device: torch.device, dtype: torch.dtype, groups: int, is_causal: bool
) -> None:
    """By a mask where it is not causal."""
    b, s, d = 2, 48, 16
    whole = [random(b, heads, s, d, seed=heads).to(dtype) for heads in (4, groups, groups + 1)]
    whole[2] = whole[2][:, :groups]
    mask = (
        None if is_causal else (torch.arange(s)[None] <= 2 + torch.arange(s)[:, None])[None, None]
    )
    dy, found = random(b, 4, s, d, seed=9), []
    for where, dtype_there in ((torch.device("cpu"), torch.float64), (device, dtype)):
        own = [each.to(where, dtype_there).requires_grad_() for each in whole]
        own_mask = None if mask is None else mask.to(where)
        y = kernels.attention(*own, own_mask, 0.0, is_causal)
        y.backward(dy.to(y))
        found.append([y.detach(), *(each.grad for each in own)])
    for theirs, ours in zip(*found, strict=True):
        assert error(ours, theirs) < (2e-2 if dtype in HALF else 1e-5)
