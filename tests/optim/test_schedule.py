from math import cos, pi

import pytest

from megatron.config.training import OptimizerConfig
from megatron.optim.schedule import learning_rate

WARMUP, END = 100, 1100
SHAPES = {
    "cosine": lambda progress: (1 + cos(pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def section(style: str, warmup: int = WARMUP) -> OptimizerConfig:
    return OptimizerConfig(lr=1.5e-4, min_lr=1e-5, lr_decay_style=style, lr_warmup_iters=warmup)


@pytest.mark.parametrize("style", SHAPES)
def test_it_warms_up_and_decays_to_the_floor(style: str) -> None:
    config, shape = section(style), SHAPES[style]
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


def test_the_floor_is_reached() -> None:
    for style in ("cosine", "linear"):
        assert learning_rate(section(style), END, END) == pytest.approx(1e-5)


def test_without_warmup_the_first_step_is_all_but_the_peak() -> None:
    assert learning_rate(section("linear", 0), 1, 1000) == pytest.approx(
        1e-5 + 1.4e-4 * 0.999, rel=1e-12
    )


def test_decay_may_end_where_warmup_does() -> None:
    assert learning_rate(section("cosine"), WARMUP, WARMUP) == 1.5e-4
    assert learning_rate(section("cosine"), WARMUP + 1, WARMUP) == pytest.approx(1e-5)
