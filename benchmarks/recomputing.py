"""This project's steps at one granularity of recomputation, which `recomputation.py` starts as a
process of its own.

    python -m benchmarks.recomputing SETTINGS.json
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cases import LEARNING_RATE, SEED, Case
from benchmarks.own import make_batch, model_section, optimizer_section
from benchmarks.turns import ResidentMemory, Stopwatch, serve
from megatron.config.training import PrecisionConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import DTYPES, build_state
from megatron.train.step import train_step
from tools.layouts.meters import saved_bytes


def main(file: str) -> None:
    told = json.loads(Path(file).read_text())
    torch.set_num_threads(told["threads"])
    case, mesh = Case.read(told["case"]), serial_mesh()
    section = replace(model_section(case), **told["model"])
    optimizer, precision, dtype = optimizer_section(case), PrecisionConfig(), DTYPES[told["dtype"]]
    memory = ResidentMemory()
    state = build_state(
        section, optimizer, precision, mesh, case.vocab_size, seed=SEED, dtype=dtype
    )

    def step(number: int) -> float:
        return train_step(state, [make_batch(case, number)], LEARNING_RATE).loss

    def kept() -> int:
        return saved_bytes(state.model, state.objective, make_batch(case, 0), mesh.device)

    watch = Stopwatch(step, lambda: None)
    serve(
        {
            "losses": watch.losses,
            "time": watch.time,
            "memory": lambda: {"bytes": memory.peak()},
            "kept": lambda: {"bytes": kept()},
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
