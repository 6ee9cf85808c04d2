"""The one command for a GPU, in miniature on a CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.run import ROOT


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "benchmarks/gpu.sh", *words, "--device", "cpu", "--small"]
    environ = {**os.environ, "OUT": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def test_runs_leave_pages_and_one_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "host_reads.json").mkdir()  # so that the run cannot write
    ended = run(tmp_path, "host", "loss")
    assert (ended.returncode, "host_reads" in ended.stderr) == (1, True)
    found = json.loads((tmp_path / "output_layer.json").read_text())[0]["contenders"]
    assert [len(each["rounds"]) for each in found] == [1] * 4
    page = (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "output_layer.md").read_text() in page
    assert "# host_reads\n" in page
    assert run(tmp_path, "speeed").returncode == 2


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    names = "hardware matrix modes host loss compile dropout speed sizes"
    ended = run(tmp_path, *names.split())
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
