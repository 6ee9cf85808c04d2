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
    ended = run(tmp_path, "host", "sizes")
    assert (ended.returncode, "host_reads" in ended.stderr) == (1, True)
    stubbed = json.loads((tmp_path / "8.3B_one_rank_of_8.json").read_text())[0]["contenders"]
    assert [len(each["rounds"]) for each in stubbed] == [1, 1]
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("# Whole training steps beside those of others") == 3
    assert "# host_reads\n\nStatus" in page
    assert run(tmp_path, "speeed").returncode == 2


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    names = "hardware matrix modes host loss compile dropout speed sizes"
    groups = names.split()
    ended = run(tmp_path, *groups)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
