"""Attention in blocks beside torch's own in fp64, and dropout beside what its name promises."""

from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.cpu import functional
from megatron.parallel.cpu.functional import (
    BLOCK,
    STEPS,
    draw_kept,
    dropout,
)
from megatron.parallel.cpu.functional import block_attention as attention
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.random import NamedRNGs

BATCH, HEADS, SIZE = 2, 3, 8


def draw(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v as a fused product gives them: views that do not lie side by side."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, length, 3, HEADS, SIZE)
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [each.transpose(1, 2).detach().requires_grad_() for each in qkv.unbind(2)]


def key_mask(length: int) -> Tensor:
    real = torch.tensor([length, 1 + length // 2])
    return (torch.arange(length) < real[:, None])[:, None, None, :]


def document_mask(length: int) -> Tensor:
    document = torch.arange(length) // 30
    return (document[:, None] == document).tril()[None, None]


MASKS = {"none": lambda length: None, "keys": key_mask, "documents": document_mask}


@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_it_equals_torchs(length: int, mask: str) -> None:
    is_causal = mask == "causal"
    visible = None if is_causal else MASKS[mask](length)
    inputs = draw(length)
    d_out = torch.randn(BATCH, HEADS, length, SIZE, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*inputs, visible, is_causal=is_causal)
    gradients = torch.autograd.grad(expected, inputs, d_out)
    found = attention(*inputs, visible, 0.0, is_causal)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    own = torch.autograd.grad(found, inputs, d_out)
    torch.testing.assert_close(own, gradients, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    inputs = draw(BLOCK + 1)
    seen = torch.zeros(BATCH, 1, 1, BLOCK + 1, dtype=torch.bool)
    found = attention(*inputs, seen, 0.0, False)
    assert torch.stack(torch.autograd.grad(found.sum(), inputs)).isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_drops_probabilities_and_keeps_their_mean(is_causal: bool) -> None:
    q, k, _ = draw(BLOCK + 9)
    identity = torch.eye(BLOCK + 9, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    whole = attention(q, k, identity, None, 0.0, is_causal)
    torch.manual_seed(0)
    dropped = attention(q, k, identity, None, 0.25, is_causal)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    seen = whole != 0
    assert kept[seen].double().mean().item() == pytest.approx(0.75, abs=0.02)


def test_gradients_with_dropout_are_those_of_what_was_drawn() -> None:
    def seeded(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attention(*inputs, None, 0.3, True)

    q, k, v = (each[:1, :1].detach().requires_grad_() for each in draw(BLOCK + 3))
    assert torch.autograd.gradcheck(seeded, (q, k, v), fast_mode=True)


def test_in_bf16_it_is_about_as_exact_as_torchs() -> None:
    exact = [each.detach().requires_grad_() for each in draw(256, torch.bfloat16)]
    wide = [each.detach().double().requires_grad_() for each in exact]
    d_out = torch.randn(BATCH, HEADS, 256, SIZE).bfloat16()
    truth = F.scaled_dot_product_attention(*wide, is_causal=True)
    true_gradients = torch.cat(torch.autograd.grad(truth, wide, d_out.double()))

    def error(out: Tensor) -> tuple[float, float]:
        gradients = torch.cat(torch.autograd.grad(out, exact, d_out)).double()
        of_gradients = (gradients - true_gradients).norm() / true_gradients.norm()
        return ((out - truth).norm() / truth.norm()).item(), of_gradients.item()

    theirs = error(F.scaled_dot_product_attention(*exact, is_causal=True))
    ours = error(attention(*exact, None, 0.0, True))
    assert ours[0] < 1.2 * theirs[0]
    assert ours[1] < 1.2 * theirs[1]


@pytest.mark.parametrize(
    ("dtype", "length", "dropout", "is_causal", "is_used"),
    [
        (torch.float32, 64, 0.0, True, True),
        (torch.float32, 64, 0.0, False, False),
        (torch.bfloat16, 64, 0.0, False, True),
        (torch.bfloat16, 520, 0.0, True, False),
        (torch.float32, 520, 0.1, False, True),
    ],
)
def test_where_it_takes_less_time_training_uses_it(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    length: int,
    dropout: float,
    is_causal: bool,
    is_used: bool,
) -> None:
    calls = []

    def spy(*arguments: object) -> Tensor:
        calls.append(arguments)
        return attention(*arguments)

    monkeypatch.setattr(functional, "block_attention", spy)
    core = AttentionCore(NamedRNGs(0, serial_mesh()), dropout, "core").train()
    q, k, v = draw(length, dtype)
    mask = None if is_causal else key_mask(length)
    core(q, k, v, mask, mask is None)
    assert len(calls) == is_used
    with torch.no_grad():
        core.eval()(q, k, v, mask, mask is None)
    assert len(calls) == is_used


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    torch.manual_seed(1)
    kept = draw_kept((999, 1001), p)  # no multiple of what one draw gives
    assert kept.shape == (999, 1001)
    share = 1 - kept.double().mean().item()
    assert abs(share - p) <= 5 * sqrt(p * (1 - p) / kept.numel()) + 0.5 / STEPS
    for dim in (0, 1):  # no row or column is another one's
        lines = kept.double().mean(dim)
        assert lines.std().item() == pytest.approx(sqrt(p * (1 - p) / 1000), rel=0.2, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_expectation_stays_and_the_gradient_is_that_of_what_was_drawn(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    x = torch.ones(400, 500, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.1)
    y.sum().backward()
    values = y.detach().unique().tolist()
    assert values == pytest.approx([0.0, 1 / 0.9], rel=1e-2)
    assert y.double().mean().item() == pytest.approx(1.0, abs=5e-3)
    assert torch.equal(x.grad, y)


def test_a_probability_near_one_keeps_something_finite() -> None:
    assert torch.isfinite(dropout(torch.ones(10**6), 1 - 1e-9)).all()
