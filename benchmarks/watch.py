"""What being watched costs a training loop of two processes, timed in turn in one run.

    python benchmarks/watch.py [--rounds N] [--steps N] [--json FILE]

Two gloo processes of one thread share a model so small (t = 2, fp32) that a step is little but its
collectives: an upper bound. Watched, they run inside `launch`; unwatched, on a plain process group.
Every round starts both kinds anew; wall time is that of the slowest rank, CPU time that of both
ranks with all their threads.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from benchmarks.own import build, make_batch
from megatron.config.training import ParallelConfig
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.train.launch import launch
from megatron.train.step import train_step

RANKS = 2
CASE = Case(name="tiny", num_layers=2, hidden_size=64, heads=4, vocab_size=512, batch=1)
WARM_UP = 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, of each round."""

    wall: list[float]
    cpu: list[float]


def measure(mesh: Mesh, steps: int) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a step."""
    state = build(CASE, mesh, "fp32")
    batches = [make_batch(CASE, 0)]
    for _ in range(WARM_UP):
        train_step(state, batches, LEARNING_RATE)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_step(state, batches, LEARNING_RATE)
    spent = (time.perf_counter() - wall, time.process_time() - cpu)
    ranks = mesh.control.gather(spent)
    return 1000 * max(each[0] for each in ranks) / steps, 1000 * sum(
        each[1] for each in ranks
    ) / steps


def run_rank(rank: int, folder: str, port: int, watched: bool, steps: int) -> None:
    """port: of a store that is kept by the parent, as torchrun's agent keeps it."""
    torch.set_num_threads(1)
    if watched:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with launch(ParallelConfig(tensor_model_parallel_size=RANKS), os.environ) as mesh:
            result = measure(mesh, steps)
    else:
        store = dist.FileStore(f"{folder}/store", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        result = measure(build_mesh({"tensor": RANKS}, torch.device("cpu")), steps)
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))


def run_ranks(watched: bool, steps: int) -> tuple[float, float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, store.port, watched, steps), nprocs=RANKS)
        wall, cpu = json.loads(Path(folder, "result.json").read_text())
        return wall, cpu


def table(results: dict[str, Timing]) -> str:
    header = ["", "wall, ms a step", "CPU of both ranks, ms a step"]
    rows = [[name, spread(each.wall, 2), spread(each.cpu, 2)] for name, each in results.items()]
    watched, plain = results["watched"], results["unwatched"]
    ratios = [ratio(watched.wall, plain.wall), ratio(watched.cpu, plain.cpu)]
    return markdown(header, [*rows, ["ratio of medians", *(f"{each:.3f}" for each in ratios)]])


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return median(one) / median(other)


def watch(rounds: int = 6, steps: int = 300, json_file: JsonFile = None) -> None:
    """Time and print: medians of the rounds (lower to upper quartile).

    Args:
        rounds: times that both kinds are started and timed in turn.
        steps: training steps of a round, after a warm-up.
        json_file: where every round's figures are written.
    """
    results = {"watched": Timing([], []), "unwatched": Timing([], [])}
    for number in range(rounds):
        for name in sorted(results, reverse=bool(number % 2)):
            wall, cpu = run_ranks(name == "watched", steps)
            results[name].wall.append(wall)
            results[name].cpu.append(cpu)
    record = facts("torch") | {"load": f"{os.getloadavg()[0]:.1f}", "rounds": rounds}
    print(told(record))
    print(table(results))
    write_json(
        json_file, record | {"results": {name: asdict(each) for name, each in results.items()}}
    )


if __name__ == "__main__":
    tyro.cli(watch)
