"""benchmarks/output_layer.py in miniature."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [1, 2])
def test_both_ways_are_measured_and_their_memory(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "benchmarks/output_layer.py", "--vocab-size", "20000"]
    command += ["--hidden-size", "16", "--tokens", "16000", "--rounds", "2"]
    command += ["--tensor-parallel", str(size), "--json", str(tmp_path / "record.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "record.json").read_bytes())
    chunked = record["contenders"]["logits in chunks"]
    whole = record["contenders"]["all logits at once"]
    assert len(record["over_at_once"]) == 2
    assert 0 < chunked["step_seconds"]["p10"] <= chunked["step_seconds"]["p90"]
    logits = 16_000 * 20_000 * 4
    assert whole["extra_bytes"] > logits
    assert chunked["extra_bytes"] < logits / 1.5
