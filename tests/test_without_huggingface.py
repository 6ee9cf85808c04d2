"""The rest of megatron/ works without megatron/huggingface."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUTS = "tests/layouts/test_matrix.py::test_a_layout_equals_one_process_and_divides_the_work"
TESTS = (
    f"{LAYOUTS}[tensor=2-gpt2]",
    f"{LAYOUTS}[tensor=2-bert-post-ln-selective]",
    f"{LAYOUTS}[tensor=2-llama]",
)
TRAIN = "--model gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
TRAIN += " --vocab-size 96 --micro-batch-size 2 --train-iters 2 --mock-data --no-bf16 --save saved"


def test_the_rest_works_without_the_folder(tmp_path: Path) -> None:
    """A copy, since the ranks that a test starts import the folder, too. megatron is a namespace:
    what the copy lacks would be found in an installation, so a file that raises takes its place."""
    for name in ("megatron", "tools", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "huggingface" if name == "megatron" else "")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "pretrain.py"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / "megatron" / "huggingface"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ModuleNotFoundError(__name__)\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert "ModuleNotFoundError" in run("-c", "import megatron.huggingface.config").stderr
    tests = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    for ended in (run("pretrain.py", *TRAIN.split()), run(*tests)):
        assert ended.returncode == 0, ended.stdout + ended.stderr
