"""Without megatron/parallel/cpu all runs in plain torch, and the equalities still hold."""

import shutil
import subprocess
import sys
from pathlib import Path

from megatron.parallel import kernels

ROOT = Path(__file__).parents[2]
LAYOUTS = "tests/layouts/test_matrix.py::test_a_layout_equals_one_process_and_divides_the_work"
TESTS = (
    "tests/parallel/test_layers.py::test_layers_equal_those_of_torch_on_processes[2-2]",
    "tests/parallel/test_layers.py::test_layers_equal_those_of_torch[2d]",
    "tests/parallel/test_buckets.py::test_narrow_buckets_round_a_sum_once",
    "tests/parallel/test_buckets.py::test_bf16_gradients_accumulate_in_fp32",
    "tests/models/test_own_kernels.py",
    "tests/parallel/test_cross_entropy.py::test_the_incoming_gradient_may_be_any_number",
    "tests/models/test_gpt2.py::test_gpt2_equals_plain_torch",
    f"{LAYOUTS}[tensor=2-gpt2]",
)


def test_the_equality_tests_pass_without_the_folder(tmp_path: Path) -> None:
    """A copy, since the ranks that a test starts import the folder, too."""
    for name in ("megatron", "tools", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "cpu" if name == "megatron" else "")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    plain = "from megatron.parallel import kernels; raise SystemExit(kernels.use_cpu_kernels)"
    assert subprocess.run([sys.executable, "-c", plain], cwd=tmp_path, check=False).returncode == 0
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_this_run_has_the_kernels() -> None:
    assert kernels.use_cpu_kernels == (ROOT / "megatron" / "parallel" / "cpu").is_dir()
