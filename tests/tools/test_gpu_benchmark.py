"""The one command for a GPU: its page, its limits, and all of it in miniature on a CPU."""

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

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
    assert "transformers, compiled, its time over this project's | at least 1.30 | not mea" in page
    assert "124M: this project" not in page, "a group that was not run"
    assert "## 4.2B\n\nfailed: KeyError" in page
    assert "Out of memory: plain torch." in page
    assert "this project: warning: layers are not compiled" in page
    assert "| floor |" in page


def test_what_has_no_time_left_is_told(tmp_path: Path) -> None:
    now = time.monotonic()
    found = dict(gpu.results(gpu.RUNS, "cpu", tmp_path, is_small=True, until=now))
    assert set(found) == {run.name for run in gpu.RUNS}
    assert all(each == {"failed": "left out: there was no time left"} for each in found.values())


def test_every_group_and_all_short_ones_have_the_time_that_they_need() -> None:
    assert {wanted.run for wanted in gpu.WANTED} <= {run.name for run in gpu.RUNS}
    seconds = dict.fromkeys(get_args(gpu.Group), 0.0)
    for run in gpu.RUNS:
        seconds[run.group] += run.seconds
    assert sum(each for group, each in seconds.items() if group not in gpu.LONG) < 560
    assert all(0 < each < 560 for each in seconds.values())


def test_records_are_kept_of_the_same_commit_and_machine_alone(tmp_path: Path) -> None:
    about = {"commit": "abc", "device": "cuda", "small": False, "gpu": "H200"}
    file = tmp_path / "gpu.json"
    assert gpu.kept(file, about) == {}
    runs = {"host reads": {"reads": {}}}
    others = ("commit", "abd"), ("device", "cpu"), ("small", True), ("gpu", "H100")
    for commit, is_known in (("abc", True), ("abc-dirty", False), (None, False)):
        own = about | {"commit": commit}
        file.write_text(json.dumps({**own, "runs": runs}))
        assert gpu.kept(file, own) == (runs if is_known else {})
        assert not any(gpu.kept(file, own | {name: value}) for name, value in others)


def check(runs: dict[str, Any], page: str, expected: Sequence[gpu.Run]) -> None:
    assert list(runs) == [run.name for run in expected]
    for run in expected:
        assert f"## {run.name}\n" in page
        if isinstance(run, gpu.Steps):
            names = [name for name in run.contenders if name != COMPILED]
            assert list(runs[run.name]["contenders"]) == names
            assert runs[run.name]["tensor_parallel"] == run.one_rank_of
    assert {*runs["host reads"]["reads"].values()} == {1}
    assert "bf16, 64 tokens, hidden 32, vocabulary 512." in page
    assert "### Where the time goes: this project" in page


def test_runs_of_each_kind_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiled, and of one rank of many; what another group has left stays."""
    contenders = (OURS, COMPILED, COORDINATES, KERNEL)
    chosen: list[gpu.Run] = []
    for run in gpu.RUNS:
        if not isinstance(run, gpu.Steps) or run.one_rank_of > 1:
            chosen.append(replace(run, seconds=3600.0))
        elif run.group == "compile":
            chosen.append(replace(run, seconds=3600.0, contenders=contenders))
    monkeypatch.setattr(gpu, "RUNS", tuple(chosen))
    monkeypatch.setattr(gpu, "facts", lambda *names: {"commit": "this"})
    gpu.main(("sizes",), output=tmp_path, device="cpu", small=True, seconds=3600.0)
    gpu.main(output=tmp_path, device="cpu", small=True, seconds=3600.0)
    runs = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    check(runs, (tmp_path / "gpu.md").read_text(), [chosen[-1], *chosen[:-1]])
    hardware = tomllib.loads((tmp_path / "hardware.toml").read_text())
    assert hardware["peak"]["bf16"]["value"] > 0


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    command = ["bash", "benchmarks/gpu.sh", *get_args(gpu.Group), "--device", "cpu", "--small"]
    environ = {**os.environ, "OUT": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    runs = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    check(runs, (tmp_path / "gpu.md").read_text(), gpu.RUNS)
