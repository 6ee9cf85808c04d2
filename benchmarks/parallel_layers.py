"""Training steps of the parallel layers beside plain torch and DTensor, timed in turn in one run.

    python benchmarks/parallel_layers.py [--rounds N] [--steps N] [--json FILE]

t = 1: against nn.Linear, nn.Embedding, nn.LayerNorm and F.cross_entropy in one process of two
threads. t = 2: against `torch.distributed.tensor.parallel.parallelize_module` on two gloo processes
of one thread. A step is forward, loss, backward, clipping by the global norm and fused AdamW, fp32
without dropout, from the same weights on the same batches; the losses are compared before anything
is timed.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.distributed import ReduceOp

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.plain_gpt2 import (
    FusedProjections,
    PlainGPT2,
    PlainTraining,
    SeparateProjections,
    parallelize,
)
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import initial_value, layouts
from megatron.parallel.mesh import Axis, Mesh, build_mesh, serial_mesh
from megatron.train.state import build_state
from megatron.train.step import train_step

SEED = 1234
LEARNING_RATE = 1e-3
THREADS = 2  # of all ranks together
COMPARED_STEPS = 3
TOLERANCE = 1e-4  # of the losses of the compared steps
PEERS = {1: "plain torch", 2: "DTensor"}

Step = Callable[[GPT2Batch], float]


@dataclass(frozen=True)
class Case:
    """One model and its micro-batch."""

    name: str
    num_layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    batch: int
    sequence: int = 256

    @property
    def section(self) -> ModelConfig:
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.heads,
            max_position_embeddings=self.sequence,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )


CASES = [
    Case("quickstart", num_layers=4, hidden_size=256, heads=4, vocab_size=4096, batch=8),
    Case("medium", num_layers=6, hidden_size=384, heads=6, vocab_size=8192, batch=4),
]


@dataclass(frozen=True)
class Comparison:
    """One case at one tensor-parallel size: {"ours" or "peer": seconds per step of each round}.

    Wall seconds are those of the slowest rank, CPU seconds those of all ranks together.
    """

    case: str
    tensor_parallel: int
    peer: str
    largest_loss_difference: float
    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def make_batch(case: Case, number: int) -> GPT2Batch:
    shape = (case.batch, case.sequence)
    text = np.random.default_rng(number).integers(0, case.vocab_size, (shape[0], shape[1] + 1))
    return GPT2Batch(
        tokens=text[:, :-1].copy(),
        labels=text[:, 1:].copy(),
        loss_mask=np.ones(shape, np.float32),
        positions=np.broadcast_to(np.arange(shape[1]), shape).copy(),
        document_starts=None,
    )


def build_both(case: Case, mesh: Mesh) -> dict[str, Step]:
    """Our training step and the peer's, from the same weights."""
    settings = OptimizerConfig()
    state = build_state(
        case.section,
        settings,
        PrecisionConfig(),
        mesh,
        case.vocab_size,
        seed=SEED,
        dtype=torch.float32,
    )
    weights = {
        name: initial_value(name, layout, SEED) for name, layout in layouts(state.model).items()
    }
    is_serial = mesh.tensor.size == 1
    model = PlainGPT2(
        case.section, case.vocab_size, FusedProjections if is_serial else SeparateProjections
    )
    model.load_state_dict(plain_weights(weights, fused=is_serial))
    if mesh.tensor.grid is not None:
        parallelize(model, mesh.tensor.grid["tensor"])
    peer = PlainTraining(model, settings, LEARNING_RATE)

    def ours_step(batch: GPT2Batch) -> float:
        return train_step(state, [batch], LEARNING_RATE).loss

    def peer_step(batch: GPT2Batch) -> float:
        return peer.step(torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels))

    return {"ours": ours_step, "peer": peer_step}


