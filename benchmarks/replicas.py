"""What a check of the replicas costs beside a training step, timed in turn in one run.

    python benchmarks/replicas.py [--rounds N] [--steps N] [--interval N] [--json FILE]

Two gloo processes of one thread, which share one model (t = 2) or hold one each (d = 2); fp32 and
bf16, no dropout. A check hashes all that the two hold in common, and its time holds the wait for
the slower of the two. Its share is that of the time of training when every interval-th step is
checked; every round takes steps and then checks, and wall time is that of the slowest rank.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch.distributed import ReduceOp

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from benchmarks.own import build, make_batch
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.train.replicas import check_replicas
from megatron.train.step import train_step

RANKS = 2
CHECKS = 3  # of a round
BATCH = 4  # samples of a step on all ranks together, as in the quickstart
PRECISIONS = "fp32", "bf16"
CASES = [
    Case(name="quickstart", num_layers=4, hidden_size=256, heads=4, vocab_size=4096, batch=BATCH),
    Case(name="medium", num_layers=6, hidden_size=384, heads=6, vocab_size=8192, batch=BATCH),
]


@dataclass(frozen=True)
class Timing:
    """One case in one layout: milliseconds of each round."""

    case: str
    precision: str
    tensor_parallel: int
    megabytes: float  # what a rank holds in common with the other, and hashes
    step: list[float]
    check: list[float]

    def shares(self, interval: int) -> list[float]:
        """Percent of the time of training that checks take, of each round."""
        pairs = zip(self.check, self.step, strict=True)
        return [100 * check / (interval * step + check) for check, step in pairs]


def milliseconds(action: Callable[[], object], times: int) -> float:
    """Wall time of one of `times`, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        action()
    spent = torch.tensor(1000 * (time.perf_counter() - start) / times)
    dist.all_reduce(spent, op=ReduceOp.MAX)
    return spent.item()


def measure(case: Case, precision: str, mesh: Mesh, rounds: int, steps: int) -> Timing:
    state = build(case, mesh, precision)
    batches = [make_batch(replace(case, batch=BATCH // mesh.data.size), mesh.data.rank)]

    def step() -> None:
        train_step(state, batches, LEARNING_RATE)

    def check() -> None:
        check_replicas(state, batches)

    common = [
        piece.local.nbytes
        for piece in state.slices()
        if mesh.data.size > 1 or not piece.spec.shards
    ]
    milliseconds(step, 2)
    milliseconds(check, 2)
    pairs = [(milliseconds(step, steps), milliseconds(check, CHECKS)) for _ in range(rounds)]
    step_times, check_times = map(list, zip(*pairs, strict=True))
    megabytes = sum(common) / 1e6
    return Timing(case.name, precision, mesh.tensor.size, megabytes, step_times, check_times)


def run_rank(rank: int, folder: str, rounds: int, steps: int) -> None:
    """All cases in both layouts; rank 0 leaves its results in the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    meshes = [build_mesh({"tensor": size}, torch.device("cpu")) for size in (1, RANKS)]
    results = [
        asdict(measure(case, precision, mesh, rounds, steps))
        for case in CASES
        for precision in PRECISIONS
        for mesh in meshes
    ]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def table(results: Sequence[Timing], interval: int) -> str:
    header = ["model", "precision", "t", "d", "hashed, MB", "step, ms", "check, ms", "share, %"]
    rows = [
        [
            each.case,
            each.precision,
            each.tensor_parallel,
            RANKS // each.tensor_parallel,
            f"{each.megabytes:.1f}",
            spread(each.step),
            spread(each.check),
            spread(each.shares(interval), 3),
        ]
        for each in results
    ]
    return markdown(header, rows)


def replicas(
    rounds: int = 6, steps: int = 3, interval: int = 100, json_file: JsonFile = None
) -> None:
    """Time and print: medians of the rounds (lower to upper quartile).

    Args:
        rounds: times that steps and checks are timed in turn.
        steps: training steps of a round.
        interval: steps between checks, for their share; the default of --check-replicas-interval.
        json_file: where every round's figures are written.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, rounds, steps), nprocs=RANKS)
        results = [Timing(**each) for each in json.loads(Path(folder, "results.json").read_text())]
    record = facts("torch") | {"load": f"{os.getloadavg()[0]:.1f}", "rounds": rounds}
    print(told(record))
    print(table(results, interval))
    write_json(
        json_file, record | {"interval": interval, "results": [asdict(each) for each in results]}
    )


if __name__ == "__main__":
    tyro.cli(replicas)
