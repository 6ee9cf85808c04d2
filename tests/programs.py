"""Runs of a pretraining program as processes of their own, to be killed and started again.

They come from the fork server of tests/dist.py, so that a start takes a tenth of a second.
"""

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from operator import not_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from megatron.train.metrics import read_metrics
from tests.data.samples import write_data
from tests.dist import PATIENCE, PRELOADED

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16"
REST = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --split 1,1,0 --no-bf16"
REST += " --eval-iters 2"  # 100 by default, which take longer than all the rest


class Run:
    """The processes of one start of the program, one a rank, and what they print."""

    def __init__(self, processes: list[BaseProcess], logs: list[Path]) -> None:
        self.processes = processes
        self.logs = logs

    def is_alive(self) -> bool:
        """Whether no rank has ended yet."""
        return all(process.exitcode is None for process in self.processes)

    def wait(self, timeout: float = PATIENCE, ranks: Sequence[int] | None = None) -> list[int]:
        """The exit codes of these ranks, or all; TimeoutError with what they printed if one still
        runs."""
        deadline, codes = time.monotonic() + timeout, []
        for process in self.processes if ranks is None else [self.processes[r] for r in ranks]:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"still running after {timeout} s:\n{self.text()}")
            codes.append(process.exitcode)
        return codes

    def wait_for(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Until the condition holds; fails where a process ends or the time is up before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.text()
            assert self.is_alive(), self.text()
            time.sleep(0.01)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            # The fork server reaps a rank before it says that it has ended.
            with suppress(ProcessLookupError):
                if self.processes[rank].exitcode is None:
                    os.kill(pid, number)

    def text(self, rank: int | None = None) -> str:
        """The output of a rank, or of all ranks one after another."""
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text(errors="replace") for log in logs if log.exists())


def some_data(folder: Path) -> Path:
    """A data set of random tokens, made when it is first asked for."""
    prefix = folder / "some_text_document"
    if not prefix.with_name(f"{prefix.name}.idx").exists():
        numbers = np.random.default_rng(0)
        write_data(prefix, [[*numbers.integers(1, 90, 200), 0] for _ in range(8)])
    return prefix


@contextmanager
def meeting_place(agent: bool = False) -> Iterator[dict[str, str]]:
    """MASTER_ADDR and MASTER_PORT of a run, which nobody else can take meanwhile.

    agent: the store is kept here, as torchrun's agent keeps it; else rank 0 keeps it, at a port
    that is bound here but not listened at, so that SO_REUSEADDR lets rank 0 bind it, too.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if agent:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield address | {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield address | {"MASTER_PORT": str(reserved.getsockname()[1])}


@contextmanager
def start_ranks(
    target: Callable[[], object],
    ranks: Sequence[int],
    world: int,
    folder: Path,
    *,
    agent: bool = False,
) -> Iterator[Run]:
    """Processes that run `target`, one for each of `ranks`, in the environment of a launcher; what
    still runs at the end is killed. folder: of the logs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_address
    logs = [folder / f"rank_{number}.log" for number in range(len(ranks))]
    processes: list[BaseProcess] = []
    with meeting_place(agent) as place:
        for rank, log in zip(ranks, logs, strict=True):
            log.unlink(missing_ok=True)  # of a run before
            environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            environ |= {"LOCAL_WORLD_SIZE": str(world), **place}
            environ = environ if world > 1 else {}
            processes.append(context.Process(target=_main, args=(target, environ, log, server)))
            processes[-1].start()
        try:
            yield Run(processes, logs)
        finally:
            for process in processes:
                process.kill()
                process.join()


def pretrain(
    words: str,
    *,
    world: int = 1,
    folder: Path,
    before: Callable[[], None] | None = None,
    program: str = "pretrain_gpt2",
    data: Path | None = None,
    shape: str = SHAPE,
) -> AbstractContextManager[Run]:
    """The program with these flags on `world` ranks; what still runs at the end is killed.

    folder: of the logs, and of a data set where no other one is given. before:
    called in each process first, to break something. shape: the flags of the model's shape.
    """
    has_files = not {"--mock-data", "--dataset-name"} & set(words.split())
    arguments = arguments_of(words, data or (some_data(folder) if has_files else folder), shape)
    target = partial(_program, program, arguments, before)
    return start_ranks(target, range(world), world, folder)


