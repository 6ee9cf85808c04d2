"""What tools/plan.py tells scripts and people beside the plan: exit status, help, hardware."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRESET = ["--preset", "scripts/presets/gpt2_8.3b.toml"]
DGX2H = ["--hardware", "dgx2h"]
ONE_DEVICE = ["--gpus", "1", "--tensor-model-parallel-size", "1"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([*PRESET, *DGX2H, "--gpus", "8"], 0),
        ([*PRESET, *DGX2H, *ONE_DEVICE], 1),  # 8.3 billion parameters in 32 GB
        (["--gpus", "8"], 2),
        ([*PRESET, *DGX2H, "--gpus", "8", "--sequence-parallel"], 2),
    ],
)
def test_exit_status_says_whether_the_plan_fits(arguments: list[str], status: int) -> None:
    assert run(*arguments).returncode == status


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], [*PRESET, "--help"]])
def test_help_lists_all_three_uses(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    for word in ("figure5", "--measure", "--hardware", "--gpus", "--num-layers"):
        assert word in done.stdout


def test_hardware_that_is_assumed_is_named() -> None:
    assumed, given = run(*PRESET, "--gpus", "8"), run(*PRESET, "--gpus", "8", *DGX2H)
    assert assumed.stdout == given.stdout
    assert "--hardware" in assumed.stderr
    assert "dgx2h" in assumed.stderr
    assert not given.stderr
