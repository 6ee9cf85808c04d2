"""The doctor finds by running what a run would use, and lists what is wrong with its cure."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.kernels import use_cpu_kernels
from megatron.train import state
from tests.dist import PATIENCE, Pool
from tests.tiny import mesh_of_ranks
from tools import doctor
from tools.probes import kernels, libraries, links, machine
from tools.probes.findings import Fact, Problem, Report

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, str(ROOT / "tools" / "doctor.py")]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell of one process, whose profiler says nothing."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def told(problems: list[dict[str, Any]], what: str) -> dict[str, Any]:
    return next(each for each in problems if what in each["what"])


def test_one_process_tells_what_is_wrong_with_its_cure(tmp_path: Path) -> None:
    """Neither a low limit of open files nor a package that only has apex's name ends training."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('pyramid is missing')")
    file = tmp_path / "report.json"
    words = shlex.join([*DOCTOR, "--json", str(file), "--precision", "fp32", "--save", "x/y"])
    ended = run(["bash", "-c", f"ulimit -S -n 1024; exec {words}"], PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    found = json.loads(file.read_text())
    limit = told(found["problems"], "1024 files may be open")
    assert limit["cure"].startswith("ulimit -n 4096")
    assert "problems:\n" in ended.stdout
    assert limit["cure"] in ended.stdout
    apex = told(found["problems"], str(tmp_path / "apex"))
    assert "not NVIDIA's" in apex["what"]
    assert "scripts/setup.sh --with-apex" in apex["cure"]
    assert found["libraries"]["apex"] == {"installed": True, "usable": False}
    assert found["healthy"] is True
    assert not any(each["needed"] for each in found["problems"])
    check_facts(found)


def check_facts(found: dict[str, Any]) -> None:
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["default precision"] in ("fp32", "bf16")
    assert found["devices"]["memory"] > 2**30
    assert found["limits"]["open files"] == 1024
    assert found["limits"]["free disk of --save"] > 0
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["speed"]["product, fp32"]["flops_per_second"] > 0
    assert found["libraries"]["numba"] is True
    assert found["libraries"]["tokenizer"]["name"] in ("gigatoken", "tokenizers")
    assert found["libraries"]["torch.compile"] is False


def test_a_compiler_that_does_not_work_is_told_with_what_is_done_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(state, "compiler_failure", lambda _: "TritonMissing: no Triton")
    fact, problem = libraries.layer_compiler(gpu)
    assert (fact.name, fact.value) == ("torch.compile", False)
    assert "no Triton; layers run as they are" in problem.what
    assert "--no-compile" in problem.cure
    assert not problem.is_needed
    monkeypatch.setattr(state, "compiler_failure", lambda _: None)
    assert [found.value for found in libraries.layer_compiler(gpu)] == [True]


def by_layer(dtype: torch.dtype) -> dict[str, Fact]:
    found = {}
    for name, probe in kernels.probes(torch.device("cpu"), dtype, apex=False).items():
        (found[name],) = probe()
    return found


BY_CPU_KERNELS = pytest.mark.skipif(not use_cpu_kernels, reason="plain torch has other kernels")
FASTER_BY_ONEDNN = "megatron.parallel.cpu.onednn.is_faster_by_onednn"


@BY_CPU_KERNELS
def test_each_layer_is_run_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FASTER_BY_ONEDNN, lambda: False)
    found = by_layer(torch.float32)
    operators = {name: fact.value["operators"] for name, fact in found.items()}
    assert {"aten::addmm", "aten::mm"} <= set(operators["column-parallel linear"])
    assert "aten::mm" in operators["row-parallel linear"]
    assert "aten::index_add_" in operators["word embedding"]
    assert "aten::native_layer_norm_backward" in operators["LayerNorm"]
    assert {"aten::gelu", "aten::gelu_backward"} <= set(operators["GeLU"])
    assert "_LinearCrossEntropyBackward" in operators["output layer and loss"]
    assert str(found["AdamW"]) == "_fused_adamw_"
    assert str(found["attention"]).startswith("block attention (stores")
    assert str(found["attention, 1024 tokens"]).startswith("flash attention")
    assert str(found["attention, documents"]).startswith("flash attention")
    assert str(found["attention, dropout"]).startswith("block attention (stores")
    assert str(found["attention, dropout, documents"]).startswith("block attention (stores")


