"""The configurations of section 5.1, at the paper's size and in miniature."""

import pytest

from benchmarks.scaling_configurations import (
    BOTH,
    MODEL,
    NUMBER_OF_HEADS,
    STRONG_SCALING,
    Point,
    studies,
)
from tools.planning.parameters import whole
from tools.planning.products import executed_flops
from tools.planning.shape import Shape


def of(study: str, *, is_small: bool = False, ranks: int = 512) -> list[Point]:
    return [each for each in studies(ranks, is_small=is_small) if each.study == study]


def shapes(points: list[Point]) -> list[Shape]:
    return [each.configuration.shape("fp16") for each in points]


def test_weak_scaling_is_that_of_table_1() -> None:
    found = [
        (each.hidden, each.heads, each.layers, each.tensor, round(whole(each) / 1e9, 1))
        for each in shapes(of(MODEL))
    ]
    assert found == [
        (1536, 16, 40, 1, 1.2),
        (1920, 20, 54, 2, 2.5),
        (2304, 24, 64, 4, 4.2),
        (3072, 32, 72, 8, 8.3),
    ]
    for each in shapes(of(MODEL)):
        assert (each.batch, each.micro_batches, each.sequence) == (8, 1, 1024)
        assert (each.padded, each.recompute) == (51200, "full")
        assert each.hidden // each.heads == 96
    assert [each.paper for each in of(MODEL)] == [100, 95, 82, 77]


def test_64_copies_train_on_a_batch_of_512() -> None:
    points = of(BOTH)
    assert [each.configuration.ranks for each in points] == [64, 128, 256, 512]
    assert all(each.batch * each.micro_batches * each.data == 512 for each in shapes(points))
    assert [each.paper for each in points] == [96, 83, 79, 74]


def test_strong_scaling_cuts_one_model_and_the_vocabulary_stays() -> None:
    points = of(STRONG_SCALING)
    assert [each.configuration.ranks for each in points] == [1, 2, 4, 8]
    assert len({executed_flops(each) for each in shapes(points)}) == 1
    assert {each.padded for each in shapes(points)} == {51200}
    assert points[0].configuration.name == of(MODEL)[0].configuration.name


def test_heads_alone_differ() -> None:
    points = of(NUMBER_OF_HEADS)
    found = [(each.heads, each.hidden // each.heads, each.tensor) for each in shapes(points)]
    assert found == [(16, 192, 8), (24, 128, 8), (32, 96, 8)]
    assert len({whole(each) for each in shapes(points)}) == 1
    # What is the same is measured once.
    assert points[-1].configuration.name == of(MODEL)[-1].configuration.name
    assert len({each.configuration.name for each in studies(512, is_small=False)}) == 13


def test_miniature_has_the_proportions_of_table_1() -> None:
    small, large = (shapes(of(MODEL, is_small=each)) for each in (True, False))
    for one, other in zip(small, large, strict=True):
        assert (one.hidden, one.heads) == (other.hidden // 8, other.heads // 2)
        assert one.hidden // one.heads == 24
        assert one.padded == 1600
        share = whole(one) / one.tensor / whole(small[0])
        of_paper = whole(other) / other.tensor / whole(large[0])
        assert share == pytest.approx(of_paper, rel=0.05)
    assert [each.paper for each in of(MODEL, is_small=True)] == [100, 95, 82, 77]


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2), (3, 2), (4, 4), (64, 4)])
def test_heads_in_miniature_are_compared_on_the_ranks_there_are(ranks: int, tensor: int) -> None:
    points = of(NUMBER_OF_HEADS, is_small=True, ranks=ranks)
    assert [each.tensor for each in shapes(points)] == [tensor] * 3
    assert [each.heads for each in shapes(points)] == [8, 12, 16]


def test_every_batch_is_another() -> None:
    configuration = studies(1, is_small=True)[0].configuration
    first, second, again = (configuration.batch(number).tokens for number in (0, 1, 0))
    assert first.shape == (8, 128)
    assert (first == again).all()
    assert (first != second).any()
