"""The optimizer against torch's AdamW and clip_grad_norm_ on the plain model."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.executor import on_device
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, train_step
from tests import plain
from tests.dist import Pool
from tests.tiny import (
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_model,
    tiny_state,
    tiny_weights,
    whole_weights,
)

CPU = torch.device("cpu")
RATES = [1e-3, 2e-3, 1e-3, 5e-4, 1e-4]


def plain_run(
    config: OptimizerConfig,
    rates: Sequence[float],
    optimizer_of: Callable[..., torch.optim.Optimizer] = plain.adamw,
) -> tuple[nn.Module, list[float]]:
    """(the model, losses) after a loop that anyone would write: no buffers, one batch a step."""
    model, losses = plain.GPT2(tiny_weights(tiny_model(serial_mesh())), 4), list[float]()
    optimizer = optimizer_of(model, config)
    for step, rate in enumerate(rates):
        batch = samples(4, first=10 * step)
        loss = plain.summed_loss(model(batch), batch) / float(batch.loss_mask.sum())
        plain.update(optimizer, loss, config.clip_grad, rate)
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    "settings",
    [
        *({"weight_decay": 0.3, "adam_beta2": 0.95, "clip_grad": clip} for clip in (0.0, 0.5, 1e9)),
        {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 0.1, "clip_grad": 0.0},
    ],
)
def test_five_steps_equal_a_plain_loop(settings: dict[str, float]) -> None:
    config = OptimizerConfig(**settings)
    dense, losses = plain_run(config, RATES)
    state = tiny_state(serial_mesh(), optimizer=config)
    for step, rate in enumerate(RATES):
        result = train_step(state, [samples(4, first=10 * step)], rate)
        assert result.loss == pytest.approx(losses[step], rel=1e-12)
        assert result.grad_norm > 0.5, "the clip would not be seen"
    expected = dict(dense.named_parameters())
    for name, weight in whole_weights(state.model).items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-10)


Optimizer = type[torch.optim.Adam] | type[torch.optim.AdamW]


def own_run(tensor_size: int, config: OptimizerConfig) -> dict[str, Tensor]:
    state = tiny_state(mesh_of_ranks(tensor_size), optimizer=config)
    for step, rate in enumerate(RATES[:3]):
        train_step(state, micro_batches(samples(4, first=10 * step), state.mesh, 2), rate)
    return whole_weights(state.model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_three_steps_equal_torch_s_optimizers_by_default(
    gloo: Pool, optimizer: Optimizer, world: int
) -> None:
    """Which decay every parameter, biases and norms too; Adam by a part of the gradient."""
    config = OptimizerConfig(
        weight_decay=1e-2,
        clip_grad=0.5,
        decoupled_weight_decay=optimizer is torch.optim.AdamW,
        decay_biases_and_norms=True,
    )
    expected, _ = plain_run(
        config,
        RATES[:3],
        lambda model, given: optimizer(model.parameters(), weight_decay=given.weight_decay),
    )
    wanted = dict(expected.named_parameters())
    for found in gloo.run(world, own_run, world, config):
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name].detach(), rtol=0, atol=1e-12)


def test_biases_and_norms_do_not_decay() -> None:
    """With gradients of zero, decay is all that moves a weight: by lr x weight decay."""
    state = tiny_state(serial_mesh(), optimizer=OptimizerConfig(weight_decay=0.1))
    before = whole_weights(state.model)
    state.optimizer.step(lr=0.5, unscale=1.0, norm=0.0)
    for name, weight in whole_weights(state.model).items():
        is_vector = name.endswith("bias") or "norm" in name
        factor = 1.0 if is_vector else 1.0 - 0.5 * 0.1
        torch.testing.assert_close(weight, before[name] * factor, rtol=1e-15, atol=0)


def test_the_norm_is_that_before_clipping_and_of_the_mean() -> None:
    state = tiny_state(serial_mesh(), optimizer=OptimizerConfig(clip_grad=0.1))
    batch = samples(2)
    forward_backward(state, [batch], count(state, [batch]))
    expected = state.gradients.squares().sqrt()
    assert train_step(state, [batch], 0.0).grad_norm == pytest.approx(expected.item(), rel=1e-12)
    assert expected > 0.2
    assert state.gradients.squares().sqrt().item() == pytest.approx(0.1, rel=1e-5)


def test_bf16_weights_are_the_rounded_masters() -> None:
    state = tiny_state(serial_mesh(), dtype=torch.bfloat16)
    masters = {each.key: each.local for each in state.optimizer.masters()}
    parameters = dict(state.model.named_parameters())
    assert masters.keys() == parameters.keys()
    start = {name: master.clone() for name, master in masters.items()}
    # Steps too small to be seen in bf16 are not lost: the masters add them up.
    for step in range(3):
        train_step(state, [samples(2, first=step)], 1e-6)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert parameters[name].dtype == torch.bfloat16
        assert torch.equal(parameters[name], master.bfloat16())
        assert not torch.equal(master, start[name])
    still = sum(torch.equal(parameters[name], start[name].bfloat16()) for name in start)
    assert still > 0


def pure_state(clip_grad: float = 0.0) -> TrainState:
    config = OptimizerConfig(weight_decay=0.1, decay_biases_and_norms=True, clip_grad=clip_grad)
    pure = PrecisionConfig(pure_bf16=True)
    return tiny_state(serial_mesh(), optimizer=config, precision=pure, dtype=torch.bfloat16)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_pure_bf16_is_torch_s_adamw_on_a_bf16_model(clip_grad: float) -> None:
    """The same model without buckets, whose gradients are autograd's: the same bits without
    clipping. torch's clipping has a norm and a factor of 8 bits, ours of 53, and rounds once less.
    """
    state, twin = pure_state(clip_grad), tiny_model(serial_mesh(), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.1, fused=True)
    for step, rate in enumerate(RATES[:3]):
        batch = samples(4, first=10 * step)
        result = train_step(state, [batch], rate)
        optimizer.zero_grad()
        scales = 1 / torch.tensor(twin.denominators(batch), dtype=torch.float64)
        twin(on_device(batch, CPU), scales).sum().backward()
        gradients = [each.grad for each in twin.parameters() if each.grad is not None]
        norm = sum(each.double().square().sum() for each in gradients) ** 0.5
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6 if not clip_grad else 1e-2)
        if clip_grad:
            assert result.grad_norm > clip_grad
            nn.utils.clip_grad_norm_(twin.parameters(), clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    found = whole_weights(state.model)
    for name, weight in whole_weights(twin).items():
        if not clip_grad:
            assert torch.equal(found[name], weight), name
        else:
            torch.testing.assert_close(found[name], weight, rtol=2**-6, atol=2e-3)


def test_pure_bf16_holds_eight_bytes_a_weight() -> None:
    state = pure_state()
    train_step(state, [samples(2)], 1e-3)
    kept = list(state.optimizer.tensors())
    assert {each.key.partition(".")[0] for each in kept} == {"exp_avg", "exp_avg_sq"}
    gradients = [bucket.gradients for bucket in state.gradients.buckets]
    tensors = [*state.model.parameters(), *gradients, *(each.local for each in kept)]
    assert {each.dtype for each in tensors} == {torch.bfloat16}
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    assert sum(held.values()) == 8 * sum(map(len, gradients))
