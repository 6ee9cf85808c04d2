"""Greedy generation beside transformers' `generate` with its cache, timed in turn in one run.

    python benchmarks/generation.py [--rounds N] [--new N] [--json FILE]

One model of 6 layers, hidden 384 and GPT-2's vocabulary, with the same weights on both sides, fp32,
on the CPU. t = 1: one process of two threads, both sides; t = 2: two gloo processes of one thread,
this project alone, since the peer is not cut. The tokens are compared before anything is timed.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import tyro
from transformers import GPT2LMHeadModel

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import transformers_gpt2
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from megatron.config.model import GPT2Config
from megatron.inference.generate import Sampling, generate
from megatron.models.build import build_model
from megatron.models.gpt2 import GPT2
from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh
from megatron.parallel.sharding import initial_value, sharding_specs

SEED = 1234
THREADS = 2  # of all ranks together
VOCABULARY = 50257
SECTION = GPT2Config(
    num_layers=6, hidden_size=384, num_attention_heads=6, max_position_embeddings=256
)
LONGEST = 32  # tokens of a prompt
# Tokens of each prompt of a batch.
BATCHES = {
    "1": [LONGEST],
    "8": [LONGEST] * 8,
    "8, unequal": [LONGEST - 3 * row for row in range(8)],
}

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


@dataclass(frozen=True)
class Timing:
    """One batch at one tensor-parallel size: {"ours" or "peer": tokens/s of each round}."""

    batch: str
    tensor_parallel: int
    speed: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, round by round; none without a peer."""
        sides = self.speed["ours"], self.speed.get("peer", [])
        return [ours / peer for ours, peer in zip(*sides, strict=bool(sides[1]))]


def ours(model: GPT2, mesh: Mesh) -> Generate:
    def run(prompts: Prompts, new: int) -> list[list[int]]:
        return generate(model, mesh, prompts, Sampling(new, temperature=0.0), eod=None)

    return run


def peer(model: GPT2LMHeadModel) -> Generate:
    def run(prompts: Prompts, new: int) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        gaps = [longest - len(prompt) for prompt in prompts]
        tokens = [[0] * gap + prompt for gap, prompt in zip(gaps, prompts, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        texts = model.generate(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        continued: list[list[int]] = texts[:, longest:].tolist()
        return continued

    return run


def build_sides(mesh: Mesh) -> dict[str, Generate]:
    """Both, from the same weights; on more than one rank this project alone."""
    model = build_model(SECTION, mesh, VOCABULARY, seed=SEED, dtype=torch.float32)
    if mesh.tensor.size > 1:
        return {"ours": ours(model.eval(), mesh)}
    weights = {
        name: initial_value(name, each, SEED) for name, each in sharding_specs(model).items()
    }
    theirs = transformers_gpt2.build(SECTION, VOCABULARY, weights).eval()
    return {"ours": ours(model.eval(), mesh), "peer": peer(theirs)}


def tokens_per_second(side: Generate, prompts: Prompts, new: int) -> float:
    start = time.perf_counter()
    side(prompts, new)
    return len(prompts) * new / (time.perf_counter() - start)


def measure(mesh: Mesh, rounds: int, new: int) -> list[Timing]:
    sides = build_sides(mesh)
    timings = []
    for batch, lengths in BATCHES.items():
        numbers = np.random.default_rng(SEED)
        prompts = [numbers.integers(0, VOCABULARY, length).tolist() for length in lengths]
        first, *others = (side(prompts, new) for side in sides.values())  # warms both up
        assert all(other == first for other in others), "not the same tokens"
        speed: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                speed[name].append(tokens_per_second(sides[name], prompts, new))
        timings.append(Timing(batch, mesh.tensor.size, speed))
    return timings


def run_rank(rank: int, size: int, folder: str, rounds: int, new: int) -> None:
    """All batches at one tensor-parallel size; rank 0 leaves its results in the folder."""
    torch.set_num_threads(THREADS // size)
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = serial_mesh() if size == 1 else build_mesh({"tensor": size}, torch.device("cpu"))
    results = [asdict(timing) for timing in measure(mesh, rounds, new)]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    if size > 1:
        dist.destroy_process_group()


def run_ranks(size: int, rounds: int, new: int) -> list[Timing]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (size, folder, rounds, new), nprocs=size)
        return [Timing(**each) for each in json.loads(Path(folder, "results.json").read_text())]


def table(timings: Sequence[Timing]) -> str:
    """Markdown: medians over the rounds (lower to upper quartile)."""
    header = ["batch", "t", "ours, tokens/s", "transformers, tokens/s", "ours / transformers"]
    rows = [
        [
            each.batch,
            each.tensor_parallel,
            spread(each.speed["ours"]),
            spread(each.speed["peer"]) if each.ratios else "not cut",
            spread(each.ratios, 2) if each.ratios else "",
        ]
        for each in timings
    ]
    return markdown(header, rows)


def generation(rounds: int = 10, new: int = 96, json_file: JsonFile = None) -> None:
    """Compare and print.

    Args:
        rounds: times that the two are timed in turn; an even number lets each go first as often.
        new: tokens after each prompt.
        json_file: where every round's figures are written.
    """
    timings = [each for size in (1, 2) for each in run_ranks(size, rounds, new)]
    record = facts("torch", "transformers") | {"rounds": rounds, "new": new}
    print(told(record))
    print(table(timings))
    results = [
        asdict(each) | {"ratio": median(each.ratios) if each.ratios else None} for each in timings
    ]
    write_json(json_file, record | {"results": results})


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tyro.cli(generation)