def finished(words: str, *, world: int = 1, code: int = 0, **options: Any) -> str:
    """Run to the end; returns the first rank's text. Fails where a rank has another status, or one
    prints a traceback. options: see `pretrain`."""
    with pretrain(words, world=world, **options) as run:
        assert run.wait() == [code] * world, run.text()
        assert "Traceback" not in run.text()
        return run.text(0)


def run_ranks(target: Callable[[], object], world: int, folder: Path) -> str:
    """The target to its end on so many ranks; returns the first rank's text. folder: of the
    logs."""
    with start_ranks(target, range(world), world, folder) as run:
        assert run.wait() == [0] * world, run.text()
        return run.text(0)


def run_script(file: Path, *words: object, world: int = 1, folder: Path) -> str:
    """See `run_ranks`: a script, as its user starts it."""
    return run_ranks(partial(_script, file, [*map(str, words)]), world, folder)


def run_command(words: Sequence[str], folder: Path, accepts: Callable[[int], bool] = not_) -> None:
    """The command to its end, of which the first word is a Python or torchrun; fails unless the
    status of each rank is accepted. folder: of the logs."""
    program, *rest, world = Path(words[0]).name, *words[1:], 1
    if "torch.distributed.run" in rest:
        program, rest = "torchrun", rest[rest.index("--nproc-per-node") :]
    if program == "torchrun":
        assert rest[0] == "--nproc-per-node"
        world, rest = int(rest[1]), rest[2:]
    else:
        assert program.startswith("python"), words
    with start_ranks(partial(run_python, rest), range(world), world, folder, agent=True) as run:
        assert all(map(accepts, run.wait())), f"{words}\n{run.text()[-5000:]}"


def _script(file: Path, words: Sequence[str]) -> None:
    sys.argv = [str(file), *words]
    sys.path.insert(0, str(file.parent))  # where Python looks for what a program imports
    runpy.run_path(str(file), run_name="__main__")


def lines_of(place: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of a run's record that have this key; place: the file, or its folder."""
    file = place / "metrics.jsonl" if place.is_dir() else place
    return [line for line in read_metrics(file) if key in line]


def values_of(place: Path, key: str = "loss") -> list[float]:
    return [line[key] for line in lines_of(place, key)]


def arguments_of(words: str, data: Path, shape: str = SHAPE) -> list[str]:
    """The arguments of a small run; data: of --data-path, where these name no other."""
    given = set(words.split())
    rest = REST.replace("--split 1,1,0", "") if "--mock-data" in given else REST
    arguments = [*shape.split(), *rest.split()]
    if not {"--mock-data", "--dataset-name"} & given:
        arguments += ["--data-path", str(data)]
    return arguments + words.split()


def _program(program: str, arguments: list[str], before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    sys.argv = [f"{program}.py", *arguments]
    import_module(program).main(arguments, os.environ)


def run_python(words: Sequence[str]) -> None:
    """As Python does with these words in the root of the repository, for `start_ranks`."""
    os.chdir(ROOT)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str((ROOT / words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _main(target: Callable[[], object], environ: Mapping[str, str], log: Path, server: str) -> None:
    """server: the address of the fork server. It starts the target's own pools, too; each would
    start one of its own, which imports all again."""
    forkserver._forkserver._forkserver_address = server
    forkserver._forkserver.ensure_running = lambda: None
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environ)
    torch.set_num_threads(1)
    target()


def newest(save: Path) -> Path:
    return max(save.glob("step_????????"))


def whole_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """The bytes of every slice of a checkpoint: equal layouts have equal ones."""
    return {
        f"{file.name} {key}": tensor.view(torch.uint8).numpy()
        for file in sorted(checkpoint.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def assert_equal_bits(one: Path, other: Path) -> None:
    """Two checkpoints, saved at the same layout, hold the same bits in every tensor."""
    ours, theirs = whole_tensors(one), whole_tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tobytes() == theirs[name].tobytes(), name


# Runs a program with each of the arguments in a JSON list.
PROBE = """
import contextlib, io, json, sys
from {program} import main
said = []
for environ, words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(words, environ)
            raise AssertionError(words)
        except SystemExit as stop:
            assert stop.code == 2, (words, err.getvalue())
    assert "torch" not in sys.modules, words
    said.append(err.getvalue())
print(json.dumps(said))
"""


def refused_before_torch(
    program: str, cases: Sequence[tuple[Mapping[str, str], Sequence[str]]]
) -> list[str]:
    """The program's stderr for each (environment, arguments), in one process; fails
    where it accepts them or has imported torch."""
    command = [sys.executable, "-c", PROBE.replace("{program}", program), json.dumps(cases)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return said
