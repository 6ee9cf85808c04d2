from dataclasses import replace
from math import cos, pi

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from megatron.config.parse import parse
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.optim.adam import LossScaler
from megatron.optim.schedule import learning_rate

WARMUP, END = 100, 1100
SHAPES = {
    "cosine": lambda progress: (1 + cos(pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def rates_of(style: str, warmup: int = WARMUP) -> OptimizerConfig:
    return OptimizerConfig(lr=1.5e-4, min_lr=1e-5, lr_decay_style=style, lr_warmup_iters=warmup)


@pytest.mark.parametrize("style", SHAPES)
def test_the_rate_warms_up_and_decays_to_the_floor(style: str) -> None:
    config, shape = rates_of(style), SHAPES[style]
    rates = {step: learning_rate(config, step, END) for step in range(1, END + 500)}
    assert rates[1] == pytest.approx(1.5e-4 / WARMUP)
    assert rates[WARMUP // 2] == pytest.approx(0.75e-4)
    assert rates[WARMUP] == 1.5e-4 == max(rates.values())
    for quarter in (0.25, 0.5, 0.75, 1.0):
        expected = 1e-5 + (1.5e-4 - 1e-5) * shape(quarter)
        assert rates[WARMUP + int(quarter * (END - WARMUP))] == pytest.approx(expected)
    assert rates[END] == rates[END + 400]
    decay = [rates[step] for step in range(WARMUP, END + 400)]
    assert decay == sorted(decay, reverse=True)


@pytest.mark.parametrize("warmup", [1, 7, 1000])
def test_warmup_init_equals_torch_schedulers(warmup: int) -> None:
    """LinearLR from a tenth, then CosineAnnealingLR to 0, stepped after each update."""
    steps = 3000
    config = OptimizerConfig(lr=1e-3, min_lr=0, lr_warmup_iters=warmup, lr_warmup_init=1e-4)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=config.lr)
    schedulers = [
        LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=warmup),
        CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=0.0),
    ]
    scheduler = SequentialLR(optimizer, schedulers, milestones=[warmup])
    for update in range(1, steps + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, update, steps) == pytest.approx(expected, rel=1e-9), update
        optimizer.step()
        scheduler.step()


def test_inverse_sqrt_is_that_of_the_transformer_down_to_the_floor() -> None:
    rates = {n: learning_rate(rates_of("inverse-sqrt"), n, END) for n in (100, 400, 900, 10**6)}
    assert rates == pytest.approx({100: 1.5e-4, 400: 0.75e-4, 900: 0.5e-4, 10**6: 1e-5})


@pytest.mark.parametrize(("decay", "start"), [(None, END - 110), (200, END - 200), (END, WARMUP)])
def test_wsd_is_constant_and_then_linear(decay: int | None, start: int) -> None:
    config = replace(rates_of("wsd"), lr_wsd_decay_iters=decay)
    updates = WARMUP, start, (start + END) // 2, END, 2 * END
    rates = [learning_rate(config, update, END) for update in updates]
    assert rates == pytest.approx([1.5e-4, 1.5e-4, 0.8e-4, 1e-5, 1e-5])


def test_warm_up_may_be_nothing_or_all() -> None:
    first = learning_rate(rates_of("linear", 0), 1, 1000)
    assert first == pytest.approx(1e-5 + 1.4e-4 * 0.999, rel=1e-12)
    assert learning_rate(rates_of("cosine"), WARMUP, WARMUP) == 1.5e-4
    assert learning_rate(rates_of("cosine"), WARMUP + 1, WARMUP) == pytest.approx(1e-5)


def fp16(**settings: object) -> LossScaler:
    return LossScaler.of(PrecisionConfig(fp16=True, **settings), torch.float16)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: x overflows, anything else does not."""
    seen = []
    for step in steps:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


# (initial scale, window, hysteresis), steps, the scale after each
DYNAMIC = {
    "halved, and doubled after a window": ("8", 3, 1, "x..x......", [4, 4, 4, 2, 2, 2, 4, 4, 4, 8]),
    "two are borne": ("64", 2, 3, "x.x.", [64, 64, 64, 64]),
    "the third halves, as every further one": ("64", 2, 3, "x.x.x.x", [64] * 4 + [32, 32, 16]),
    "growth gives chances back": ("64", 2, 3, "xxxx..xxx", [64, 64, 32, 16, 16, 32, 32, 32, 16]),
    "overflows within a window add up": ("8", 5, 2, "x...x", [8, 8, 8, 8, 4]),
    "never below the minimum": ("3", 1000, 1, "xxx", [1.5, 1.0, 1.0]),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dynamic_scale(name: str) -> None:
    initial, window, hysteresis, steps, expected = DYNAMIC[name]
    scaler = fp16(initial_loss_scale=initial, loss_scale_window=window, hysteresis=hysteresis)
    assert scales(scaler, steps) == expected


def test_the_scale_of_torch_and_apex_by_flags() -> None:
    """From 2^24, by a factor, after a window of 2000 steps; each overflow lowers it."""
    for factor in (2.0, 4.0):
        words = "--fp16 --initial-loss-scale 2**24 --loss-scale-window 2000 --hysteresis 1"
        words += f" --loss-scale-factor {factor}"
        scaler = LossScaler.of(parse(PrecisionConfig, words.split(), {}), torch.float16)
        found = scales(scaler, "x" + 2000 * ".")
        assert (found[0], found[-2], found[-1]) == (2**24 / factor, 2**24 / factor, 2**24)


def test_overflows_in_a_row_end_a_run() -> None:
    for settings, steps, may_skip in (
        ({"initial_loss_scale": "3", "hysteresis": 1}, "x", True),
        ({"initial_loss_scale": "3", "hysteresis": 1}, "xx", False),  # at the minimum
        ({"max_consecutive_skips": 3}, "xx.xx", False),
        ({"max_consecutive_skips": 3}, "xx.xx.x", True),
        ({"max_consecutive_skips": 3, "loss_scale": 128.0}, "xx.xx", False),
        ({"max_consecutive_skips": 3, "loss_scale": 128.0}, "xx.xx.x", True),
    ):
        scaler = fp16(**settings)
        found = scales(scaler, steps)
        assert scaler.may_skip() == may_skip
        assert "loss_scale" not in settings or set(found) == {128.0}  # a static scale stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_are_not_scaled_and_skip_nothing(dtype: torch.dtype) -> None:
    scaler = LossScaler.of(PrecisionConfig(), dtype)
    assert set(scales(scaler, 2000 * ".")) == {1.0}
    assert not scaler.is_scaling
    assert not scaler.may_skip()


def test_a_scaler_goes_on_from_its_counters() -> None:
    settings = {"initial_loss_scale": "2**10", "loss_scale_window": 4, "hysteresis": 2}
    straight, before, after = fp16(**settings), fp16(**settings), fp16(**settings)
    expected = scales(straight, "x...x.." + "..x.x")
    scales(before, "x...x..")
    after.load(before.counters())
    assert after == before
    assert scales(after, "..x.x") == expected[7:]


def test_scaler_settings_on_resume() -> None:
    saved = fp16(initial_loss_scale="2**10", loss_scale_window=1000)
    scales(saved, "x...")
    static, shorter = fp16(loss_scale=64.0), fp16(loss_scale_window=3, min_loss_scale=2048.0)
    for scaler in (static, shorter):
        scaler.load(saved.counters())
    assert scales(static, "x") == [64.0]
    assert shorter.scale == 2048.0, "no scale is below the minimum"
    assert scales(shorter, ".") == [4096.0]
