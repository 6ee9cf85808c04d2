"""Dropout of the CPU against what its name promises."""

from math import sqrt

import pytest
import torch

from megatron.parallel.cpu.fast_dropout import STEPS, draw_kept, dropout


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


def test_draws_follow_the_default_generator() -> None:
    torch.manual_seed(3)
    first, second = draw_kept((64,), 0.5), draw_kept((64,), 0.5)
    torch.manual_seed(3)
    assert torch.equal(draw_kept((64,), 0.5), first)
    assert not torch.equal(first, second)


def test_a_probability_near_one_keeps_something_finite() -> None:
    assert torch.isfinite(dropout(torch.ones(10**6), 1 - 1e-9)).all()
