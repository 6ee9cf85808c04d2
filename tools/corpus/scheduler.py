"""Runs the work of a step in processes of this machine, or on a Dask cluster.

    local         processes of this machine (--workers); Dask is not imported
    slurm         jobs that dask-jobqueue submits (--workers of them)
    tcp://...     any Dask cluster, by the address of its scheduler

Only functions and their arguments are sent; all data is in files that every worker sees.  A worker
that dies is replaced and its work done again, which changes nothing: results are written whole.
"""

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.errors import UsageError
from megatron.libraries import Library, failure

distributed, dask_jobqueue = Library("dask.distributed"), Library("dask_jobqueue")

ATTEMPTS = 3  # in a row in which workers died before any call was done
ANSWER = 10  # seconds in which the scheduler of a cluster has to answer
HEADROOM = 1 << 30  # bytes of a job of Slurm beyond --memory: Python, libraries, the task's input
ROOT = Path(__file__).resolve().parents[2]


# A partial of a function of a module, not of a program.
Calls = Sequence[partial[Any]]
# (number of the call, its result), in the order in which calls end; can be closed.
Results = Generator[tuple[int, Any], None, None]


def run_here(calls: Calls) -> Results:
    for number, call in enumerate(calls):
        yield number, call()


DIED = (
    f"a worker died {ATTEMPTS} times over, as it does when memory runs out; fewer --workers or a "
    "smaller --unit would work"
)


def run_in_pool(workers: int, calls: Calls) -> Results:
    """In processes of this machine; if one dies its pool breaks, and a new pool continues."""
    left, failures = dict(enumerate(calls)), 0
    while left:
        try:
            for number, result in _attempt(workers, left):
                del left[number]
                failures = 0
                yield number, result
        except BrokenProcessPool:
            failures += 1
            if failures == ATTEMPTS:
                raise RuntimeError(DIED) from None


def _attempt(workers: int, calls: dict[int, partial[Any]]) -> Iterator[tuple[int, Any]]:
    # Not fork, which copies the locks of threads.  The server imports the steps' modules once:
    # 0.3 CPU seconds, which dedup's ten stages would spend in each worker; not the program,
    # which a worker runs anew.
    context = multiprocessing.get_context("forkserver")
    program = sys.modules["__main__"].__spec__
    steps = {name for name in sys.modules if name.startswith("tools.")}
    context.set_forkserver_preload(sorted(steps - {program.name if program else ""}))
    others = set(multiprocessing.active_children())
    ready = context.Event()
    with ProcessPoolExecutor(min(workers, len(calls)), context, begin_work, (ready,)) as pool:
        try:
            futures: dict[Future[Any], int] = {
                pool.submit(call): number for number, call in calls.items()
            }
            ready.set()  # not before: a pool that breaks while workers start would hang
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            stopped = not ready.is_set() or not isinstance(error, Exception)
            if stopped:  # waits for the workers' end, not for their calls
                for worker in set(multiprocessing.active_children()) - others:
                    worker.terminate()
            # No call may go on beside the next run; a broken pool has ended its workers.
            is_broken = isinstance(error, BrokenProcessPool)
            pool.shutdown(wait=stopped or not is_broken, cancel_futures=True)
            raise


def begin_work(ready: Any) -> None:
    """Set up a new worker: it waits until the pool has all its work, and ends when the run is
    killed instead of continuing or waiting for work for ever.

    ctrl-C is ignored: it reaches all processes, and the run ends its workers itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore, which a worker leaks at its end

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    ready.wait()


def run_on_dask(client: Any, calls: Calls) -> Results:
    futures = {client.submit(call, pure=False): number for number, call in enumerate(calls)}
    try:
        for future in distributed.as_completed(futures):
            yield futures[future], future.result()
    except distributed.CancelledError:
        raise RuntimeError("the Dask scheduler is gone; the same command goes on") from None
    except Exception as error:
        # Calls that no worker has begun are cancelled.  Nothing can stop the others, which would go
        # on writing beside the next run: they are waited for.
        begun = {key for keys in client.processing().values() for key in keys}
        client.cancel([future for future in futures if future.key not in begun])
        distributed.wait([future for future in futures if future.key in begun])
        if isinstance(error, distributed.KilledWorker):
            raise RuntimeError(DIED) from None
        raise


@contextlib.contextmanager
def open_scheduler(name: str, workers: int, memory: int) -> Iterator[Callable[[Calls], Results]]:
    """A function that runs calls.  It raises the exception of a call that fails, and RuntimeError
    if workers keep dying.  memory: bytes of each job of Slurm."""
    if name == "local":
        yield run_here if workers == 1 else partial(run_in_pool, workers)
        return
    if lack := failure("dask_jobqueue" if name == "slurm" else "dask.distributed"):
        raise UsageError("--scheduler", name, f"local: {lack}")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_slurm(workers, memory)) if name == "slurm" else name
        try:
            client = stack.enter_context(distributed.Client(address, timeout=ANSWER))
        except (OSError, ValueError) as error:  # ValueError: an invalid address
            raise UsageError(
                "--scheduler", name, f"the address of a Dask scheduler that answers ({error})"
            ) from None
        yield partial(run_on_dask, client)


@contextlib.contextmanager
def _slurm(workers: int, memory: int) -> Iterator[Any]:
    """Jobs of one worker each; partition, account and time come from dask-jobqueue's own file."""
    if shutil.which("sbatch") is None:
        allowed = "given on a login node of the cluster, where sbatch is"
        raise UsageError("--scheduler", "slurm", allowed)
    with dask_jobqueue.SLURMCluster(
        cores=1,
        processes=1,
        memory=f"{memory + HEADROOM}B",
        job_script_prologue=[f"export PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH"],
    ) as cluster:
        cluster.scale(jobs=workers)
        yield cluster
