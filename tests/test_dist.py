"""The pool of ranks on which tests run their functions."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.dist import PATIENCE, Pool, on_ranks


def sum_of_ranks(offset: int) -> torch.Tensor:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return total


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ArithmeticError("told to fail")
    dist.barrier()


def die_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def exit_early() -> None:
    raise SystemExit(2)


def sleep_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(PATIENCE)


@on_ranks("size")
def is_not_the_last(size: int) -> None:
    assert dist.get_rank() < size - 1


def test_results_come_by_rank(gloo: Pool) -> None:
    for world_size in (1, 2, 3, 4):
        expected = float(sum(rank + 2 for rank in range(world_size)))
        assert gloo.run(world_size, sum_of_ranks, 2) == [torch.tensor([expected])] * world_size


@pytest.mark.parametrize(
    ("world_size", "function", "arguments", "found"),
    [
        (3, fail_on_rank, [2], r"(?s) 2 of 3.*ArithmeticError"),
        (2, die_on_rank, [1], " 1 of 2"),
        (1, exit_early, [], "SystemExit: 2"),
        (2, sleep_on_rank, [1], r"\[0, 1\]"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_pool_goes_on(
    gloo: Pool, world_size: int, function: Callable[..., None], arguments: list[int], found: str
) -> None:
    timeout = {"timeout": 2} if function is sleep_on_rank else {}
    with pytest.raises((RuntimeError, TimeoutError), match=found):
        gloo.run(world_size, function, *arguments, **timeout)
    assert len(gloo.run(world_size, sum_of_ranks, 0)) == world_size


def test_a_test_on_ranks_fails_where_one_of_them_does(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="(?s) 1 of 2.*AssertionError"):
        is_not_the_last(gloo=gloo, size=2)
