"""Costs and savings of offload: time per step, peak device memory, and how long copies between host
and device overlap with kernels, by torch.profiler. Not yet run on a GPU.

    python benchmarks/offload.py --device cuda
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
from time import perf_counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.config.model import GPT2Config
from megatron.config.training import OptimizerConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import build_state
from megatron.train.step import train_step

VOCABULARY = 50304


def random_batch(samples: int, length: int) -> GPT2Batch:
    ids = np.random.default_rng(0).integers(VOCABULARY, size=(samples, length + 1))
    return GPT2Batch(
        tokens=ids[:, :-1],
        labels=ids[:, 1:],
        loss_mask=np.ones((samples, length), dtype=np.float32),
        positions=np.broadcast_to(np.arange(length), (samples, length)).copy(),
        document_starts=None,
        numbers=np.arange(samples),
    )


def overlap(trace: profile) -> tuple[float, float]:
    """(milliseconds of copies between host and device, those of them that overlap kernels)."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace.events() or []:
        if event.device_type.name == "CUDA":
            span = event.time_range.start, event.time_range.end
            spans["Memcpy" in event.name].append(span)
    copied = sum(stop - start for start, stop in spans[True])
    beside = sum(
        max(0.0, min(stop, end) - max(start, first))
        for start, stop in spans[True]
        for first, end in spans[False]
    )
    return copied / 1e3, beside / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    given = parser.parse_args()
    device, is_cuda = torch.device(given.device), given.device == "cuda"
    batch = random_batch(given.samples, given.seq_length)
    print("| offload | ms a step | peak GiB | ms of copies | beside kernels |")
    print("|---|---|---|---|---|")
    for optimizer, activations in ((False, False), (True, False), (False, True), (True, True)):
        model = GPT2Config(
            num_layers=given.layers,
            hidden_size=given.hidden_size,
            num_attention_heads=given.hidden_size // 64,
            max_position_embeddings=given.seq_length,
            cpu_offload_activations=activations,
        )
        config = OptimizerConfig(optimizer_cpu_offload=optimizer)
        mesh = serial_mesh(device)
        state = build_state(model, mesh, VOCABULARY, seed=1, dtype=torch.bfloat16, optimizer=config)
        train_step(state, [batch], 1e-4)
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = perf_counter()
        for _ in range(3):
            train_step(state, [batch], 1e-4)
        if is_cuda:
            torch.cuda.synchronize()
        seconds = (perf_counter() - started) / 3
        peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else float("nan")
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]
        with profile(activities=kinds) as trace:
            train_step(state, [batch], 1e-4)
        copied, beside = overlap(trace)
        chosen = ["optimizer"] * optimizer + ["activations"] * activations
        name = " and ".join(chosen) or "none"
        print(f"| {name} | {1e3 * seconds:.1f} | {peak:.2f} | {copied:.1f} | {beside:.1f} |")
        del state


if __name__ == "__main__":
    main()
