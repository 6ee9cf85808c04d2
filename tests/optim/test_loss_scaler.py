import pytest

from megatron.optim.loss_scaler import LossScaler


def test_it_halves_after_an_overflow_and_doubles_after_a_window_without() -> None:
    scaler = LossScaler(scale=8.0, window=3)
    scales = []
    for overflowed in (True, False, False, True, False, False, False, False, False, False):
        scaler.update(overflowed)
        scales.append(scaler.scale)
    assert scales == [4, 4, 4, 2, 2, 2, 4, 4, 4, 8]


def test_it_does_not_fall_below_its_minimum_but_gives_up() -> None:
    scaler = LossScaler(scale=3.0, window=1000, smallest=1.0)
    for expected in (1.5, 1.0):
        scaler.update(True)
        assert scaler.scale == expected
    with pytest.raises(FloatingPointError, match="loss scale 1, and a smaller scale cannot help"):
        scaler.update(True)


def test_a_run_without_scaling_keeps_its_scale_and_stops_at_once() -> None:
    scaler = LossScaler()
    for _ in range(2000):
        scaler.update(False)
    assert scaler.scale == 1.0
    with pytest.raises(FloatingPointError, match="--lr"):
        scaler.update(True)


def test_fp16_starts_high() -> None:
    scaler = LossScaler.dynamic()
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 2.0**17
