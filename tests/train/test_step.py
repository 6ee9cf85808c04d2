"""One step: overflow, precision, a batch without a counted token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.optim.loss_scaler import LossScaler
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step
from tests.dist import Pool
from tests.tiny import (
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_section,
    tiny_state,
)


def tensors(state: TrainState) -> dict[str, Tensor]:
    return {piece.key: piece.local.clone() for piece in state.pieces()}


def step(state: TrainState, number: int) -> StepResult:
    return train_step(state, micro_batches(samples(4, first=4 * number), state.mesh, 1), 1e-3)


def overflow_on_one_rank(tensor_size: int, bad: tuple[int, int]) -> tuple[bool, dict[str, float]]:
    """(whether the bad step left all tensors alone, the counters after it and a good one)."""
    mesh = mesh_of_ranks(tensor_size)
    state = tiny_state(mesh)
    state.scaler = LossScaler(scale=1024.0, window=1000)
    step(state, 0)
    before = tensors(state)
    hooks = []
    if (mesh.data.rank, mesh.tensor.rank) == bad:
        weight = state.model.transformer.layers["1"].mlp.up.weight
        hooks.append(weight.register_hook(lambda gradient: gradient + torch.inf))
    step(state, 1)
    for hook in hooks:
        hook.remove()
    kept = all(torch.equal(before[key], each) for key, each in tensors(state).items())
    scale = state.scaler.scale
    step(state, 2)
    moved = not torch.equal(before["model.final_norm.bias"], state.model.final_norm.bias)
    counters = {"scale": scale, "step": state.step, "skipped": state.skipped, "moved": moved}
    return kept, counters | {"samples": state.samples}


@pytest.mark.parametrize(
    ("world", "tensor_size", "bad"),
    [(1, 1, (0, 0)), (2, 2, (0, 1)), (2, 1, (1, 0)), (4, 2, (1, 0))],
)
def test_all_ranks_skip_a_step_when_one_overflows(
    gloo: Pool, world: int, tensor_size: int, bad: tuple[int, int]
) -> None:
    expected = {"scale": 512.0, "step": 3, "skipped": 1, "moved": True, "samples": 12}
    for answer in gloo.run(world, overflow_on_one_rank, tensor_size, bad):
        assert answer == (True, expected)


def test_the_loss_scale_changes_nothing() -> None:
    """A power of two scales gradients without rounding, and the optimizer divides it out."""
    plain, scaled = tiny_state(mesh_of_ranks(1)), tiny_state(mesh_of_ranks(1))
    scaled.scaler = LossScaler(scale=2.0**12, window=1000)
    for number in range(3):
        assert step(plain, number) == step(scaled, number)
    for key, each in tensors(plain).items():
        assert torch.equal(each, tensors(scaled)[key]), key


def test_without_loss_scaling_a_gradient_that_is_not_finite_is_an_error() -> None:
    state = tiny_state(mesh_of_ranks(1), dtype=torch.float32)
    state.model.final_norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        step(state, 0)


def test_a_batch_without_a_counted_token_is_an_error() -> None:
    batch = samples(2)
    batch = replace(batch, loss_mask=0 * batch.loss_mask)
    with pytest.raises(ValueError, match="no token of step 1 counts.*--eod-mask-loss"):
        train_step(tiny_state(mesh_of_ranks(1)), [batch], 1e-3)


def uneven_ranks(tensor_size: int) -> StepResult:
    """One data rank has nothing to count; the others' gradients are the mean all the same."""
    mesh = mesh_of_ranks(tensor_size)
    batch = samples(2)
    batch.loss_mask[1] = 0
    return train_step(tiny_state(mesh), micro_batches(batch, mesh, 1), 1e-3)


def test_a_rank_may_have_no_counted_token(gloo: Pool) -> None:
    expected = uneven_ranks(1)
    for result in gloo.run(2, uneven_ranks, 1):
        assert result.tokens == expected.tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)


def curve(tensor_size: int, dtype: torch.dtype) -> list[float]:
    """Losses of 30 steps on the same 4 samples, which the model learns by heart."""
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype)
    batches = micro_batches(samples(4), state.mesh, 1)
    return [train_step(state, batches, 5e-3).loss for _ in range(30)]


def test_bf16_tracks_fp32(gloo: Pool) -> None:
    """bf16 keeps 8 bits: each loss within 2 %, on a curve that falls by more than half."""
    wide = curve(1, torch.float32)
    assert wide[-1] < 0.5 * wide[0]
    for narrow in [curve(1, torch.bfloat16), *gloo.run(2, curve, 2, torch.bfloat16)]:
        assert narrow == pytest.approx(wide, rel=0.02)
        assert narrow != wide


def test_fp16_learns_with_loss_scaling(gloo: Pool) -> None:
    for losses in [curve(1, torch.float16), *gloo.run(2, curve, 2, torch.float16)]:
        assert losses[-1] < 0.5 * losses[0]


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    state = tiny_state(mesh_of_ranks(1), tiny_section(hidden_dropout=0.5))
    state.model.eval()
    first = step(state, 0).loss
    assert state.model.training
    plain = tiny_state(mesh_of_ranks(1))
    assert first != step(plain, 0).loss
