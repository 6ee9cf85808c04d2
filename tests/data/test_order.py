"""The order of an epoch, and of the ranks that share it."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.batch import micro_batches
from megatron.data.order import permute


def epoch(size: int, seed: int, number: int) -> NDArray[np.int64]:
    return permute(np.arange(size), size, seed=seed, epochs=np.full(size, number))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_an_epoch_takes_every_sample_once(size: int) -> None:
    for number in range(3):
        assert np.array_equal(np.sort(epoch(size, 7, number)), np.arange(size))


def test_seeds_and_epochs_have_their_own_orders() -> None:
    orders = [epoch(1000, seed, number) for seed in (0, 1, -1, 2**63) for number in (0, 1)]
    fixed = [np.sum(a == b) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(fixed) < 10  # two random orders agree in one place on average


def test_the_order_is_that_of_this_format_for_ever() -> None:
    """Another order would silently change every run that is resumed."""
    assert epoch(10, 1234, 0).tolist() == [8, 1, 9, 0, 4, 5, 2, 7, 6, 3]


def test_orders_of_few_are_equally_likely() -> None:
    epochs = np.repeat(np.arange(4800), 4)
    orders = permute(np.tile(np.arange(4), 4800), 4, seed=0, epochs=epochs).reshape(4800, 4)
    counts = Counter(map(tuple, orders.tolist()))
    chi_squared = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert len(counts) == 24
    assert chi_squared < 60  # 23 degrees of freedom: above it once in 30,000


def test_any_number_alone_gives_what_all_together_give() -> None:
    """Few are permuted by Python's integers, many as arrays."""
    rng = np.random.default_rng(0)
    for size, seed in ((2**40 + 3, 1), (65_537, -1), (5, 2**63)):
        epochs = np.array([0, 5, 5, 10**6] * 64)
        numbers = np.concatenate([[0, size - 1], rng.integers(0, size, 4 * 64 - 2)])
        together = permute(numbers, size, seed=seed, epochs=epochs)
        alone = [
            permute(numbers[i : i + 1], size, seed=seed, epochs=epochs[i : i + 1])[0]
            for i in range(len(numbers))
        ]
        assert together.tolist() == alone


@pytest.mark.parametrize(("data_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (4, 1)])
def test_a_step_reads_the_same_samples_at_any_layout(data_size: int, micro_batch_size: int) -> None:
    ranks = [
        micro_batches(
            36,
            global_batch_size=12,
            micro_batch_size=micro_batch_size,
            data_rank=rank,
            data_size=data_size,
        )
        for rank in range(data_size)
    ]
    in_order = [number for step in zip(*ranks, strict=True) for batch in step for number in batch]
    assert in_order == list(range(36, 48))
