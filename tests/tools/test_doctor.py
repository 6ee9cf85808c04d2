"""The doctor finds by running what a run would use, and lists what is wrong with its cure."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.parallel.mesh import serial_mesh
from tests.dist import Pool
from tests.programs import ROOT, run_script
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tools.doctor import __main__ as doctor
from tools.doctor import links, machine
from tools.doctor.findings import Fact, Problem, Report


def problem_of(found: dict[str, Any], named: str) -> dict[str, Any]:
    return next(each for each in found["problems"] if named in each["what"])


def test_problems_and_cures(tmp_path: Path) -> None:
    """A low limit of open files and a package that only has apex's name end no training; a folder
    that cannot be written does."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('pyramid is missing')")
    (tmp_path / "file").touch()
    save, report = tmp_path / "file" / "save", tmp_path / "report.json"
    words = [sys.executable, ROOT / "tools" / "doctor.py", "--json", report, "--save", save]
    limited = f"ulimit -S -n 1024; exec {shlex.join(map(str, words))}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = ["bash", "-c", limited]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    found = json.loads(report.read_text())
    assert not found["healthy"]
    assert [f"--save {save}" in each["what"] for each in found["problems"] if each["needed"]]
    limit = problem_of(found, "1024")
    assert limit["cure"].startswith("ulimit -n 4096")
    assert limit["cure"] in ended.stdout
    apex = problem_of(found, str(tmp_path / "apex"))
    assert not any(each["needed"] for each in (limit, apex))
    assert found["libraries"]["apex"] == {"installed": True, "usable": False}
    assert found["libraries"]["numba"] is True
    assert found["libraries"]["torch.compile"] is False
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["memory"] > 2**30
    assert found["limits"]["open files"] == 1024
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["speed"]["product, fp32"]["flops_per_second"] > 0


@pytest.mark.parametrize("more", [0, 1])
def test_cores_that_are_left_idle(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2 * torch.get_num_threads() + more)
    found = machine.devices(torch.device("cpu"), 2)
    assert sum(isinstance(each, Problem) for each in found) == more


def test_a_speed_is_that_of_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "seconds", lambda call, device: 0.125)
    (fact, *_) = machine.speed(torch.device("cpu"))
    assert isinstance(fact, Fact)
    assert fact.value["flops_per_second"] == 2 * 512**3 / 0.125


def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["--tensor-model-parallel-size", 2, "--json", file]
    run_script(ROOT / "tools" / "doctor.py", *words, world=2, folder=tmp_path)
    found = json.loads(file.read_text())
    assert found["ranks"]["rank 1"]["coordinates"] == {"data": 0, "tensor": 1}
    assert found["all-reduce"]["data axis"] == {"size": 1}
    assert found["environment"]["WORLD_SIZE"] == "2"
    for size in ("1 KB", "1 MB", "8 MB"):
        each = found["all-reduce"][f"tensor axis, {size}"]
        assert each["right"] is True
        assert each["backend"] == "gloo"
        assert each["bus_bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"])


def test_a_collective_takes_as_long_as_its_slowest_rank() -> None:
    mesh = MagicMock(device=torch.device("cpu"))
    mesh.control.gather.return_value = [(True, 0.5), (True, 2.0)]
    (fact,) = links._one_size(serial_mesh().data, "gloo", 1024, mesh)
    assert isinstance(fact, Fact)
    assert fact.value["seconds"] == 2


def spoiled_sums() -> list[str]:
    """The problems that are reported where rank 3 of 2 x 2 gets wrong sums."""
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


def test_wrong_sum(gloo: Pool) -> None:
    for whats in gloo.run(4, spoiled_sums):
        assert len(whats) == 6
        for what, axis in zip(whats, ["data"] * 3 + ["tensor"] * 3, strict=True):
            assert f"{axis} axis" in what
            assert "rank 3" in what


def test_failed_probe() -> None:
    def probe() -> Iterator[Fact]:
        yield Fact("first", 1)
        raise OSError("gone\nfor good")

    report = Report()
    report.run("part", "probe", probe, cure="look", is_needed=False)
    failed = {"failed": ["OSError: gone", "for good"]}
    assert report.record()["part"] == {"first": 1, "probe": failed}
    assert [each.cure for each in report.problems] == ["look"]
    assert report.is_healthy
    report.run("part", "probe", probe, cure="look")
    assert not report.is_healthy


def test_cures_of_libraries() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {line.partition("==")[0] for line in lines}
    assert machine.libraries(torch.device("cpu")).keys() - required == doctor.CURES.keys()


def test_missing_folder(tmp_path: Path) -> None:
    words = ["--json", str(tmp_path / "none" / "report.json")]
    assert field_of(refusal(lambda: doctor.main(words, {}))) == "--json"
