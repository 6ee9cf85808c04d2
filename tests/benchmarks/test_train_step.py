"""benchmarks/train_step.py in miniature: every contender trains the same model and has figures."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, steps
from tests.benchmarks.run import figures, run

PRESET = """
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 32
max_position_embeddings = 32
vocab_size = 512
micro_batch_size = 2
global_batch_size = 2
train_iters = 10
"""


@pytest.mark.parametrize("size", [1, 2])
def test_the_floor_is_the_formulas_matmuls(tmp_path: Path, size: int) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET.replace("512", "1000"))
    flags = ["--preset", str(preset), "--tensor-model-parallel-size", str(size), "--no-bf16"]
    matmuls = list(peers.step_matmuls(steps.read(flags, size), size))
    flops = sum(2 * batch * m * k * n * times for batch, m, k, n, times in matmuls)
    n, h, s, layers = 64, 64, 32, 2
    padded = -(-1000 // (128 * size)) * 128 * size
    linear, attention = 6 * n * (12 * layers * h**2 + padded * h), 12 * n * s * h * layers
    assert flops * size == pytest.approx(linear + attention / 2)  # which is causal


def miniature(folder: Path, size: int, *words: object) -> dict[str, Any]:
    preset = folder / "preset.toml"
    preset.write_text(PRESET)
    flags = ["--presets", preset, "--dtypes", "fp32", "--tensor-parallel", size]
    return run(folder, "train_step", *flags, *words)


@pytest.mark.parametrize(
    ("size", "peers"),
    [
        (1, ["plain torch", "transformers", "floor"]),
        (2, ["this project, sequence parallel", "DTensor", "floor"]),
    ],
)
def test_all_contenders_have_their_figures(tmp_path: Path, size: int, peers: list[str]) -> None:
    names, folder = ["this project", *peers], tmp_path / "profile"
    record = miniature(tmp_path, size, "--contenders", *names, "--profile", folder)
    for name in names:
        found = figures(record, name, f"preset, fp32, t = {size}")
        assert found["wall"][0] > 0
        assert found["cpu"][0] > 0
        assert found["peak_bytes"] > 0
        assert ("tokens" in found) == (name != "floor")
    profile = (folder / f"preset,_fp32,_t_=_{size}_this_project.md").read_text()
    assert "matmuls" in profile
    assert ("| communication |" in profile) == (size > 1)


@pytest.mark.skipif(find_spec("megatron.core") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("size", [1, 2])
def test_megatron_core_trains_the_same_model(tmp_path: Path, size: int) -> None:
    record = miniature(tmp_path, size, "--contenders", "this project", "Megatron-Core")
    group = f"preset, fp32, t = {size}"
    assert figures(record, "Megatron-Core", group)["wall"][0] > 0
