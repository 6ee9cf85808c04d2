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
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from megatron.errors import UsageError
from megatron.libraries import Library, failure

distributed, dask_jobqueue = Library("dask.distributed"), Library("dask_jobqueue")

ATTEMPTS = 3  # in a row in which workers died before any call was done
ANSWER = 10  # seconds in which the scheduler of a cluster has to answer
HEADROOM = 1 << 30  # bytes of a job of Slurm beyond --memory: Python, libraries, the task's input
ROOT = Path(__file__).resolve().parents[2]


class Call(NamedTuple):
    """A function of a module, not of a program, and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Results = Generator[tuple[int, Any], None, None]


class Scheduler(Protocol):
    def run(self, calls: list[Call]) -> Results:
        """(number of the call, its result), in the order in which calls end; can be closed.

        Raises the exception of a call that fails; RuntimeError if workers keep dying.
        """
        ...


class InProcess:
    """One worker: this process."""

    def run(self, calls: list[Call]) -> Results:
        for number, call in enumerate(calls):
            yield number, call.function(*call.arguments)


DIED = (
    f"a worker died {ATTEMPTS} times over, as it does when memory runs out; fewer --workers or a "
    "smaller --unit would work"
)


class LocalPool:
    """Processes of this machine; if one dies its pool breaks, and a new pool continues."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, calls: list[Call]) -> Results:
        left, failures = dict(enumerate(calls)), 0
        while left:
            try:
                for number, result in self._attempt(left):
                    del left[number]
                    failures = 0
                    yield number, result
            except BrokenProcessPool:
                failures += 1
                if failures == ATTEMPTS:
                    raise RuntimeError(DIED) from None

    def _attempt(self, calls: dict[int, Call]) -> Iterator[tuple[int, Any]]:
        # Not fork, which copies the locks of threads; the server imports the step once for all.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_to_preload(next(iter(calls.values()))))
        workers = min(self._workers, len(calls))
        others = set(multiprocessing.active_children())
        ready = context.Event()
        with ProcessPoolExecutor(workers, context, begin_work, (ready,)) as pool:
            try:
                futures: dict[Future[Any], int] = {
                    pool.submit(call.function, *call.arguments): number
                    for number, call in calls.items()
                }
                ready.set()  # not before: a pool that breaks while workers start would hang
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException as error:
                stopped = not ready.is_set() or not isinstance(error, Exception)
                if stopped:  # waits for the workers' end, not for their calls
                    for worker in set(multiprocessing.active_children()) - others:
                        worker.terminate()
                pool.shutdown(wait=stopped, cancel_futures=True)
                raise


def _to_preload(call: Call) -> list[str]:
    """Modules of the call and of this package; not the program, which a worker runs anew."""
    beside = {name for name in sys.modules if name.startswith(f"{__package__}.")}
    program = sys.modules["__main__"].__spec__
    return sorted((_modules(call) | beside) - {"__main__", program.name if program else None})


def _modules(value: object) -> set[str]:
    """Modules of the functions in a call."""
    if isinstance(value, tuple):
        return set[str]().union(*map(_modules, value))
    return {value.__module__} if callable(value) else set()


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


class DaskCluster:
    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, calls: list[Call]) -> Results:
        futures = {
            self._client.submit(call.function, *call.arguments, pure=False): number
            for number, call in enumerate(calls)
        }
        try:
            for future in distributed.as_completed(futures):
                yield futures[future], future.result()
        except distributed.CancelledError:
            raise RuntimeError("the Dask scheduler is gone; the same command goes on") from None
        except distributed.KilledWorker:
            self._end(list(futures))
            raise RuntimeError(DIED) from None
        except Exception:
            self._end(list(futures))
            raise

    def _end(self, futures: list[Any]) -> None:
        """Cancel calls that no worker has begun, and wait for the others, which nothing can stop:
        they would go on writing beside the next run."""
        begun = {key for keys in self._client.processing().values() for key in keys}
        self._client.cancel([future for future in futures if future.key not in begun])
        distributed.wait([future for future in futures if future.key in begun])


def check_scheduler(name: str) -> None:
    """Raises ValueError, naming the flag, for an unknown scheduler."""
    if name not in ("local", "slurm") and "://" not in name:
        raise UsageError(
            "--scheduler",
            name,
            "local, slurm or the address of a Dask scheduler such as tcp://host:8786",
            works=("--scheduler", "local"),
        )


@contextlib.contextmanager
def open_scheduler(name: str, workers: int, memory: int) -> Iterator[Scheduler]:
    """memory: bytes of each job of Slurm."""
    if name == "local":
        yield InProcess() if workers == 1 else LocalPool(workers)
        return
    if lack := failure("dask_jobqueue" if name == "slurm" else "dask.distributed"):
        works = ("--scheduler", "local")
        raise UsageError("--scheduler", name, f"local: {lack}", works=works)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_slurm(workers, memory)) if name == "slurm" else name
        try:
            client = stack.enter_context(distributed.Client(address, timeout=ANSWER))
        except (OSError, ValueError) as error:  # ValueError: an invalid address
            raise UsageError(
                "--scheduler", name, f"the address of a Dask scheduler that answers ({error})"
            ) from None
        yield DaskCluster(client)


@contextlib.contextmanager
def _slurm(workers: int, memory: int) -> Iterator[Any]:
    """Jobs of one worker each; partition, account and time come from dask-jobqueue's own file."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "--scheduler",
            "slurm",
            "given on a login node of the cluster, where sbatch is",
            works=("--scheduler", "local"),
        )
    with dask_jobqueue.SLURMCluster(
        cores=1,
        processes=1,
        memory=f"{memory + HEADROOM}B",
        job_script_prologue=[f"export PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH"],
    ) as cluster:
        cluster.scale(jobs=workers)
        yield cluster
