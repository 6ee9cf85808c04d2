"""The benchmark of training steps: what it counts, and a whole run of it in miniature."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import FLOOR, FULL, NOT_COMPILED, OURS, SEQUENCE, Case
from benchmarks.comparison import ROOT, Settings, ask_all, measure
from benchmarks.figures import utilisation
from benchmarks.overlap import communication
from benchmarks.profiles import kind_of
from benchmarks.turns import Contender

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


def settings(**changes: Any) -> Settings:
    usual = {"case": CASE, "dtype": "fp32", "threads": 1, "tensor_parallel": 1, "device": "cpu"}
    return Settings(**(usual | {"rounds": 2, "steps": 1} | changes))


def test_utilisation_counts_what_is_computed_again_for_the_hardware_alone() -> None:
    """With layers computed again: 96 b s L h^2 (1 + s / 6 h + v / 16 L h)."""
    case = replace(CASE, vocab_size=1024, sequence=64)  # without padding
    b, s, h, layers, v = case.batch, case.sequence, case.hidden_size, case.num_layers, 1024
    paper = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    found = utilisation(settings(case=case), FULL, 2.0, 1e9)
    assert found["hfu"] == pytest.approx(paper / 2e9)
    assert found["mfu"] == pytest.approx(case.flops / 2e9)
    without = utilisation(settings(case=case), OURS, 2.0, 1e9)
    assert without["hfu"] == pytest.approx(found["mfu"])
    rank = utilisation(settings(case=case, tensor_parallel=2), FULL, 2.0, 1e9)
    assert rank["hfu"] == pytest.approx(paper / 4e9)
    assert utilisation(settings(), OURS, 2.0, None) == {"mfu": None, "hfu": None}


def event(name: str, start: float, stop: float, kind: str) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 1e6 * start, "dur": 1e6 * (stop - start)}


@pytest.mark.parametrize(
    ("kind", "all_reduce", "product"),
    [
        ("kernel", "ncclDevKernel_AllReduce", "nvjet_hsh"),
        ("cpu_op", "gloo:all_reduce", "aten::mm"),
        ("cpu_op", "gloo:all_reduce", "mkldnn::_linear_pointwise"),
    ],
)
def test_communication_is_exposed_where_nothing_is_computed(
    kind: str, all_reduce: str, product: str
) -> None:
    events = [
        event(all_reduce, 1, 4, kind),
        event(all_reduce, 3, 6, kind),  # two at once count once
        event(product, 0, 2, kind),
        event(product, 5, 9, kind),
        event("autograd::engine", 0, 9, "cpu_op"),  # holds others, and computes nothing
        event("gloo:barrier", 10, 20, kind),
        {"ph": "M", "name": "process_name"},
    ]
    assert communication(events) == (pytest.approx(5), pytest.approx(3))
    assert communication(events[2:]) == (0, 0)


FAITHFUL = """
from benchmarks.turns import serve
serve({"time": lambda steps: {"wall": 1.0, "cpu": 1.0}, "memory": lambda: {"bytes": 7}})
"""
TOO_LARGE = "raise MemoryError('torch.OutOfMemoryError: CUDA out of memory.')"
WRONG = "raise KeyError('wrong')"


def test_who_runs_out_of_memory_drops_out(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {OURS: TOO_LARGE, NOT_COMPILED: FAITHFUL, FLOOR: FAITHFUL}
    found = {
        name: Contender(name, [[sys.executable, "-c", script]], {}, ROOT)
        for name, script in scripts.items()
    }
    wrong = Contender("wrong", [[sys.executable, "-c", WRONG]], {}, ROOT)
    try:
        results = measure(settings(), found)
        with pytest.raises(RuntimeError, match="rank 0 of wrong has failed(.|\n)*KeyError"):
            ask_all({"wrong": wrong}, ["wrong"], "time", steps=1)
    finally:
        for contender in [*found.values(), wrong]:
            contender.stop()
    assert set(results) == {NOT_COMPILED, FLOOR}
    assert results[NOT_COMPILED].wall == [1.0, 1.0]
    assert results[NOT_COMPILED].peak_memory == 7
    assert "this project: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "peers"), [(1, ["plain torch", "transformers"]), (2, [SEQUENCE, "DTensor"])]
)
def test_all_contenders_have_their_figures(tmp_path: Path, size: int, peers: list[str]) -> None:
    picture = tmp_path / "steps.png"
    words = ["--tensor-parallel", str(size), "--picture", str(picture)]
    if SEQUENCE in peers:  # no contender unless it is asked for
        words += ["--contenders", OURS, *peers]
    record = run(tmp_path, *words, "--profile", str(tmp_path / "profile"))
    assert list(record["contenders"]) == ["this project", *peers]
    for each in record["contenders"].values():
        assert {"median", "p10", "p90"} == set(each["tokens_per_second"])
        assert each["step_seconds"]["median"] > 0
        assert each["peak_memory_bytes"] > 0
        assert each["floor_seconds"] > 0
        assert each["share_of_floor"] > 0
    assert record["loss_difference"] < 1e-4
    assert record["case"]["betas"] == [0.9, 0.95]
    assert picture.stat().st_size > 0
    profile = (tmp_path / "profile" / "this_project.md").read_text()
    assert "matrix products" in profile
    assert ("communication" in profile) == (size > 1)
    seconds = record["communication"][OURS]
    assert (0 < seconds["exposed_seconds"] <= seconds["seconds"]) == (size > 1)
    trace = tmp_path / "profile" / f"this_project.{size - 1}.json"
    assert json.loads(trace.read_text())["traceEvents"]


def run(folder: Path, *words: str) -> dict[str, Any]:
    """What a run of PRESET in miniature writes."""
    preset, written = folder / "preset.toml", folder / "steps.json"
    preset.write_text(PRESET)
    command = [sys.executable, "benchmarks/train_step.py", "--preset", str(preset)]
    command += ["--dtype", "fp32", "--threads", "2", "--vocab-size", "512", "--rounds", "2"]
    command += ["--steps", "1", "--json", str(written), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(written.read_text())


def test_one_rank_of_many_runs_alone(tmp_path: Path) -> None:
    words = ["--tensor-parallel", "4", "--stub-communication", "--contenders", OURS, FULL]
    record = run(tmp_path, *words, "--starts", "2")
    assert list(record["contenders"]) == [OURS, FULL]
    assert len(record["seconds"][OURS]) == 4  # two rounds of each start
    assert record["loss_difference"] < 1e-5  # both began with the same weights
    assert record["tensor_parallel"] == 4


@pytest.mark.skipif(
    "MEGATRON_CORE_PYTHON" not in os.environ,
    reason="MEGATRON_CORE_PYTHON names no Python in whose environment megatron-core is installed",
)
@pytest.mark.parametrize("size", [1, 2])
def test_megatron_core_trains_the_same_model(tmp_path: Path, size: int) -> None:
    python = os.environ.get("MEGATRON_CORE_PYTHON", "")
    words = ["--tensor-parallel", str(size), "--megatron-core", python]
    record = run(tmp_path, *words, "--contenders", OURS, "Megatron-Core")
    assert record["contenders"]["Megatron-Core"]["step_seconds"]["median"] > 0
    assert record["loss_difference"] < 1e-5