@BY_CPU_KERNELS
def test_products_that_onednn_takes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FASTER_BY_ONEDNN, lambda: True)
    found = by_layer(torch.float32)
    for name in "column-parallel linear", "row-parallel linear", "output layer and loss":
        assert "_linear_pointwise" in str(found[name])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_the_routine_behind_a_product_is_named() -> None:
    """Which torch's profiler does not see."""
    routines = by_layer(torch.float32)["column-parallel linear"].value["libraries"]
    names = "MKL SGEMM", "oneDNN matmul", "oneDNN inner_product"
    assert any(each.startswith(names) for each in routines), routines


def test_a_broken_kernel_is_told_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(F, "layer_norm", broken)
    monkeypatch.setattr(torch, "native_layer_norm", broken)  # in half precision
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    file = tmp_path / "report.json"
    assert doctor.main(["--json", str(file)], {}) == 1
    printed = capsys.readouterr().out
    assert "failed: RuntimeError: no kernel image is available\n" in printed
    assert "(needed)" in printed
    found = json.loads(file.read_text())
    problem = told(found["problems"], "kernels, LayerNorm: RuntimeError: no kernel image")
    assert problem["needed"]
    assert problem["cure"]
    assert "for execution on the device" in found["kernels"]["LayerNorm"]["failed"]
    assert found["kernels"]["GeLU"]["operators"]
    assert found["healthy"] is False


def test_two_processes_measure_their_axis_and_one_reports(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["--tensor-model-parallel-size", "2", "--json", str(file), "--precision", "fp32"]
    ended = run([*torchrun, DOCTOR[1], *words])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("problems:") == 1
    found = json.loads(file.read_text())
    assert found["ranks"]["rank 1"]["coordinates"] == {"data": 0, "tensor": 1}
    assert found["all-reduce"]["data axis"] == {"size": 1}
    assert found["environment"]["WORLD_SIZE"] == "2"
    for size in ("1 KB", "1 MB", "8 MB"):
        each = found["all-reduce"][f"tensor axis, {size}"]
        assert each["right"] is True
        assert each["backend"] == "gloo"
        assert each["bus_bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"])
    assert "bus bandwidth = 2 (n - 1) / n x bytes / seconds" in ended.stdout


def spoiled_sums() -> list[str]:
    """What is told where the sums that rank 3 of 2 x 2 gets are not the true ones."""
    mesh = mesh_of_ranks(2)
    true = links.all_reduce
    if mesh.control.rank == 3:
        links.all_reduce = lambda buffer, axis: true(buffer, axis).add_(1)
    try:
        findings = list(links.all_reduces(mesh))
    finally:
        links.all_reduce = true
    assert len([each for each in findings if isinstance(each, Fact)]) == 7
    return [each.what for each in findings if isinstance(each, Problem) and each.is_needed]


def test_a_wrong_sum_is_a_problem_of_its_rank(gloo: Pool) -> None:
    for whats in gloo.run(4, spoiled_sums):
        expected = "the all-reduce along the {} axis gave a wrong sum on rank 3"
        assert whats == [expected.format(axis) for axis in ("data", "tensor") for _ in range(3)]


def test_a_folder_that_cannot_be_written_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    findings = list(machine.limits(str(tmp_path / "file" / "save"), torch.device("cpu")))
    problem = next(each for each in findings if isinstance(each, Problem) and each.is_needed)
    assert f"--save {tmp_path}/file/save" in problem.what


def test_idle_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LINUX", False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    findings = machine.devices(torch.device("cpu"), "fp32", 2)
    problems = [each for each in findings if isinstance(each, Problem)]
    assert [each.cure for each in problems] == ["OMP_NUM_THREADS=32 before the command"]


def test_without_apex_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda _: None)
    (fact,) = libraries.apex()
    assert isinstance(fact, Fact)
    assert "not installed; optional" in str(fact)


def test_what_was_found_before_a_probe_failed_is_kept() -> None:
    def probe() -> Iterator[Fact]:
        yield Fact("first", 1)
        raise OSError("gone")

    report = Report()
    report.run("part", "probe", probe, cure="look", is_needed=False)
    assert report.record()["part"] == {"first": 1, "probe": {"failed": ["OSError: gone"]}}
    assert report.is_healthy
    assert report.text().endswith("problems:\n  1. part, probe: OSError: gone\n     cure: look")


def test_a_missing_folder_for_the_report_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--json", str(tmp_path / "none" / "report.json")], {})
    assert stop.value.code == 2
    assert "--json" in capsys.readouterr().err
