"""How often the host waits for the device in a training step of GPT-2 and of BERT.

    python benchmarks/host_reads.py [--device cuda] [--json FILE]

Whatever the host reads is finished before it goes on, so that a GPU runs out of work. A step reads
once: loss, gradient norm and votes together. Operators are counted as they run, those of the
backward too (tools/layouts/meters.py). Exit status: 0 each step reads once, 1 one reads more.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, markdown, write_json
from megatron.config.model import BertConfig, GPT2Config
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.loader import prefetch
from megatron.train.state import build_state
from megatron.train.step import train_step
from tools.layouts.job import RandomSamples
from tools.layouts.meters import host_reads

VOCABULARY, LENGTH, BATCH = 512, 64, 4
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}


def reads(kind: type[GPT2Config | BertConfig], device: str, micro_batch_size: int) -> int:
    """Of the second step, in bf16 and with dropout; the first one may set up kernels."""
    state = build_state(
        kind(**SHAPE),
        OptimizerConfig(),
        PrecisionConfig(),
        serial_mesh(device),
        VOCABULARY,
        seed=0,
        dtype=torch.bfloat16,
    )
    samples = RandomSamples(
        vocabulary=VOCABULARY,
        length=LENGTH,
        seed=0,
        mask_prob=None if kind is GPT2Config else 0.15,
    )
    starts = range(0, 2 * BATCH, BATCH)
    first, second = prefetch(
        samples, starts, micro_batch_size=micro_batch_size, data_rank=0, data_size=1
    )
    train_step(state, first, 1e-3)
    with host_reads() as found:
        train_step(state, second, 1e-3)
    return found.total()


def main(device: Literal["cpu", "cuda"] = "cpu", json_file: JsonFile = None) -> None:
    """Count and print.

    Args:
        device: cuda, or cpu, where nothing waits but the same is counted.
        json_file: where every figure is written.
    """
    record: dict[str, Any] = {**facts("torch"), "device": device, "reads": {}}
    for kind in (GPT2Config, BertConfig):
        for size in (BATCH, 1):
            name = f"{kind.kind}, {BATCH // size} micro-batches"
            record["reads"][name] = reads(kind, device, size)
    print(markdown(["a step of", "reads"], [list(each) for each in record["reads"].items()]))
    write_json(json_file, record)
    if any(number != 1 for number in record["reads"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
