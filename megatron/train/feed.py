"""The batches of a run's steps, each made while the step before it is computed; needs no torch."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from megatron.data.batch import Batch, Samples, micro_batches


def feed(
    data: Samples, starts: range, *, micro_batch_size: int, data_rank: int, data_size: int
) -> Generator[list[Batch]]:
    """This rank's micro-batches of step after step; what the data set raises is raised in its step.

    starts: the first sample of each step; its stride is the global batch size. One thread is one
    step ahead. It ends with the iterator, so close an iterator that is left early.
    """

    def read(start: int) -> list[Batch]:
        numbers = micro_batches(
            start,
            global_batch_size=starts.step,
            micro_batch_size=micro_batch_size,
            data_rank=data_rank,
            data_size=data_size,
        )
        return [data.batch(each) for each in numbers]

    with ThreadPoolExecutor(1, thread_name_prefix="feed") as thread:
        ahead: Future[list[Batch]] | None = None
        for start in starts:
            due, ahead = ahead, thread.submit(read, start)
            if due is not None:
                yield due.result()
        if ahead is not None:
            yield ahead.result()
