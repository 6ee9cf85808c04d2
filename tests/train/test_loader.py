"""Prefetching: step by step, a step ahead for each worker, errors where they belong."""

import threading
from collections.abc import Generator
from contextlib import closing

import numpy as np
import pytest

from megatron.data.batch import TextBatch
from megatron.train.inputs import prefetch
from tests.dist import PATIENCE


class Numbers:
    """Samples of one token, their number; tells of each batch that is made, and of the end."""

    samples_per_epoch = 10**9

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.made: list[list[int]] = []
        self.changed = threading.Condition()

    def batch(self, numbers: range) -> TextBatch:
        with self.changed:
            self.made.append(list(numbers))
            self.changed.notify_all()
        if self.broken in numbers:
            raise ValueError(f"sample {self.broken} is broken")
        return TextBatch(tokens=np.array(numbers)[:, None])

    def wait_for(self, made: list[list[int]]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: sorted(self.made) == made, timeout=PATIENCE)


def is_running() -> bool:
    return any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def read(data: Numbers, starts: range, rank: int = 0, size: int = 1) -> list[list[list[int]]]:
    """The numbers of the samples, which each batch knows, too."""
    steps = list(prefetch(data, starts, micro_batch_size=2, data_rank=rank, data_size=size))
    assert all((batch.numbers == batch.tokens[:, 0]).all() for step in steps for batch in step)
    return [[batch.tokens[:, 0].tolist() for batch in step] for step in steps]


def prefetched(data: Numbers, stop: int, workers: int) -> Generator[list[TextBatch]]:
    """Steps of two samples, by one rank."""
    one = {"micro_batch_size": 2, "data_rank": 0, "data_size": 1}
    return prefetch(data, range(0, stop, 2), **one, num_workers=workers)


def test_steps_hold_the_micro_batches_of_this_rank() -> None:
    assert read(Numbers(), range(4, 12, 4)) == [[[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert read(Numbers(), range(4, 12, 4), rank=1, size=2) == [[[6, 7]], [[10, 11]]]
    assert read(Numbers(), range(4, 4, 4)) == []
    assert not is_running()


@pytest.mark.parametrize("workers", [1, 3])
def test_each_worker_makes_one_of_the_next_steps(workers: int) -> None:
    data = Numbers()
    with closing(prefetched(data, 100, workers)) as steps:
        assert data.made == []
        for step in range(2):
            assert next(steps)[0].tokens[:, 0].tolist() == [2 * step, 2 * step + 1]
            made = [[start, start + 1] for start in range(0, 2 * (step + workers) + 1, 2)]
            assert data.wait_for(made)
        assert is_running()
    assert not is_running()
    assert len(data.made) == workers + 2


def test_workers_read_side_by_side_and_steps_keep_their_order() -> None:
    """Each of the first steps is made only when all of them are being made."""
    together = threading.Barrier(3)

    class Slow(Numbers):
        def batch(self, numbers: range) -> TextBatch:
            if numbers[0] < 6:
                together.wait(timeout=PATIENCE)
            return super().batch(numbers)

    steps = prefetched(Slow(), 10, 3)
    assert [step[0].tokens[0, 0] for step in steps] == [0, 2, 4, 6, 8]
    assert not is_running()


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_of_the_data_set_is_raised_in_its_step(workers: int) -> None:
    steps = prefetched(Numbers(broken=5), 100, workers)
    assert [next(steps)[0].tokens[0, 0] for _ in range(2)] == [0, 2]
    with pytest.raises(ValueError, match="5"):
        next(steps)
    assert not is_running()


def test_what_is_broken_after_the_last_step_is_not_read() -> None:
    assert len(read(Numbers(broken=4), range(0, 4, 2))) == 2
