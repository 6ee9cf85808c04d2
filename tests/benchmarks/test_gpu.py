"""The one command for a GPU, in miniature on a CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.output_layer import AT_ONCE, CHUNKED
from tests.benchmarks.run import ROOT


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "benchmarks/gpu.sh", *words, "--device", "cpu", "--small"]
    environ = {**os.environ, "OUT": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def test_a_failed_run_is_shown_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "tensor_modes.json").mkdir()  # so that the run cannot write
    ended = run(tmp_path, "loss", "modes")
    assert (ended.returncode, "tensor_modes" in ended.stderr) == (1, True)
    page = (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "output_layer.md").read_text() in page
    assert "# tensor_modes\n" in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["without_figures"] == ["tensor_modes"]
    rows = [(each["run"], each["contender"]) for each in found["rows"]]
    assert rows == [("output_layer", each) for each in (AT_ONCE, CHUNKED)] * 2
    assert all(each["seconds"] > 0 for each in found["rows"])
    assert run(tmp_path, "speeed").returncode == 2


@pytest.mark.sweep
def test_all_groups(tmp_path: Path) -> None:
    names = "hardware speed sizes plan loss dropout offload modes hf ring"
    ended = run(tmp_path, *names.split())
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not [row for row in found["rows"] if "reason" in row]
