"""scripts/setup.sh --with-apex, in a copy of the project whose Python and nvcc are stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT

# Records its arguments and apex's switches; $TORCH_STATUS answers whether torch is one for CUDA.
PYTHON = """#!/usr/bin/env bash
echo "${APEX_CPP_EXT:-}${APEX_CUDA_EXT:-} $*" >> "$LOG"
case "$*" in *torch.version.cuda*) exit "${TORCH_STATUS:-0}" ;; esac
"""


def stub(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The copy, some tools, and something like a checkout of apex."""
    stub(tmp_path / "copy" / ".venv" / "bin" / "python", PYTHON)
    (tmp_path / "copy" / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "copy" / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        (tmp_path / "copy" / name).touch()
    stub(tmp_path / "tools" / "nvcc", "#!/usr/bin/env bash\n")
    for name in ("bash", "env", "dirname", "realpath", "cat", "cmp", "rm", "tee"):
        (tmp_path / "tools" / name).symlink_to(str(shutil.which(name)))
    stub(tmp_path / "nvidia" / "setup.py", "from setuptools import setup\n")
    (tmp_path / "nvidia" / "apex").mkdir()
    return tmp_path


def setup(folder: Path, *words: str, torch: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": str(folder / "tools"), "CUDA_HOME": "/none", "LOG": str(folder / "log")}
    environ["TORCH_STATUS"] = "0" if torch else "1"
    command = ["bash", "copy/scripts/setup.sh", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def installs(folder: Path) -> list[str]:
    calls = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [call for call in calls if "-m pip install" in call]


def test_missing_parts(folder: Path) -> None:
    (folder / "tools" / "nvcc").unlink()
    for words, torch, missing in (
        (["nowhere"], True, {"checkout", "nvcc"}),
        (["nvidia"], False, {"nvcc", "torch"}),
    ):
        ended = setup(folder, "--with-apex", *words, torch=torch)
        assert ended.returncode == 2
        assert {word for word in ("checkout", "nvcc", "torch") if word in ended.stderr} == missing
    assert not installs(folder)


def test_build_of_apex(folder: Path) -> None:
    for _ in range(2):  # the second time all is complete
        assert setup(folder, "--test").returncode == 0
        assert len(installs(folder)) == 2
    assert setup(folder, "--with-apex", "nvidia").returncode == 0
    build = installs(folder)[-1]
    assert build.startswith("11 ")  # APEX_CPP_EXT and APEX_CUDA_EXT
    assert build.endswith(f" {folder}/nvidia")
