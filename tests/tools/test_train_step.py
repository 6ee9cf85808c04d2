"""The benchmark of training steps: what it counts, and a whole run of it in miniature."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.profiles import kind_of
from benchmarks.train_step import ROOT, read_case

PRESET = """
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 32
max_position_embeddings = 32
micro_batch_size = 2
global_batch_size = 2
train_iters = 10
adam_beta2 = 0.95
"""
CASE = Case(
    name="case", num_layers=3, hidden_size=64, heads=4, vocab_size=1000, batch=2, sequence=32
)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_are_those_of_the_formula(size: int) -> None:
    case = Case.read(CASE.written())
    assert case == CASE
    products = case.products(size)
    attention = sum(each.flops for each in products if each.name.startswith("attention"))
    linear = sum(each.flops for each in products) - attention
    padded = -(-1000 // (128 * size)) * 128 * size
    n, h, layers = 64, 64, 3
    assert linear * size == 6 * n * (12 * layers * h**2 + padded * h)
    assert attention * size * 2 == 12 * n * 32 * h * layers  # MFU's formula counts it whole
    assert case.flops == 6 * n * (12 * layers * h**2 + 1000 * h) + 12 * n * 32 * h * layers


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm_backward", "layer norm"),
        ("aten::_fused_adamw_", "optimizer"),
        ("c10d::allreduce_", "communication"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("aten::copy_", "copies"),
        ("aten::randn", "all else"),
    ],
)
def test_every_operator_has_one_kind(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


@pytest.mark.parametrize(
    ("size", "peers"), [(1, ["plain torch", "transformers"]), (2, ["DTensor"])]
)
def test_all_contenders_have_their_figures(tmp_path: Path, size: int, peers: list[str]) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET)
    assert read_case(preset, 512, None, False).betas == (0.9, 0.95)
    written, picture = tmp_path / "steps.json", tmp_path / "steps.png"
    command = [sys.executable, "benchmarks/train_step.py", "--preset", str(preset)]
    command += ["--dtype", "fp32", "--threads", "2", "--tensor-parallel", str(size)]
    command += ["--vocab-size", "512", "--rounds", "2", "--steps", "1", "--json", str(written)]
    command += ["--picture", str(picture), "--profile", str(tmp_path / "profile")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(written.read_text())
    assert list(record["contenders"]) == ["this project", *peers]
    for each in record["contenders"].values():
        assert {"median", "p10", "p90"} == set(each["tokens_per_second"])
        assert each["step_seconds"]["median"] > 0
        assert each["peak_memory_bytes"] > 0
        assert each["floor_seconds"] > 0
        assert each["share_of_floor"] > 0
    assert record["loss_difference"] < 1e-4
    assert picture.stat().st_size > 0
    profile = (tmp_path / "profile" / "this_project.md").read_text()
    assert "matrix products" in profile
    assert ("communication" in profile) == (size > 1)
    trace = tmp_path / "profile" / f"this_project.{size - 1}.json"
    assert json.loads(trace.read_text())["traceEvents"]
