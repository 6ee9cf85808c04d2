"""Memory of the plan beside what the layers of the real model keep, and what a run takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.turns import ResidentMemory
from megatron.config.model import GPT2Config, RecomputeGranularity
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.models.transformer import Sequences, Transformer
from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import factory_1d
from megatron.parallel.kernels import use_cpu_kernels
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import materialize
from megatron.train.state import TrainState, build_state
from megatron.train.step import train_step
from tests.tools.planning.counted import micro_batch
from tools.planning.hardware import load_hardware
from tools.planning.memory import by_granularity, kept, memory
from tools.planning.parameters import local
from tools.planning.shape import WIDTHS, Shape

SHAPE = Shape(
    kind="gpt2",
    layers=2,
    hidden=128,
    heads=4,
    sequence=256,
    positions=256,
    vocabulary=1000,
    divisible_by=128,
    batch=2,
    micro_batches=1,
    tensor=1,
    data=1,
    width=4,
)
CPU = replace(load_hardware("dgx2h"), is_cpu=True)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def saved_bytes(function: nn.Module, *arguments: object) -> int:
    """Of what autograd keeps, parameters aside; tensors that share memory count once."""
    parameters = {each.untyped_storage().data_ptr() for each in function.parameters()}
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = function(*arguments)
    assert result.requires_grad
    return sum(size for place, size in storages.items() if place not in parameters)


@pytest.mark.skipif(not use_cpu_kernels, reason="torch's attention keeps other tensors")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
def test_layers_keep_what_is_planned(
    precision: str, dropout: float, granularity: RecomputeGranularity
) -> None:
    shape = replace(
        SHAPE,
        width=WIDTHS[precision],
        attention_dropout=dropout > 0,
        hidden_dropout=dropout > 0,
        recompute=granularity,
    )
    section = GPT2Config(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        recompute_granularity=granularity,
    )
    mesh = serial_mesh()
    layers = Transformer(section, factory_1d(mesh, 0), range(shape.layers))
    materialize(layers, device=mesh.device, dtype=DTYPES[precision], seed=0).train()
    x = torch.randn(shape.tokens, shape.hidden, dtype=DTYPES[precision], requires_grad=True)
    rows = row_keys(torch.arange(shape.batch), torch.arange(shape.sequence))
    at = Sequences(count=shape.batch, mask=None, is_causal=True, rows=rows)
    each = shape.width * x.numel() if granularity == "full" else kept(shape, CPU)
    assert saved_bytes(layers, x, at) == pytest.approx(2 * each, rel=0.01)


def test_lasting_memory_is_16_or_18_bytes_a_parameter() -> None:
    for width, bytes_each in ((4, 16), (2, 18)):
        held = memory(replace(SHAPE, width=width), CPU)
        lasting = sum(held[kind] for kind in ("weights", "gradients", "masters", "moments"))
        assert lasting == bytes_each * local(SHAPE)


def test_recomputation_keeps_less() -> None:
    on_gpu = load_hardware("dgx2h")
    shape = replace(SHAPE, sequence=1024, positions=1024)
    for hardware in (CPU, on_gpu):
        kinds = by_granularity(shape, hardware)
        assert kinds["full"] < kinds["selective"] < kinds["none"]


def state_of(shape: Shape, precision: str, device: str = "cpu") -> TrainState:
    section = GPT2Config(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.positions,
        recompute_granularity=shape.recompute,
    )
    sections = (section, OptimizerConfig(), PrecisionConfig(), serial_mesh(torch.device(device)))
    return build_state(*sections, shape.vocabulary, seed=0, dtype=DTYPES[precision])


def most_allocated(step: Callable[[], object]) -> int:
    """Bytes of all tensors that a step makes, at the time when they are most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


MEDIUM = replace(SHAPE, hidden=256, sequence=128, positions=128, vocabulary=4000)


@pytest.mark.skipif(not use_cpu_kernels, reason="torch's attention keeps other tensors")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_allocates_what_is_planned(
    precision: str, granularity: RecomputeGranularity, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What oneDNN copies in fp32, on some processors and 6 MB at most, is not planned.
    monkeypatch.setattr("megatron.parallel.cpu.onednn.is_faster_by_onednn", lambda: False)
    shape = replace(MEDIUM, width=WIDTHS[precision], recompute=granularity, batch=batch)
    state = state_of(shape, precision)
    train_step(state, [micro_batch(shape)], 1e-4)
    kinds = memory(shape, CPU)
    lasting = sum(kinds[kind] for kind in ("weights", "gradients", "masters", "moments"))
    most = lasting + most_allocated(lambda: train_step(state, [micro_batch(shape)], 1e-4))
    assert most == pytest.approx(kinds["total"], rel=0.05)


# 37 million parameters: 600 MB of weights, gradients and moments, far above what libraries take.
LARGE = replace(SHAPE, layers=8, hidden=512, heads=8, batch=1, vocabulary=24_000,
                recompute="full")  # fmt: skip


def grow(device: str, precision: str) -> int:
    """Bytes that a run of the large model takes at most beside what its libraries do; in a process
    of its own."""
    torch.set_num_threads(1)
    small = replace(SHAPE, sequence=LARGE.sequence, positions=LARGE.positions, recompute="full")
    train_step(state_of(small, precision, device), [micro_batch(small)], 1e-4)
    resident = ResidentMemory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    state = state_of(LARGE, precision, device)
    for _ in range(2):
        train_step(state, [micro_batch(LARGE)], 1e-4)
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident.peak()


def grown(device: str, precision: str) -> int:
    root = Path(__file__).parents[3]
    code = (
        f"from tests.tools.planning.test_memory import grow; print(grow({device!r}, {precision!r}))"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, env=environ, capture_output=True,
                         text=True)  # fmt: skip
    assert not ran.returncode, ran.stderr
    return int(ran.stdout.split()[-1])


def test_resident_memory_grows_as_planned() -> None:
    planned, taken = memory(LARGE, CPU)["total"], grown("cpu", "fp32")
    assert planned > 6e8
    assert taken == pytest.approx(planned, rel=0.15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_allocated_memory_is_as_planned() -> None:
    planned = memory(replace(LARGE, width=2), load_hardware("h200"))["total"]
    assert grown("cuda", "bf16") == pytest.approx(planned, rel=0.05)
