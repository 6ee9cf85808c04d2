import pytest
import torch

from megatron.config.training import PrecisionConfig
from megatron.optim.loss_scaler import LossScaler


def fp16(**settings: object) -> LossScaler:
    return LossScaler.of(PrecisionConfig(fp16=True, **settings), torch.float16)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: x overflows, anything else does not."""
    seen = []
    for step in steps:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


def test_it_halves_after_an_overflow_and_doubles_after_a_window_without() -> None:
    scaler = fp16(initial_loss_scale="8", loss_scale_window=3, hysteresis=1)
    assert scales(scaler, "x..x......") == [4, 4, 4, 2, 2, 2, 4, 4, 4, 8]


def test_hysteresis_bears_overflows_until_the_scale_grows_again() -> None:
    scaler = fp16(initial_loss_scale="64", loss_scale_window=2, hysteresis=3)
    assert scales(scaler, "x.x.") == [64, 64, 64, 64], "two are borne"
    assert scales(scaler, "x.x") == [32, 32, 16], "the third halves, and so does every further one"
    assert scales(scaler, "..") == [16, 32], "a window without gives all chances back"
    assert scales(scaler, "xxx") == [32, 32, 16]


def test_overflows_apart_within_one_window_add_up() -> None:
    scaler = fp16(initial_loss_scale="8", loss_scale_window=5, hysteresis=2)
    assert scales(scaler, "x...x") == [8, 8, 8, 8, 4]


def test_it_does_not_fall_below_its_minimum_and_skips_no_step_there() -> None:
    scaler = fp16(initial_loss_scale="3", hysteresis=1)
    for expected in (1.5, 1.0):
        assert scaler.may_skip()
        assert scales(scaler, "x") == [expected]
    assert not scaler.may_skip()


def test_the_last_of_the_skips_in_a_row_is_not_skipped() -> None:
    for scaler in (fp16(max_consecutive_skips=3), fp16(max_consecutive_skips=3, loss_scale=128.0)):
        scales(scaler, "xx.xx")
        assert not scaler.may_skip()
        scales(scaler, ".x")
        assert scaler.may_skip()


def test_a_static_scale_stays() -> None:
    scaler = fp16(loss_scale=128.0)
    assert set(scales(scaler, "xx" + 2000 * ".")) == {128.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_are_not_scaled_and_skip_nothing(dtype: torch.dtype) -> None:
    scaler = LossScaler.of(PrecisionConfig(), dtype)
    assert set(scales(scaler, 2000 * ".")) == {1.0}
    assert not scaler.is_scaling
    assert not scaler.may_skip()


def test_fp16_starts_high_and_is_patient() -> None:
    scaler = fp16()
    assert scaler.is_scaling
    assert scales(scaler, 1000 * ".")[-2:] == [2.0**16, 2.0**17]


def test_it_goes_on_from_its_counters() -> None:
    settings = {"initial_loss_scale": "2**10", "loss_scale_window": 4, "hysteresis": 2}
    straight, before, after = fp16(**settings), fp16(**settings), fp16(**settings)
    expected = scales(straight, "x...x.." + "..x.x")
    scales(before, "x...x..")
    after.load(before.counters())
    assert after == before
    assert scales(after, "..x.x") == expected[7:]


def test_settings_come_from_the_command_line_and_not_from_the_checkpoint() -> None:
    saved = fp16(initial_loss_scale="2**10", loss_scale_window=1000)
    scales(saved, "x...")
    static, shorter = fp16(loss_scale=64.0), fp16(loss_scale_window=3, min_loss_scale=2048.0)
    for scaler in (static, shorter):
        scaler.load(saved.counters())
    assert scales(static, "x") == [64.0]
    assert shorter.scale == 2048.0, "no scale is below the minimum"
    assert scales(shorter, ".") == [4096.0]
