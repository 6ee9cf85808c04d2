"""One pool of gloo ranks for the session, on which tests run their functions.

The ranks come from a fork server that has imported torch before any thread was started: a plain
fork of a process in which torch has run hangs, and a fresh interpreter takes seconds.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import update_wrapper
from importlib import import_module
from inspect import Parameter, Signature, signature
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.layouts.layout import parse_layout

# Imports that take seconds: torch._dynamo where work is counted, recomputed or compiled, numba in
# the steps of a corpus. Missing ones are left out.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "transformers.modeling_utils", "numba"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert")]
PRELOADED += ["megatron.train.loop", "megatron.train.pretrain", "benchmarks.peers"]
PRELOADED += ["tests.preloaded"]
PATIENCE = 1800.0  # seconds: the one guard against hangs, which no test that passes comes near
_DEATH = "the process died"


@dataclass(frozen=True)
class Job:
    """A function of a module, to be run on one rank of a gloo group."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout: float


@dataclass(frozen=True)
class Answer:
    """The result of a job, or the traceback with which it failed."""

    value: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection


class Pool:
    """At most `size` processes, started when first needed and kept until close()."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[Worker] = []
        self._stores = tempfile.TemporaryDirectory()
        self._calls = 0

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Results of function(*args) on each rank of a fresh gloo group, by rank.

        The function and its arguments are pickled. Where a rank fails, its traceback is raised
        as a RuntimeError, and where ranks take longer than timeout seconds, a TimeoutError names
        them; the ranks of such a call are replaced.
        """
        assert 1 <= world_size <= self.size, f"this pool holds {self.size} ranks, not {world_size}"
        workers = self._start(world_size)
        self._calls += 1
        store = str(Path(self._stores.name) / str(self._calls))
        try:
            for rank, worker in enumerate(workers):
                job = Job(function, args, rank, world_size, store, timeout)
                worker.connection.send_bytes(pickle.dumps(job))
            return _collect(workers, function.__name__, timeout)
        except BaseException:
            self._stop(workers)
            raise

    def close(self) -> None:
        self._stop(self._workers)
        self._stores.cleanup()

    def _start(self, count: int) -> list[Worker]:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours))
        return self._workers[:count]

    def _stop(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = [worker for worker in self._workers if worker not in workers]


def on_ranks(world: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs as a whole on so many ranks of the pool `gloo`, with the arguments that it
    would have here. world: a number, or the name of the argument that is it, or a LAYOUT."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def start(gloo: Pool, **given: Any) -> None:
            size = given[world] if isinstance(world, str) else world
            size = parse_layout(size).ranks if isinstance(size, str) else size
            gloo.run(size, _run_test, test.__module__, test.__name__, given)

        update_wrapper(start, test)
        pool = Parameter("gloo", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = signature(test).parameters.values()
        start.__signature__ = Signature([pool, *parameters])  # type: ignore[attr-defined]
        return start

    return decorate


def _run_test(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(**given)


def _collect(workers: list[Worker], name: str, timeout: float) -> list[Any]:
    """The workers' results, in their order; raises at the first failure."""
    deadline = time.monotonic() + timeout
    ranks: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        waiting = [connection for connection, rank in ranks.items() if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [ranks[connection] for connection in waiting]
            raise TimeoutError(f"{name} still runs on ranks {late} after {timeout} s")
        answers = {ranks[connection]: _receive(connection) for connection in ready}
        _raise_failure(answers, f"{name} on rank {{}} of {len(workers)}")
        results |= {rank: answer.value for rank, answer in answers.items()}
    return [results[rank] for rank in range(len(workers))]


def _receive(connection: Any) -> Answer:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Answer(failure=_DEATH)


def _raise_failure(answers: dict[int, Answer], where: str) -> None:
    """Raise the failure among the answers, a death first: it breaks its peers' connections."""
    failures = [
        (answer.failure != _DEATH, rank, answer.failure) for rank, answer in answers.items()
    ]
    failed = sorted(failure for failure in failures if failure[2] is not None)
    if failed:
        _, rank, failure = failed[0]
        raise RuntimeError(f"{where.format(rank)}:\n{failure}")


def _serve(connection: Connection) -> None:
    """Run jobs until the pool closes the connection."""
    import torch

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while True:
        gc.freeze()  # so that what `_answer` collects is a job's alone, and not all modules
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    """The pickled Answer to a pickled Job.

    A failing rank keeps its process group, so that its peers go on waiting and the first
    failure to arrive is the cause, not a broken connection. SystemExit is a failure too.
    """
    try:
        answer = pickle.dumps(Answer(value=_perform(pickle.loads(request))))
    except BaseException:
        return pickle.dumps(Answer(failure=traceback.format_exc()))
    # A model is a cycle, and keeps its process groups: each has a thread that wakes 100 times a
    # second, and a thousand of them take half of a processor from the tests. Nodes of a graph hold
    # each other, and a collection frees one after another.
    while gc.collect():
        pass
    return answer


def _perform(job: Job) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + 60),  # the pool gives up first
    )
    torch.manual_seed(0)
    result = job.function(*job.arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result
