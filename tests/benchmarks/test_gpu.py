"""The one command for a GPU, in miniature on a CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import rows
from tests.benchmarks.run import ROOT


def run(folder: Path, *words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["bash", "benchmarks/gpu.sh", *words, "--device", "cpu", "--small"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # has a python3
    environ = {**os.environ, "OUT": str(folder), "PATH": path}
    return subprocess.run(
        command, cwd=root, env=environ, capture_output=True, text=True, check=False
    )


def test_a_failed_run_is_shown_beside_the_others(tmp_path: Path) -> None:
    """In a copy without git and .venv, in which nothing is written."""
    root, out = tmp_path / "copy", tmp_path / "out"
    for name in ("benchmarks", "megatron", "tools", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = {each: each.stat().st_mtime_ns for each in root.rglob("*")}
    (out / "tensor_modes.json").mkdir(parents=True)  # so that the run cannot write
    ended = run(out, "profile", "modes", root=root)
    assert (ended.returncode, "tensor_modes" in ended.stderr) == (1, True)
    assert {each: each.stat().st_mtime_ns for each in root.rglob("*")} == before
    page = (out / "gpu.md").read_text()
    assert (out / "124M_profile.md").read_text() in page
    assert "# tensor_modes\n" in page
    found = json.loads((out / "gpu.json").read_text())
    assert found["without_figures"] == ["tensor_modes"]
    names = ["this project", "plain torch, compiled", "this project, not compiled"]
    assert [each["contender"] for each in found["rows"]] == names
    for each in found["rows"]:
        assert (each["run"], each["model"]) == ("124M_profile", "gpt2_124m, bf16, t = 1")
        assert each["tokens_per_s"] > 0 < each["peak_gib"]
        assert {"matmul", "idle"} < {*each["device_ms"]}
    assert run(out, "speeed").returncode == 2


def test_a_row_has_the_figures_of_a_gpu() -> None:
    of_gpu = {"launches": 9, "reads": 1, "host_ms": 3.0, "device_ms": {"matmul": 2.0, "idle": 1.0}}
    turns = {"wall": [2.0], "peak_bytes": 2**30, "tokens": 8}
    whole = {"group": "124M", "name": "ours", "reason": "", "facts": {"mfu": 84.0}}
    wanted = {"model": "124M", "contender": "ours", "seconds": 2.0, "tokens_per_s": 4.0}
    wanted |= {"mfu": 42.0, "peak_gib": 1.0}
    assert rows({"contenders": [whole | {"rounds": [turns | of_gpu]}]}) == [wanted | of_gpu]


@pytest.mark.sweep
def test_all_groups(tmp_path: Path) -> None:
    names = "hardware speed 1.2b-8x1024 sizes plan profile graph loss dropout offload modes hf ring"
    ended = run(tmp_path, *names.split(), "vit")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not [row for row in found["rows"] if "reason" in row]