def plain_weights(weights: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
    """Our whole parameters under the names of PlainGPT2."""
    renamed: dict[str, Tensor] = {"head.weight": weights["word_embedding.weight"]}
    for name, whole in weights.items():
        name = name.removeprefix("transformer.")
        name = name.replace("mlp.up", "mlp.0").replace("mlp.down", "mlp.2")
        name = name.replace("attention.qkv", "projections.qkv").replace(
            "attention.output", "output"
        )
        if "qkv" not in name:
            renamed[name] = whole
        elif fused:
            renamed[name] = whole.flatten(0, 1)
        else:
            for part, own in zip(("query", "key", "value"), whole, strict=True):
                renamed[name.replace("qkv", part)] = own
    return renamed


def loss_difference(steps: dict[str, Step], batches: Sequence[GPT2Batch]) -> float:
    """Largest difference of the losses of the first steps, which also warm both up."""
    losses = [[step(batch) for step in steps.values()] for batch in batches[:COMPARED_STEPS]]
    largest = max(abs(ours - peer) for ours, peer in losses)
    assert largest <= TOLERANCE, f"not the same model: losses {losses}"
    return largest


def seconds_per_step(step: Step, batches: Sequence[GPT2Batch], axis: Axis) -> tuple[float, float]:
    """(wall of the slowest rank, CPU of all ranks) of one round over the batches."""
    all_reduce(torch.zeros(1), axis)  # start together
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        step(batch)
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu]) / len(batches)
    all_reduce(spent[:1], axis, ReduceOp.MAX)
    all_reduce(spent[1:], axis)
    return spent[0].item(), spent[1].item()


def compare(case: Case, mesh: Mesh, rounds: int, steps: int) -> Comparison:
    both = build_both(case, mesh)
    batches = [make_batch(case, number) for number in range(max(steps, COMPARED_STEPS))]
    difference = loss_difference(both, batches)
    wall: dict[str, list[float]] = {name: [] for name in both}
    cpu: dict[str, list[float]] = {name: [] for name in both}
    for number in range(rounds):
        order = list(both) if number % 2 else list(both)[::-1]
        for name in order:
            spent = seconds_per_step(both[name], batches[:steps], mesh.tensor)
            wall[name].append(spent[0])
            cpu[name].append(spent[1])
    size = mesh.tensor.size
    return Comparison(case.name, size, PEERS[size], difference, wall, cpu)


def run_rank(rank: int, size: int, folder: str, rounds: int, steps: int) -> None:
    """All cases at one tensor-parallel size; rank 0 leaves its results in the folder."""
    torch.set_num_threads(THREADS // size)
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = serial_mesh() if size == 1 else build_mesh(size, torch.device("cpu"))
    results = [asdict(compare(case, mesh, rounds, steps)) for case in CASES]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    if size > 1:
        dist.destroy_process_group()


def run_ranks(size: int, rounds: int, steps: int) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (size, folder, rounds, steps), nprocs=size)
        return [Comparison(**each) for each in json.loads(Path(folder, "results.json").read_text())]


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    """Ours over the peer's, round by round."""
    return [ours / peer for ours, peer in zip(seconds["ours"], seconds["peer"], strict=True)]


def median_ratios(result: Comparison) -> dict[str, float]:
    return {
        "wall_ratio": median(ratios(result.wall)),
        "cpu_ratio": median(ratios(result.cpu)),
    }


def spread(values: Sequence[float]) -> str:
    lower, upper = np.quantile(values, [0.25, 0.75])
    return f"{median(values):.3f} ({lower:.3f} to {upper:.3f})"


def table(results: Sequence[Comparison]) -> str:
    """Markdown: median milliseconds a step, median ratio with quartiles over the rounds."""
    lines = [
        "| model | t | peer | ours, ms wall / CPU | peer, ms wall / CPU "
        "| wall, ours / peer | CPU, ours / peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        times = (
            " / ".join(f"{1000 * median(kind[name]):.0f}" for kind in (each.wall, each.cpu))
            for name in ("ours", "peer")
        )
        cells = [each.case, str(each.tensor_parallel), each.peer, *times]
        cells += [spread(ratios(each.wall)), spread(ratios(each.cpu))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parallel_layers(
    rounds: int = 12,
    steps: int = 3,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Compare and print.

    Args:
        rounds: times that the two are timed in turn; an even number lets each go first as often.
        steps: training steps of each in a round.
        json_file: where every round's figures are written.
    """
    results = [each for size in PEERS for each in run_ranks(size, rounds, steps)]
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "rounds": rounds,
        "steps": steps,
    }
    print(", ".join(f"{name} {value}" for name, value in record.items()))
    print(table(results))
    if json_file is not None:
        record["results"] = [asdict(each) | median_ratios(each) for each in results]
        json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(parallel_layers)
