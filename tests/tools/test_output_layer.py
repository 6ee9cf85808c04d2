"""benchmarks/output_layer.py in miniature; on one rank test_gpu_benchmark.py runs it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_both_ways_are_measured_and_their_memory(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/output_layer.py", "--vocab-size", "8000"]
    command += ["--hidden-size", "16", "--tokens", "16000", "--rounds", "2"]
    command += ["--tensor-parallel", "2", "--json", str(tmp_path / "record.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "record.json").read_bytes())
    chunked = record["contenders"]["logits in chunks"]
    whole = record["contenders"]["all logits at once"]
    assert len(record["over_at_once"]) == 2
    assert 0 < chunked["step_seconds"]["p10"] <= chunked["step_seconds"]["p90"]
    logits = 16_000 * 8_000 * 4  # bytes
    assert whole["extra_bytes"] > logits
    assert chunked["extra_bytes"] < logits / 1.5
