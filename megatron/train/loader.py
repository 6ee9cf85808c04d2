"""This rank's samples: sharded over the ranks that read different samples, and prefetched.

Importing this needs no torch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from megatron.data.batch import Batch, Samples, micro_batch_numbers

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh


def shard(lengths: Sequence[int], size: int, mesh: Mesh, name: str) -> Iterator[list[int]]:
    """Yields the text numbers of each batch of this rank, with a progress bar called `name`. Ranks
    of one model get the same numbers, since they compute together.

    lengths: of the texts, in tokens. The longest come first: texts of equal length need little
    padding, and a batch that does not fit in memory fails at once. size: texts per batch.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    own = batches[mesh.copies.rank :: mesh.copies.size]
    is_shown = mesh.is_first and sys.stderr.isatty()  # it would fill a log file
    with tqdm(total=sum(map(len, own)), desc=name, disable=not is_shown) as bar:
        for numbers in own:
            yield numbers
            bar.update(len(numbers))


def prefetch(
    data: Samples,
    starts: range,
    *,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    num_workers: int = 1,
) -> Generator[list[Batch]]:
    """Yields this rank's micro-batches of each step, made while earlier steps are computed.

    starts: the first sample of each step; its stride is the global batch size. num_workers: threads
    that read ahead, each for one of the next steps. An error of the data set is raised in its step.
    The threads end with the iterator, so close an iterator that is left early.
    """

    def read(start: int) -> list[Batch]:
        numbers = micro_batch_numbers(
            start,
            global_batch_size=starts.step,
            micro_batch_size=micro_batch_size,
            data_rank=data_rank,
            data_size=data_size,
        )
        return [data.batch(each).numbered(np.array(each)) for each in numbers]

    ahead = deque[Future[list[Batch]]]()
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")
    try:
        for start in starts:
            ahead.append(threads.submit(read, start))
            if len(ahead) > num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
