import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist import PATIENCE, Pool


def sum_of_ranks(offset: int) -> torch.Tensor:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return total


def threads_and_process() -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(gloo: Pool, world_size: int) -> None:
    expected = float(sum(rank + 2 for rank in range(world_size)))
    assert gloo.run(world_size, sum_of_ranks, 2) == [torch.tensor([expected])] * world_size


def test_ranks_are_processes_of_one_thread_and_are_kept(gloo: Pool) -> None:
    first = gloo.run(2, threads_and_process)
    assert [threads for threads, _ in first] == [1, 1]
    assert len({process for _, process in first} | {os.getpid()}) == 3
    assert gloo.run(2, threads_and_process) == first


def test_the_failing_rank_is_shown_and_the_others_do_not_hang(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)on rank 2 of 3.*fail_on_rank.*told to fail"):
        gloo.run(3, fail_on_rank, 2)
    assert len(gloo.run(3, sum_of_ranks, 0)) == 3


def test_a_dead_rank_is_reported(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="on rank 1 of 2:\nthe process died"):
        gloo.run(2, die_on_rank, 1)
    assert len(gloo.run(2, sum_of_ranks, 0)) == 2


def test_an_exit_is_a_failure(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 2"):
        gloo.run(1, exit_early)


def test_hanging_ranks_are_named(gloo: Pool) -> None:
    with pytest.raises(TimeoutError, match=r"sleep_on_rank still runs on ranks \[0, 1\]"):
        gloo.run(2, sleep_on_rank, 1, timeout=2)
    assert len(gloo.run(2, sum_of_ranks, 0)) == 2
