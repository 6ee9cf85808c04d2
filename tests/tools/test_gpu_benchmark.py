"""The one command for a GPU: its page, its limits, and all of it in miniature on a CPU."""

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.cases import COMPILED, COORDINATES, FLOOR, FULL, KERNEL, OURS
from benchmarks.comparison import ROOT


def test_what_takes_too_long_is_ended_whole() -> None:
    status, printed = gpu.done(["bash", "-c", "sleep 600 & echo $!; sleep 600"], 5.0)
    assert status is None
    state = Path(f"/proc/{printed.strip()}/stat")
    deadline = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "a process of the run is still there"
        time.sleep(0.1)


def figures(seconds: float, **utilisation: float) -> dict[str, Any]:
    quantiles = {"median": seconds, "p10": seconds, "p90": seconds}
    return {
        "tokens_per_second": quantiles,
        "step_seconds": quantiles,
        "cpu_seconds": quantiles,
        "peak_memory_bytes": 2**30,
        "share_of_floor": 0.5,
        "ours_over_it": quantiles,
        "mfu": None,
        "hfu": None,
    } | utilisation


def test_page_tells_what_is_met_and_what_has_failed() -> None:
    record = {
        "dtype": "bf16",
        "case": {"batch": 8, "sequence": 1024},
        "loss_difference": None,
        "contenders": {OURS: figures(1.0, mfu=0.5), FULL: figures(1.3, mfu=0.4, hfu=0.61)},
        "seconds": {OURS: [1.0], FULL: [1.3], FLOOR: [0.5]},
        "out_of_memory": ["plain torch"],
        "notes": {OURS: ["warning: layers are not compiled"]},
    }
    dropped = {
        "contenders": {COORDINATES: figures(1.35), KERNEL: figures(1.25)},
        "seconds": {COORDINATES: [1.35], KERNEL: [1.25]},
    }
    runs = {
        "1.2B": record,
        "1.2B, recomputation": record,
        "124M, dropout": record | dropped,
        "4.2B": {"failed": "failed: KeyError"},
    }
    page = gpu.page({"gpu": "H200"}, runs)
    assert "| 1.2B: this project, MFU | at least 55.0 % | 50.0 % | no |" in page
    assert "full recomputation, HFU | at least 60.0 % | 61.0 % | yes |" in page
    assert "full recomputation, its time over this project's | at most 1.33 | 1.30 | yes |" in page
    assert f"its time over that of {KERNEL} | at most 1.10 | 1.08 | yes |" in page
    assert "| 124M: this project, MFU | at least 45.0 % | not measured |  |" in page
    assert "## 4.2B\n\nfailed: KeyError" in page
    assert "Out of memory: plain torch." in page
    assert "this project: warning: layers are not compiled" in page
    assert "| floor |" in page


def test_what_has_no_time_left_is_told() -> None:
    found = dict(gpu.results("cpu", is_small=True, until=time.monotonic()))
    assert set(found) == {run.name for run in gpu.RUNS}
    assert all(each == {"failed": "left out: there was no time left"} for each in found.values())


def test_all_of_it_may_take_no_longer_than_its_limit() -> None:
    assert {wanted.run for wanted in gpu.WANTED} <= {run.name for run in gpu.RUNS}
    first = [run.seconds for run in gpu.RUNS[:4]]  # what most of the wanted figures come of
    assert sum(first) < 560


def check(runs: dict[str, Any], page: str, expected: Sequence[gpu.Run]) -> None:
    assert list(runs) == [run.name for run in expected]
    for run in expected:
        names = [name for name in run.contenders if name != COMPILED]
        assert list(runs[run.name]["contenders"]) == names
        if run.preset is not None:
            assert runs[run.name]["tensor_parallel"] == run.one_rank_of
    assert "bf16, 64 tokens, hidden 32, vocabulary 512." in page
    assert "### Where the time goes: this project" in page


def test_runs_of_each_kind_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiled, of the output layer, and of one rank of many."""
    first = replace(gpu.RUNS[0], contenders=(OURS, COMPILED, COORDINATES, KERNEL))
    others = [run for run in gpu.RUNS if run.preset is None or run.one_rank_of > 1]
    patient = tuple(replace(run, seconds=3600.0) for run in (first, *others))
    monkeypatch.setattr(gpu, "RUNS", patient)
    gpu.main(tmp_path, device="cpu", small=True, seconds=3600.0)
    runs = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    check(runs, (tmp_path / "gpu.md").read_text(), gpu.RUNS)
    assert len(runs) == 3


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    command = ["bash", "benchmarks/gpu.sh", "--device", "cpu", "--small"]
    environ = {**os.environ, "OUT": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    runs = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    check(runs, (tmp_path / "gpu.md").read_text(), gpu.RUNS)
    hardware = tomllib.loads((tmp_path / "hardware.toml").read_text())
    assert hardware["peak"]["bf16"]["value"] > 0
